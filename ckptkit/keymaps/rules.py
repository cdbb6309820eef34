"""Defines a key map's rules. Each rule transforms the tensors that it matches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.targets import Target, concatenated
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.keymaps.patterns import NamePattern, placeholders, render

# A number, a key of config.json ("num_key_value_heads"), or a product of numbers and keys ("2*head_dim").
Size = int | str
Sizes = tuple[Size, ...] | Literal["equal"] | None


@dataclass(frozen=True, slots=True)
class Rename:
    """A rule that renames the tensors that match `source`. `to` is the template of the new name."""

    source: NamePattern
    to: str


@dataclass(frozen=True, slots=True)
class Drop:
    """A rule that drops the tensors that match `source`. `why` is the reason that the user sees."""

    source: NamePattern
    why: str = "dropped by the key map"


@dataclass(frozen=True, slots=True)
class Split:
    """A rule that splits a tensor along `dim`, into one tensor per name in `to`.

    `sizes` are the sizes of the new tensors along `dim`. By default, all sizes are equal.
    """

    source: NamePattern
    to: tuple[str, ...]
    dim: int = 0
    sizes: Sizes = "equal"


@dataclass(frozen=True, slots=True)
class Concat:
    """A rule that concatenates tensors along `dim`: one tensor for each pattern in `source`.

    `sizes` are the sizes that the source tensors must have along `dim`. None accepts any sizes, but then the rule
    cannot be inverted.
    """

    source: tuple[NamePattern, ...]
    to: str
    dim: int = 0
    sizes: Sizes = None


@dataclass(frozen=True, slots=True)
class Stack:
    """A rule that stacks numbered tensors along a new dimension `dim`.

    `index` names the placeholder in `source` that matches the number: "i" for "experts.{i:d}.w1".
    """

    source: NamePattern
    to: str
    dim: int = 0
    index: str = "i"


@dataclass(frozen=True, slots=True)
class Unstack:
    """A rule that splits a tensor into one tensor per position along `dim`, and removes this dimension.

    `index` names the placeholder in `to` that stands for the position: "i" for "experts.{i}.w1".
    """

    source: NamePattern
    to: str
    dim: int = 0
    index: str = "i"


@dataclass(frozen=True, slots=True)
class Transpose:
    """A rule that permutes the dimensions. If `dims` is empty, the rule swaps the last two dimensions."""

    source: NamePattern
    dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RopePermute:
    """A rule that reorders the rows of each attention head into another layout for rotary embeddings (RoPE).

    RoPE rotates pairs of rows. With `to="interleaved"`, the two rows of a pair are adjacent, as in Meta's code. With
    `to="halves"`, the first row is in the first half of the head and the second row in the second half, as in
    transformers. `heads` is the number of heads.
    """

    source: NamePattern
    heads: Size
    to: Literal["halves", "interleaved"] = "halves"


@dataclass(frozen=True, slots=True)
class Cast:
    """A rule that casts to another float dtype. Only fp64, fp32, fp16 and bf16 tensors can be cast."""

    source: NamePattern
    dtype: str


@dataclass(frozen=True, slots=True)
class Pad:
    """A rule that extends dimension `dim` to `size`. A load does not change the added elements in the model."""

    source: NamePattern
    size: Size
    dim: int = 0


_MAX_PIECES = 1 << 16  # per tensor; the limit is needed, because a tensor without elements may have any number of rows

Rule = Rename | Drop | Split | Concat | Stack | Unstack | Transpose | RopePermute | Cast | Pad


@dataclass(slots=True)
class RuleState:
    """The state while a map is applied: the tensors so far, the dropped tensors, and errors.

    `touched` contains the current names of all tensors that a rule has matched. `dropped_numel` contains, for each
    source tensor, the number of dropped elements.
    """

    targets: dict[str, Target]
    config: Mapping[str, Any]
    touched: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    dropped_numel: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def drop(self, names: Iterable[str], why: str) -> None:
        """Drop tensors. Adds the numbers of their elements to `dropped_numel`."""
        gone = list(names)
        for part in (part for name in gone for part in self.targets[name].parts):
            self.dropped[part.source] = why
            self.dropped_numel[part.source] = self.dropped_numel.get(part.source, 0) + part.source_box.numel
        self.replaced(gone, [])

    def replaced(self, taken: Iterable[str], made: Iterable[tuple[str, Target]]) -> None:
        """Remove the tensors that a rule matched, and add those that it made. Adds an error if names collide."""
        gone = set(taken)
        if not gone:
            return
        self.touched -= gone
        left: dict[str, Target] = {name: t for name, t in self.targets.items() if name not in gone}
        for name, target in made:
            if name in left:
                both = f"{_origin(left[name])} and {_origin(target)}"
                self.faults.append(f"two tensors would be called {name!r}: {both}")
            elif not name:
                self.faults.append(f"{_origin(target)} would have an empty name")
            else:
                left[name] = target.renamed(name)
                self.touched.add(name)
        self.targets = left


def run(rule: Rule, work: RuleState) -> int:
    """Apply one rule, and return the number of tensors that the rule matches. Adds errors to `work.faults`."""
    if isinstance(rule, (Concat, Stack)):
        return _join_pieces(rule, work)
    taken: list[str] = []
    made: list[tuple[str, Target]] = []
    match = rule.source.matcher()
    for name, target in work.targets.items():
        bound = match(name)
        if bound is None:
            continue
        try:
            made += [] if isinstance(rule, Drop) else _MAKERS[type(rule)](rule, target, bound, work.config)
            taken.append(name)
        except CheckpointMismatchError as error:
            work.faults.append(str(error))
    if isinstance(rule, Drop):
        work.drop(taken, rule.why)
    else:
        work.replaced(taken, made)
    return len(taken)


def size_of(size: Size, config: Mapping[str, Any], rule: str) -> int:
    """Return the value of a size such as "2*head_dim". Raises UsageError if `config` lacks a key in `size`."""
    if isinstance(size, int):
        return size
    product = 1
    for factor in size.split("*"):
        key = factor.strip()
        value = int(key) if _is_number(key) else _config_value(config, key)
        if value is None:
            have = "there is no config.json" if not config else "config.json has no such integer"
            raise UsageError(
                f"{rule}: size {key!r} is a key of config.json, but {have}. Give --base. In a key map of your own, "
                "the size may also be a number. A load in a job uses the live model's `config`."
            )
        product *= value
    return product


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19


def _config_value(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None and isinstance(config.get("text_config"), Mapping):
        value = config["text_config"].get(key)
    if value is None and key == "num_key_value_heads":  # multi-head attention has one key head per query head
        return _config_value(config, "num_attention_heads")
    if value is None and key == "head_dim":
        hidden, heads = _config_value(config, "hidden_size"), _config_value(config, "num_attention_heads")
        return hidden // heads if hidden and heads else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# --- rules that apply to one tensor: each function returns the new names and tensors

_Bound = Mapping[str, str]
_Config = Mapping[str, Any]
_Made = list[tuple[str, Target]]


def _rename(rule: Rename, target: Target, bound: _Bound, config: _Config) -> _Made:
    return [(render(rule.to, bound), target)]


def _split(rule: Split, target: Target, bound: _Bound, config: _Config) -> _Made:
    dim, n = dim_of(target, rule.dim, "split"), len(rule.to)
    if rule.sizes is None or rule.sizes == "equal":
        sizes = [target.shape[dim] // n] * n
    else:
        sizes = [size_of(size, config, f"split of {rule.source}") for size in rule.sizes]
    if sum(sizes) != target.shape[dim] or min(sizes) < 0:
        raise CheckpointMismatchError(
            f"{target.name!r} of shape {list(target.shape)} can't be split along {dim} into {n} parts of {sizes}"
        )
    return [(render(to, bound), piece) for to, piece in zip(rule.to, target.split(dim, sizes), strict=True)]


def _unstack(rule: Unstack, target: Target, bound: _Bound, config: _Config) -> _Made:
    dim = dim_of(target, rule.dim, "unstack")
    if target.shape[dim] == 0:
        raise CheckpointMismatchError(f"{target.name!r} of shape {list(target.shape)} has no elements along {dim}")
    if target.shape[dim] > _MAX_PIECES:
        raise CheckpointMismatchError(
            f"{target.name!r} of shape {list(target.shape)} would be split into {target.shape[dim]} tensors; "
            f"{_MAX_PIECES} are allowed"
        )
    return [(render(rule.to, {**bound, rule.index: str(i)}), piece) for i, piece in enumerate(unbound(target, dim))]


def _transpose(rule: Transpose, target: Target, bound: _Bound, config: _Config) -> _Made:
    n = len(target.shape)
    dims = rule.dims or (*range(n - 2), *range(n - 1, max(n - 3, -1), -1))
    if (n < 2 and not rule.dims) or sorted(dims) != list(range(n)):
        raise CheckpointMismatchError(f"{target.name!r} of shape {list(target.shape)} can't be transposed by {dims}")
    return [(target.name, target.transposed(tuple(dims)))]


def _rope_permute(rule: RopePermute, target: Target, bound: _Bound, config: _Config) -> _Made:
    heads = size_of(rule.heads, config, f"rope permutation of {target.name!r}")
    if not target.shape or heads < 1 or target.shape[0] % (2 * heads):
        raise CheckpointMismatchError(
            f"{target.name!r} of shape {list(target.shape)}: the rows cannot be divided into {heads} heads, each "
            "with an even number of rows"
        )
    return [(target.name, target.rope_permuted(heads, to_halves=rule.to == "halves"))]


def _cast(rule: Cast, target: Target, bound: _Bound, config: _Config) -> _Made:
    wanted = dtype_of(rule.dtype)
    if wanted.kind != "float" or dtype_of(target.dtype).kind != "float":
        raise CheckpointMismatchError(f"{target.name!r} is {target.dtype}, which can't be cast to {wanted.name}")
    return [(target.name, replace(target, dtype=wanted.name))]


def _pad(rule: Pad, target: Target, bound: _Bound, config: _Config) -> _Made:
    dim, size = dim_of(target, rule.dim, "pad"), size_of(rule.size, config, f"padding of {target.name!r}")
    if size < target.shape[dim]:
        raise CheckpointMismatchError(
            f"{target.name!r} of shape {list(target.shape)} can't be padded to {size} along {dim}: its size is larger"
        )
    return [(target.name, target.resized(dim, size))]


_MAKERS: dict[type, Callable[[Any, Target, _Bound, _Config], _Made]] = {
    Rename: _rename,
    Split: _split,
    Unstack: _unstack,
    Transpose: _transpose,
    RopePermute: _rope_permute,
    Cast: _cast,
    Pad: _pad,
}


# --- rules that join several tensors


def _join_pieces(rule: Concat | Stack, work: RuleState) -> int:
    """Collect the pieces of each new tensor by their numbers, and join them."""
    found: dict[str, dict[int, Target]] = {}
    for number, pattern in enumerate(rule.source if isinstance(rule, Concat) else (rule.source,)):
        match = pattern.matcher()
        for name, target in work.targets.items():
            bound = match(name)
            if bound is None or (isinstance(rule, Stack) and not _is_number(bound[rule.index])):
                continue
            index, to = int(bound[rule.index]) if isinstance(rule, Stack) else number, render(rule.to, bound)
            first = found.setdefault(to, {}).setdefault(index, target)
            if first is not target:
                work.faults.append(f"{to!r}: {first.name!r} and {target.name!r} would both be piece {index}")
    made: list[tuple[str, Target]] = []
    for to, pieces in found.items():
        try:
            joined = _concat(rule, to, pieces, work.config) if isinstance(rule, Concat) else _stack(rule, to, pieces)
            made.append((to, joined))
        except CheckpointMismatchError as error:
            work.faults.append(str(error))
    taken = [piece.name for pieces in found.values() for piece in pieces.values()]
    work.replaced(taken, made)
    return len(taken)


def _concat(rule: Concat, to: str, numbered: Mapping[int, Target], config: _Config) -> Target:
    pieces = list(numbered.values())
    missing = [str(pattern) for i, pattern in enumerate(rule.source) if i not in numbered]
    if missing:
        there = ", ".join(piece.name for piece in pieces)
        raise CheckpointMismatchError(f"{to!r} lacks {', '.join(missing)}; found only {there}")
    dim = dim_of(pieces[0], rule.dim, "concat")
    check_alike(to, pieces, dim)
    found = [piece.shape[dim] for piece in pieces]
    wanted = found
    if rule.sizes == "equal":
        wanted = [found[0]] * len(found)
    elif rule.sizes is not None:
        wanted = [size_of(size, config, f"concat to {rule.to}") for size in rule.sizes]
    if wanted != found:
        raise CheckpointMismatchError(f"{to!r}: its parts have sizes {found} along {dim}, but the rule wants {wanted}")
    return concatenated(to, pieces, dim)


def _stack(rule: Stack, to: str, numbered: Mapping[int, Target]) -> Target:
    most = max(numbered)
    gaps = sorted(set(range(most + 1)) - set(numbered)) if most < 10**6 else [len(numbered)]
    if gaps:
        raise CheckpointMismatchError(f"{to!r}: no tensor matches {rule.source} with {rule.index} = {gaps[:20]}")
    pieces = [numbered[i] for i in range(len(numbered))]
    check_alike(to, pieces, None)
    shape = pieces[0].shape
    dim = rule.dim if rule.dim >= 0 else rule.dim + len(shape) + 1
    if not 0 <= dim <= len(shape):
        raise CheckpointMismatchError(
            f"{to!r}: tensors of shape {list(shape)} cannot be stacked along dimension {rule.dim}"
        )
    return concatenated(to, [piece.unsqueezed(dim) for piece in pieces], dim)


# --- dimensions and pieces


def unbound(target: Target, dim: int) -> list[Target]:
    """Return one tensor per position along `dim`, without that dimension."""
    return [piece.squeezed(dim) for piece in target.split(dim, [1] * target.shape[dim])]


def dim_of(target: Target, dim: int, verb: str) -> int:
    """Return a dimension, counted from the front. Raises CheckpointMismatchError if the tensor does not have it."""
    found = dim + len(target.shape) if dim < 0 else dim
    if not 0 <= found < len(target.shape):
        raise CheckpointMismatchError(f"{target.name!r} of shape {list(target.shape)} has no dimension {dim} to {verb}")
    return found


def check_alike(to: str, pieces: Sequence[Target], dim: int | None) -> None:
    """Check that the pieces have equal dtypes, and equal shapes except along `dim`. Raises CheckpointMismatchError."""
    first = pieces[0]

    def rest(target: Target) -> tuple[int, ...]:
        return tuple(n for d, n in enumerate(target.shape) if d != dim)

    for piece in pieces[1:]:
        if rest(piece) != rest(first) or len(piece.shape) != len(first.shape):
            raise CheckpointMismatchError(
                f"{to!r} cannot be joined: {first.name!r} has shape {list(first.shape)}, but {piece.name!r} has "
                f"{list(piece.shape)}"
            )
        if (piece.dtype, piece.source_dtype) != (first.dtype, first.source_dtype):
            raise CheckpointMismatchError(
                f"{to!r} cannot be joined: {first.name!r} is {first.dtype}, but {piece.name!r} is {piece.dtype}"
            )


def _origin(target: Target) -> str:
    sources = target.sources
    return f"{sources[0]!r}" + (f" and {len(sources) - 1} more" if len(sources) > 1 else "") if sources else "nothing"


def written_templates(rule: Rule) -> tuple[str, ...]:
    """Return the templates of the new names, or () if the rule does not change names."""
    if isinstance(rule, Split):
        return rule.to
    return (rule.to,) if isinstance(rule, (Rename, Concat, Stack, Unstack)) else ()


def check_rule(rule: Rule) -> None:
    """Check the placeholders of a rule. Raises UsageError.

    A template may use only the placeholders of its pattern. The `index` of Stack must be in `source` and not in `to`.
    The `index` of Unstack must be in `to`.
    """
    patterns = rule.source if isinstance(rule, Concat) else (rule.source,)
    templates = written_templates(rule)
    extra = {rule.index} if isinstance(rule, Unstack) else set[str]()
    for template in templates:
        used = set(placeholders(template))
        for pattern in patterns:
            if used - extra - pattern.names():
                lost = ", ".join(f"{{{name}}}" for name in sorted(used - extra - pattern.names()))
                raise UsageError(f"{template!r} uses {lost}, which {pattern} does not bind.")
    if isinstance(rule, Stack) and (rule.index not in rule.source.names() or rule.index in placeholders(rule.to)):
        raise UsageError(f"stack: {{{rule.index}}} must be in {rule.source} and must not be in {rule.to!r}.")
    if isinstance(rule, Unstack) and rule.index not in placeholders(rule.to):
        raise UsageError(f"unstack: {rule.to!r} must contain {{{rule.index}}}, the number of the piece.")


# --- inverting rules


def inverse_rules(name: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return rules that undo `rules`: the inverse of each rule, in reverse order.

    Raises:
        UsageError: A rule cannot be inverted. For example, a drop, a cast, a rule with a regex, and a concat without
            sizes have no inverse.
    """
    inverted: list[Rule] = []
    for number, rule in enumerate(rules, start=1):
        try:
            inverted.append(_inverse(rule))
        except UsageError as error:
            raise UsageError(f"key map {name!r} can't be inverted: rule {number}: {error}") from error
    return tuple(reversed(inverted))


def _inverse(rule: Rule) -> Rule:
    if isinstance(rule, Rename):
        return Rename(_turned(rule.source, rule.to), _plain(rule.source.template))
    if isinstance(rule, Split):
        patterns = tuple(_turned(rule.source, to) for to in rule.to)
        return Concat(patterns, _plain(rule.source.template), rule.dim, rule.sizes)
    if isinstance(rule, Concat):
        if rule.sizes is None:
            raise UsageError("a concat without sizes does not say where to split.")
        sources = tuple(_plain(_template(pattern)) for pattern in rule.source)
        return Split(_turned(rule.source[0], rule.to), sources, rule.dim, rule.sizes)
    if isinstance(rule, Stack):
        return Unstack(
            _turned(rule.source, rule.to, lost=rule.index), _plain(_template(rule.source)), rule.dim, rule.index
        )
    if isinstance(rule, Unstack):
        source = _turned(rule.source, rule.to, gained=rule.index)
        return Stack(source, _plain(_template(rule.source)), rule.dim, rule.index)
    if isinstance(rule, Transpose):
        dims = tuple(rule.dims.index(d) for d in range(len(rule.dims)))
        return Transpose(rule.source, dims)
    if isinstance(rule, RopePermute):
        return RopePermute(rule.source, rule.heads, "interleaved" if rule.to == "halves" else "halves")
    raise UsageError(f"a {type(rule).__name__.lower()} rule has no inverse.")


def _turned(source: NamePattern, to: str, *, lost: str = "", gained: str = "") -> NamePattern:
    """Return a pattern for the names that the template `to` produces from names that match `source`.

    Placeholders match the same text as in `source`: {i:d} still matches only digits. `lost` is the placeholder that a
    stack removes. `gained` is the placeholder that an unstack adds; it matches digits.
    """
    known = placeholders(_template(source))
    gone = set(known) - set(placeholders(to)) - {lost}
    if gone:
        raise UsageError(f"{to!r} does not keep {', '.join(f'{{{x}}}' for x in sorted(gone))} of {source}.")
    return NamePattern(_with_kinds(to, {**known, gained: "d"}))


def _template(pattern: NamePattern) -> str:
    if not pattern.template:
        raise UsageError(f"the regex {pattern} has no inverse; write it as a template.")
    return pattern.template


def _plain(template: str) -> str:
    return re.sub(r"\{(\w+):[^{}]*\}", r"{\1}", template)


def _with_kinds(template: str, kinds: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: f"{{{m[1]}:{kinds[m[1]]}}}" if kinds.get(m[1]) else m[0], template)
