"""Finds Hub names with transformers' conversion table, if transformers is installed and our key maps do not suffice.

transformers 5 uses other names in memory than in Hub files, and splits or joins tensors. When transformers saves, it
converts back. To learn which entries of its conversion table apply, we build the model from config.json on the meta
device. The table's own functions return the names. This module implements the operations on tensors for `Target`s.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptkit.catalog.targets import Target, concatenated
from ckptkit.errors import CkptkitError
from ckptkit.keymaps.builtin import Choice
from ckptkit.keymaps.keymap import Mapped, NameMap, check_one_to_one
from ckptkit.keymaps.rules import check_alike, dim_of, unbound

if TYPE_CHECKING:
    from ckptkit.offline.export.base import WantedTensor

logger = logging.getLogger(__name__)

_COUNTS = re.compile(r".*(layers?|depths?|blocks?)$")


_Wanted: TypeAlias = "Mapping[str, WantedTensor]"


class _Unknown(Exception):
    """transformers does not know the model, or its conversion needs an operation that is not implemented here."""


@dataclass(frozen=True, slots=True)
class LiveModel:
    """The names of a model's tensors in transformers' memory, and the conversions between these and the Hub's names.

    Attributes:
        tied: Maps the second names of tied tensors to the first names.
        transforms: The entries of transformers' conversion table, in the order in which a load applies them.
        config: The model's config, as an object of transformers.
        prefix_change: transformers' class `PrefixChange`. Its instances in `transforms` add or remove a whole prefix.
    """

    tied: Mapping[str, str]
    transforms: tuple[Any, ...] = ()
    config: Any = None
    prefix_change: type | None = None

    def choose(self, targets: Mapping[str, Target], wanted: _Wanted, best: Choice) -> Choice:
        """Return the names from transformers if they match more of the base model's names (`wanted`) than `best` does.

        Otherwise, return `best`.
        """
        fewest = len(set(wanted) - set(best.mapped.targets))
        for transforms in self._variants(wanted):
            try:
                made = _reverted(targets, transforms, self.config, wanted)
                check_one_to_one(targets, made)
            except (_Unknown, CkptkitError):
                continue
            missing = len(set(wanted) - set(made))
            if missing < fewest:
                fit, before = len(wanted) - missing, len(wanted) - fewest
                why = f"{fit} of {len(wanted)} names match the base model, {before} without it"
                best, fewest = Choice(NameMap("transformers"), Mapped(made), why), missing
        return best

    def _is_prefix(self, transform: Any) -> bool:
        return self.prefix_change is not None and isinstance(transform, self.prefix_change)

    def _variants(self, wanted: Collection[str]) -> Iterable[tuple[Any, ...]]:
        """Yield subsets of `transforms` to try, because Hub files may lack a prefix or have one of several layouts."""
        if not self.transforms:
            return
        plain = tuple(t for t in self.transforms if not self._is_prefix(t))
        if plain:
            yield plain
        if len(plain) < len(self.transforms):
            yield self.transforms
        # Some tensors have several layouts on the Hub. Use only the converters for the base's layout.
        needed = _needed(self.transforms, wanted)
        if len(needed) < len(self.transforms):
            yield needed


def live_model(config: Mapping[str, Any] | None, wanted: Collection[str]) -> LiveModel | None:
    """Return the names and conversions of the installed transformers for the model in config.json.

    Returns None if transformers is not installed, is older than 5, or cannot build the model. Only transformers' own
    classes are called, never code from the model's author.
    """
    if not config or not _bounded(config, len(wanted)):
        return None
    try:
        model, transforms = _built(config)
        from transformers.core_model_loading import PrefixChange

        return LiveModel(_tied(model), transforms, model.config, PrefixChange)
    except (ImportError, _Unknown):
        return None
    except Exception as error:  # noqa: BLE001 - a library's insides, in any version: without it names stay as they are
        logger.warning("transformers cannot provide the tensor names of %s: %s", config.get("architectures"), error)
        return None


def quantized_by_transformers(config: Mapping[str, Any] | None, names: Collection[str]) -> set[str] | None:
    """Return the names of a Hub model's tensors that transformers' block FP8 quantizer would quantize.

    Returns None if transformers is not installed, is older than 5, or cannot build the model.
    """
    if not config or not _bounded(config, len(names)):
        return None
    try:
        model, transforms = _built(config)
        from transformers import FineGrainedFP8Config
        from transformers.integrations import finegrained_fp8
        from transformers.quantizers.base import HfQuantizer

        kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        finegrained_fp8.replace_with_fp8_linear(
            model, modules_to_not_convert=kept, quantization_config=FineGrainedFP8Config(), pre_quantized=True
        )
        kinds = (finegrained_fp8.FP8Linear, finegrained_fp8.FP8Experts)
        live = {
            f"{name}.{key}"
            for name, module in model.named_modules()
            if isinstance(module, kinds)
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.element_size() == 1
        }
        # Do as transformers does on a load: change the names first, then join tensors.
        renamings = [item for item in transforms if not hasattr(item, "operations")]
        converters = [item for item in transforms if hasattr(item, "operations")]
        return {name for name in names if _converted_name(_renamed(name, renamings), converters)[0] in live}
    except (ImportError, _Unknown):
        return None
    except Exception as error:  # noqa: BLE001 - a library's insides, in any version
        logger.warning("transformers cannot tell which weights of %s to quantize: %s", config.get("model_type"), error)
        return None


def _built(config: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Build the config's model on the meta device. Return the model and the conversions that a load applies.

    Raises:
        _Unknown: transformers has no class for the model.
    """
    import torch
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    names = config.get("architectures")
    kind = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise _Unknown(str(names))
    settings = _with_floats({key: value for key, value in config.items() if key != "quantization_config"})
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**settings))
    return model, tuple(get_model_conversion_mapping(model, add_legacy=False))


def _needed(transforms: tuple[Any, ...], wanted: Collection[str]) -> tuple[Any, ...]:
    """Return `transforms` without the converters that a load of the tensors `wanted` would not use."""
    renamings = [item for item in transforms if not hasattr(item, "operations")]
    converters = [item for item in transforms if hasattr(item, "operations")]
    used = {id(_converted_name(_renamed(name, renamings), converters)[2]) for name in wanted}
    return tuple(item for item in transforms if not hasattr(item, "operations") or id(item) in used)


def _with_floats(value: Any) -> Any:
    """Decode values such as {"__float__": "Infinity"}, which transformers writes for floats that JSON lacks."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _bounded(config: Mapping[str, Any], most: int) -> bool:
    """Return whether the config's layer counts are plausible for a model with `most` tensors.

    With a hostile config, building the model could take forever.
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and not _bounded(value, most):
            return False
        if isinstance(value, int) and _COUNTS.fullmatch(str(key)) and value > most:
            return False
    return True


def _tied(model: Any) -> dict[str, str]:
    """Return a mapping from tied tensors' second names to their first names."""
    roots: dict[str, str] = {}

    def root(name: str) -> str:
        while roots.get(name, name) != name:
            name = roots[name]
        return name

    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(t), name)) for name, t in model.state_dict(keep_vars=True).items()]
    said = getattr(model, "all_tied_weights_keys", None)
    for name, other in (*pairs, *(said.items() if isinstance(said, dict) else ())):
        roots[root(name)] = root(other)
    return {name: root(name) for name in roots if root(name) != name}


# --- the conversion that transformers applies when it saves, on targets instead of tensors


def _reverted(
    targets: Mapping[str, Target], transforms: Iterable[Any], config: Any, wanted: _Wanted
) -> dict[str, Target]:
    back = [copy.deepcopy(t).reverse_transform() for t in reversed(tuple(transforms))]
    converters = [t for t in back if hasattr(t, "operations")]
    renamings = [t for t in back if not hasattr(t, "operations")]
    made: dict[str, Target] = {}
    groups: dict[str, tuple[Any, dict[str, list[Target]]]] = {}
    for name in sorted(targets, key=_natural):
        renamed, pattern, converter = _converted_name(name, converters)
        if converter is None:
            _put(made, _renamed(name, renamings), targets[name])
        else:
            groups.setdefault(renamed, (converter, {}))[1].setdefault(pattern, []).append(targets[name])
    for renamed, (converter, collected) in groups.items():
        place = _place(converter, renamed, config, renamings, wanted)
        for name, target in _run(converter, renamed, collected, place).items():
            _put(made, _renamed(name, renamings), target)
    return made


def _put(made: dict[str, Target], name: str, target: Target) -> None:
    if name in made:
        raise _Unknown(name)
    made[name] = target.renamed(name)


def _converted_name(name: str, converters: Iterable[Any]) -> tuple[str, str, Any]:
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern, converter
    return name, "", None


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    return name


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares numbers in names as numbers, so that expert 10 comes after expert 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


_Tensors = dict[str, list[Target]]


@dataclass(frozen=True, slots=True)
class _Joined:
    """Additional input of a converter's operations.

    Attributes:
        config: The model's config, as an object of transformers.
        shapes: For each target pattern of the converter, the shape of the tensor in the base model, if known.
    """

    config: Any
    shapes: Mapping[str, tuple[int, ...]]


def _place(converter: Any, renamed: str, config: Any, renamings: Iterable[Any], wanted: _Wanted) -> _Joined:
    whole, shapes = renamed.replace("*.", "0."), {}
    at = next((key for key in converter.target_patterns if key in whole), "")
    head, _, tail = whole.partition(at) if at else (whole, "", "")
    for key in converter.target_patterns:
        want = wanted.get(_renamed(f"{head}{key}{tail}", renamings)) if at else None
        if want is not None and want.shape is not None:
            shapes[key] = want.shape
    return _Joined(config, shapes)


def _run(converter: Any, renamed: str, collected: _Tensors, place: _Joined) -> dict[str, Target]:
    """Apply a converter's operations to its input tensors, `collected`. Return the results by full name."""
    sources, to = list(converter.source_patterns), list(converter.target_patterns)
    for operation in converter.operations:
        step = _STEPS.get(type(operation).__name__)
        if step is None or not collected:
            raise _Unknown(type(operation).__name__)
        collected = step(operation, collected, sources, to, place)
    whole = renamed.replace("*.", "0.")
    at = next((key for key in collected if key in whole), None)
    if at is None or any(len(pieces) != 1 for pieces in collected.values()):
        raise _Unknown(renamed)
    head, _, tail = whole.partition(at)
    return {f"{head}{key}{tail}": pieces[0] for key, pieces in collected.items()}


def _only(collected: _Tensors) -> Target:
    if len(collected) != 1 or len(pieces := next(iter(collected.values()))) != 1:
        raise _Unknown("several tensors")
    return pieces[0]


def _chunk(op: Any, collected: _Tensors, sources: list[str], to: list[str], place: _Joined) -> _Tensors:
    target, names = _only(collected), to
    if getattr(op, "num_shards_attribute", None) is not None:
        count = getattr(place.config.get_text_config(), op.num_shards_attribute)
        names = [to[0].replace("*", str(i)) for i in range(count)]
    dim = dim_of(target, op.dim, "convert")
    # transformers always splits into equal parts. If the sizes of the base's parts are known, use those.
    known = [place.shapes[name] for name in names if name in place.shapes]
    sizes = [shape[dim] for shape in known if len(shape) == len(target.shape)]
    if len(sizes) < len(names):
        sizes = [target.shape[dim] // len(names)] * len(names)
    if sum(sizes) != target.shape[dim]:
        raise _Unknown("unequal parts")
    pieces = target.split(dim, sizes)
    return {name: [piece] for name, piece in zip(names, pieces, strict=True)}


def _concatenate(op: Any, collected: _Tensors, sources: list[str], to: list[str], place: _Joined) -> _Tensors:
    pieces = [piece for source in sources for piece in collected.get(source, ())]
    if len(to) != 1 or len(pieces) < 2 or len({piece.dtype for piece in pieces}) > 1:
        raise _Unknown("concatenation")
    if set(collected) != set(sources):
        raise _Unknown("parts are missing")
    dim = dim_of(pieces[0], op.dim, "convert")
    check_alike(to[0], pieces, dim)
    return {to[0]: [concatenated(to[0], pieces, dim)]}


def _stack(op: Any, collected: _Tensors, sources: list[str], to: list[str], place: _Joined) -> _Tensors:
    made: _Tensors = {}
    for source, pieces in collected.items():
        check_alike(source, pieces, None)
        name = to[0] if len(collected) == 1 else source
        made[name] = [concatenated(name, [piece.unsqueezed(op.dim) for piece in pieces], op.dim)]
    return made


def _unstack(op: Any, collected: _Tensors, sources: list[str], to: list[str], place: _Joined) -> _Tensors:
    made: _Tensors = {}
    for source, pieces in collected.items():
        if len(pieces) != 1 or (len(collected) == 1 and len(to) != 1):
            raise _Unknown("several tensors")
        name = to[0] if len(collected) == 1 else source
        made.update({name.replace("*", str(i)): [piece] for i, piece in enumerate(unbound(pieces[0], op.dim))})
    return made


def _transpose(op: Any, collected: _Tensors, sources: list[str], to: list[str], place: _Joined) -> _Tensors:
    target = _only(collected)
    if op.check_dims:
        raise _Unknown("a transposition that depends on shapes")
    order = list(range(len(target.shape)))
    first, second = dim_of(target, op.dim0, "convert"), dim_of(target, op.dim1, "convert")
    order[first], order[second] = second, first
    return {to[0] if len(to) == 1 else sources[0]: [target.transposed(tuple(order))]}


def _interleave(op: Any, collected: _Tensors, sources: list[str], to: list[str], place: _Joined) -> _Tensors:
    target = _only(collected)
    return {to[0]: [_shuffled(target, dim_of(target, op.dim, "convert"), to_halves=not op.inverse)]}


def _shuffled(target: Target, dim: int, *, to_halves: bool) -> Target:
    """Move the even elements along `dim` to the first half and the odd elements to the second half, or back."""
    if dim == 0:
        if target.shape[0] % 2:
            raise _Unknown("an odd size")
        return target.rope_permuted(1, to_halves=to_halves)
    inner = [_shuffled(piece, dim - 1, to_halves=to_halves) for piece in unbound(target, 0)]
    return concatenated(target.name, [piece.unsqueezed(0) for piece in inner], 0)


def _rope(op: Any, collected: _Tensors, sources: list[str], to: list[str], place: _Joined) -> _Tensors:
    config = place.config
    if op.subconfig_key is not None:
        config = getattr(config, op.subconfig_key, config)
    heads = getattr(config, "num_attention_heads", 1)
    made: _Tensors = {}
    for source, pieces in collected.items():
        name = source if (len(to) > 1) != (len(sources) > 1) else to[0]
        permutes = op.permute_layer_names is None or any(part in source for part in op.permute_layer_names)
        if permutes and (len(pieces) != 1 or pieces[0].shape[0] % (2 * heads)):
            raise _Unknown("heads of odd size")
        made[name] = [pieces[0].rope_permuted(heads, to_halves=not op.inverse)] if permutes else pieces
    return made


def _ernie_experts(op: Any, collected: _Tensors, sources: list[str], to: list[str], place: _Joined) -> _Tensors:
    """Split the stacked, fused text and vision experts into single tensors. Number all experts consecutively."""
    if set(collected) != set(sources):
        raise _Unknown("parts are missing")
    made: _Tensors = {}
    halves = []
    for source in sources:
        target = collected[source][0]
        dim = dim_of(target, op.concat_dim, "convert")
        halves.append(target.split(dim, [target.shape[dim] // len(to)] * len(to)))
    for i, name in enumerate(to):
        experts = [piece for parts in halves for piece in unbound(parts[i], op.stack_dim)]
        made.update({name.replace("*", str(k)): [piece] for k, piece in enumerate(experts)})
    return made


_STEPS: dict[str, Callable[[Any, _Tensors, list[str], list[str], _Joined], _Tensors]] = {
    "Chunk": _chunk,
    "Concatenate": _concatenate,
    "MergeModulelist": _stack,
    "SplitModulelist": _unstack,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _rope,
    "ErnieSplitAndDecoupleTextVisionExperts": _ernie_experts,
}
