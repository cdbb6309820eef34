"""Merges a LoRA adapter into its base model: finds the tensors that the adapter changes, and applies the formulas."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.casts import cast
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.targets import Part, Target
from ckptkit.digests import crc32
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError
from ckptkit.formats.sources import UNITS
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.offline.export import merge_formulas
from ckptkit.offline.export.adapters import AdapterSplit, LoraPair, is_of_parameter, scaling, target_parameters
from ckptkit.offline.export.merge_formulas import Formula
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch

# --- assembling tensors from sources that are first dequantized or changed by the adapter


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Change:
    """A change that an adapter makes to one tensor of the base model.

    Attributes:
        inputs: The adapter's tensors. The new weight is computed from these tensors and the old weight.
        by_rows: Whether rows of the weight can be changed separately.
        scratch: Temporary memory that the formula needs, in bytes per element of the weight.
    """

    inputs: tuple[Target, ...]
    formula: Formula
    label: str
    by_rows: bool = True
    scratch: int = 0

    def then(self, other: Change) -> Change:
        """Return a change that applies this change first, then `other`."""
        own = len(self.inputs)

        def both(w: torch.Tensor, inputs: Sequence[torch.Tensor], row: int) -> torch.Tensor:
            return other.formula(self.formula(w, inputs[:own], row), inputs[own:], row)

        label, by_rows = f"{self.label}, then {other.label}", self.by_rows and other.by_rows
        return Change((*self.inputs, *other.inputs), both, label, by_rows, max(self.scratch, other.scratch))


@dataclass(frozen=True, slots=True)
class _Step:
    """The rows of one source tensor that a target tensor needs, and the adapter's change to these rows.

    Attributes:
        first: Index of the first of these rows in the source.
        rows: The rows before the change, as a tensor that is read or computed.
        change: The adapter's change to these rows. None if the adapter does not change the rows.
    """

    source: str
    first: int
    rows: OutputTensor
    change: Change | None

    @property
    def inputs(self) -> tuple[OutputTensor, ...]:
        return (self.rows, *(self.change.inputs if self.change is not None else ()))

    @property
    def label(self) -> str:
        made = (self.rows if isinstance(self.rows, ComputedTensor) else None, self.change)
        return ", then ".join(item.label for item in made if item is not None)

    @property
    def by_rows(self) -> bool:
        can_cut = isinstance(self.rows, Target) or self.rows.cut is not None
        return can_cut and (self.change is None or self.change.by_rows)

    def carry_out(self, data: Sequence[Bytes], dtype: str) -> tuple[npt.NDArray[Any], int]:
        """Return the changed rows, cast to `dtype`, as unsigned integers with the same bits.

        Also returns how many elements became infinite in the cast.
        """
        if self.change is None:
            out, infinite = cast(data[0], self.rows.dtype, dtype)
            return out.view(UNITS[dtype_of(dtype).itemsize]).reshape(self.rows.shape), infinite
        tensors = [_tensor(raw, item.dtype, item.shape) for raw, item in zip(data, self.inputs, strict=True)]
        bits, infinite = _bits(self.change.formula(tensors[0], tensors[1:], self.first), dtype)
        return bits.reshape(self.rows.shape), infinite


def assembled(
    tensors: Mapping[str, OutputTensor], changes: Mapping[str, Change], whole: Mapping[str, OutputTensor]
) -> dict[str, OutputTensor]:
    """Return `tensors`, but with a `ComputedTensor` in place of each tensor that has a changed or dequantized source.

    Args:
        whole: The source tensors by catalog key. A dequantized source is a `ComputedTensor`.
    """
    made = {source for source, tensor in whole.items() if isinstance(tensor, ComputedTensor)} | changes.keys()
    return {
        name: _assembled(tensor, changes, whole)
        if isinstance(tensor, Target) and any(key in made for key in tensor.sources)
        else tensor
        for name, tensor in tensors.items()
    }


def _assembled(target: Target, changes: Mapping[str, Change], whole: Mapping[str, OutputTensor]) -> ComputedTensor:
    """Return `target` as a tensor that is computed from its sources and the changes to these sources.

    Sources are changed in their own dtype, and then cast to the target's dtype. If rows can be changed separately, only
    the needed rows are read.
    """
    steps = [
        _Step(source, first, _rows_of(whole[source], first, stop), changes.get(source))
        for source, (first, stop) in _ranges(target, changes, whole).items()
    ]
    part, rows = target.only_part, steps[0].rows
    plain = part is not None and part.source_box.numel == rows.numel  # simply the rows of one source
    same = plain and steps[0].change is None and (rows.dtype, rows.shape) == (target.dtype, target.shape)
    if same and isinstance(rows, ComputedTensor):
        return _named(rows, target.name)

    def compute(data: Sequence[Bytes], out: Bytes) -> int:
        made: dict[str, tuple[npt.NDArray[Any], int]] = {}
        at = infinite = 0
        for step in steps:
            rows, more = step.carry_out(data[at : at + len(step.inputs)], target.dtype)
            made[step.source] = rows, step.first
            infinite += more
            at += len(step.inputs)
        if plain:
            out[:] = made[steps[0].source][0].reshape(-1).view(np.uint8)
            return infinite
        values = out.view(UNITS[dtype_of(target.dtype).itemsize]).reshape(target.shape)
        for part in target.parts:
            values[_slices(part.target_box)] = _part(part, *made[part.source])
        return infinite

    def cut(start: int, stop: int) -> ComputedTensor:
        return _assembled(target.rows(start, stop), changes, whole)

    label = "; ".join(dict.fromkeys(step.label for step in steps if step.label))
    if not plain:  # different tensors made from the same sources must have different labels
        label += f", in parts [{crc32(repr(target.parts).encode()):08x}]"
    # The result is temporarily in memory twice, the second time in the source's dtype or in pieces.
    itemsize = dtype_of(target.dtype).itemsize
    scratch = sum(
        step.rows.numel * (itemsize + (step.change.scratch if step.change is not None else 0)) for step in steps
    )
    few = all(step.change is None and isinstance(step.rows, ComputedTensor) and step.rows.by_element for step in steps)
    by_rows = bool(target.shape) and all(step.by_rows for step in steps)
    inputs = tuple(item for step in steps for item in step.inputs)
    return ComputedTensor(
        target.name, target.dtype, target.shape, inputs, compute, label, scratch, cut if by_rows else None,
        by_rows and few,
    )  # fmt: skip


def _named(tensor: ComputedTensor, name: str) -> ComputedTensor:
    """Return a computed tensor under another name. While it is computed, the result is in memory twice."""

    def cut(start: int, stop: int) -> ComputedTensor:
        return _named(tensor.rows(start, stop), name)

    scratch = tensor.scratch + tensor.numel * dtype_of(tensor.dtype).itemsize
    return replace(tensor, name=name, scratch=scratch, cut=None if tensor.cut is None else cut)


def _ranges(
    target: Target, changes: Mapping[str, Change], whole: Mapping[str, OutputTensor]
) -> dict[str, tuple[int, int]]:
    """Return, for each source, the rows [first, stop) that the target needs."""
    found: dict[str, tuple[int, int]] = {}
    for part in target.parts:
        change = changes.get(part.source)
        shape = whole[part.source].shape
        first, stop = 0, shape[0] if shape else 1
        if shape and (change is None or change.by_rows):
            first, stop = part.source_box.offsets[0], part.source_box.stops[0]
        before = found.get(part.source, (first, stop))
        found[part.source] = min(first, before[0]), max(stop, before[1])
    return found


def _rows_of(source: OutputTensor, first: int, stop: int) -> OutputTensor:
    """Return the rows [first, stop) of a source, in its own dtype. A scalar is returned whole."""
    whole = replace(source, dtype=source.source_dtype) if isinstance(source, Target) else source
    return whole.rows(first, stop) if whole.shape else whole


def _part(part: Part, made: npt.NDArray[Any], first: int) -> npt.NDArray[Any]:
    offsets = part.source_box.offsets
    box = Box((offsets[0] - first, *offsets[1:]) if offsets else (), part.source_box.sizes)
    view = made[_slices(box)].reshape(part.unfold or part.source_box.sizes)
    turned: npt.NDArray[Any] = view.transpose(part.axes or tuple(range(view.ndim))).reshape(part.target_box.sizes)
    return turned


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))


def _tensor(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not raw.flags.writeable or raw.size == 0:
        raw = raw.copy()
    flat: torch.Tensor = torch.from_numpy(raw).view(getattr(torch, dtype_of(dtype).name))
    return flat.reshape(shape)


def _bits(tensor: torch.Tensor, dtype: str) -> tuple[npt.NDArray[Any], int]:
    import torch

    made = tensor.to(getattr(torch, dtype))
    infinite = 0
    if made.dtype != tensor.dtype and made.is_floating_point():
        infinite = int((made.isinf() & tensor.isfinite()).sum())
    flat = made.contiguous().reshape(-1).view(torch.uint8).numpy()
    bits: npt.NDArray[Any] = flat.view(UNITS[dtype_of(dtype).itemsize])
    return bits, infinite


_ADVICE = "Export the adapter without --merge-adapter."
# Adapters that even PEFT cannot merge, because the result depends on the input or on layers that the base lacks.
_UNMERGEABLE = {
    "alora_invocation_tokens": "it is active only after its invocation tokens",
    "arrow_config": "its router decides for each token",
    "layer_replication": "its base layers are replicated",
    "megatron_config": "its factors belong to a single rank of Megatron's tensor parallelism",
}
# transformers models that store experts as [experts, in, out].
_IN_FIRST = frozenset({"gpt_oss", "openai_privacy_filter", "aria", "aria_text"})
_MOST_PARAMETERS = 6  # per module


def adapter_changes(
    split: AdapterSplit, config: Mapping[str, Any], *, model_type: str | None = None
) -> dict[str, Change]:
    """Return, by the weight's key in the catalog, the changes that an adapter makes to the base weights.

    The arithmetic is that of PEFT's `merge_and_unload` on a CPU.

    Args:
        model_type: The model type in the base's config, if known.

    Raises:
        UnsupportedFormatError: The adapter's names are ambiguous, or adapters of its type cannot be merged.
        CheckpointMismatchError: A module has no base weight, or shapes do not match.
    """
    return _Changes(split, config, model_type).made


def merge_adapter(
    targets: Mapping[str, Target],
    changes: Mapping[str, Change],
    base: Mapping[str, Target],
    *,
    before: Mapping[str, ComputedTensor],
    tied: Mapping[str, str],
    notes: MutableSequence[str],
) -> dict[str, OutputTensor]:
    """Return the targets with merged weights in place of base weights.

    Call this after applying the key map, so that the merged tensors also get new names.

    Args:
        changes: From `adapter_changes`.
        base: The tensors of the base model, under the names that they have before the key map is applied.
        before: The dequantized weights of the base model, by the key of the quantized weight in the catalog.
        tied: For tied weights of which the export keeps one: maps each omitted weight to the kept weight.
        notes: A list to which this function adds its decisions.
    """
    whole: dict[str, OutputTensor] = {target.parts[0].source: target for target in base.values() if target.parts}
    made = _of_tied(changes, tied, notes, {source: target.name for source, target in whole.items()})
    return assembled(targets, made, {**whole, **before})


def _of_tied(
    changes: Mapping[str, Change], tied: Mapping[str, str], notes: MutableSequence[str], names: Mapping[str, str]
) -> dict[str, Change]:
    """Return the changes. If the export omits a weight, its change is also applied to the tied weight that is kept.

    PEFT changes tied weights in place, so a change under one name also applies to the other names.
    """
    made = dict(changes)
    for source, kept in tied.items():
        if source not in changes:
            continue
        before = made.get(kept)
        made[kept] = changes[source] if before is None else before.then(changes[source])
        if before is None:
            notes.append(
                f"the adapter of {names[source]} also changes {names[kept]}, because they are tied, as in "
                "PEFT's merge. --untie keeps them separate, as in training"
            )
    return made


# --- the changes


@dataclass(slots=True)
class _Changes:
    """Computes the changes that an adapter makes. `made` contains the changes, by the weight's key in the catalog."""

    split: AdapterSplit
    config: Mapping[str, Any]
    model_type: str | None
    made: dict[str, Change] = field(default_factory=dict)
    left: dict[str, Target] = field(default_factory=dict)  # tensors in `split.others` that no formula has used yet

    def __post_init__(self) -> None:
        for key, why in _UNMERGEABLE.items():
            if self.config.get(key):
                raise UnsupportedFormatError(
                    f"an adapter with {key} cannot be merged, not even by PEFT: {why}. {_ADVICE}"
                )
        self.left = dict(self.split.others)
        by_parameter: dict[str, list[LoraPair]] = {}
        for pair in self.split.pairs.values():
            plain = pair.key.replace(".base_layer", "")
            if is_of_parameter(self.config, plain) and self._parameters(plain):
                by_parameter.setdefault(plain, []).append(pair)
            else:
                self._add_module(pair)
        for module, pairs in by_parameter.items():
            self._add_parameters(module, pairs)
        for name in list(self.left):
            if name.endswith(".trainable_tokens_delta"):
                self._add_tokens(name)
        odd = [name for name in self.left if not _is_for_training(name)]
        if odd:
            raise UnsupportedFormatError(f"merging adapters with {', '.join(odd[:3])} is not supported. {_ADVICE}")

    def _add(self, name: str, change: Change) -> None:
        source = self.split.base[name].parts[0].source
        if source in self.made:
            raise UnsupportedFormatError(
                f"two parts of the adapter change {name!r}. PEFT does not define the result. {_ADVICE}"
            )
        self.made[source] = change

    def _base(self, name: str) -> Target:
        found = self.split.base.get(name)
        if found is None:
            module = name.rpartition(".")[0]
            raise CheckpointMismatchError(
                f"the adapter changes {module!r}, but its base weight is not in the checkpoint. Give --base a "
                "directory or checkpoint with the base model's weights, such as hf://ORG/NAME."
            )
        return found

    # --- modules: linear, embedding, convolution, attention

    def _add_module(self, pair: LoraPair) -> None:
        module = pair.module
        inside_attention = pair.key.endswith(".base_layer.out_proj")  # out_proj of MultiheadAttention
        scale = scaling(self.config, pair.patterned)
        magnitude = self.left.pop(f"{pair.key}.lora_magnitude_vector", None)
        if (magnitude is not None) != bool(self.config.get("use_dora")):
            said = "has a DoRA magnitude" if magnitude is not None else "has no DoRA magnitude"
            raise CheckpointMismatchError(
                f"{module!r} {said}, but the adapter config says use_dora={bool(self.config.get('use_dora'))}. "
                "Give the config that was used in training."
            )
        name = f"{module}.weight"
        if name not in self.split.base and f"{module}.in_proj_weight" in self.split.base:
            name = f"{module}.in_proj_weight"
        weight = self._base(name)
        _check_dtypes(pair, weight)
        if inside_attention or name.endswith("in_proj_weight"):
            _check_shapes(pair, weight, (False,))
            times = 2 if inside_attention else 1
            twice = f"W + {times} * ({_product(scale)})" if times > 1 else f"W + {_product(scale)}"
            change = Change(
                (pair.a, pair.b),
                partial(merge_formulas.rounded, scale=scale, times=times),
                twice,
                True,
                _scratch(pair, 3),
            )
        elif len(weight.shape) > 2:
            change = self._convolution(pair, weight, scale, magnitude)
        else:
            change = self._matrix(pair, weight, scale, magnitude)
        self._add(name, change)
        self._add_bias(pair, scale)

    def _matrix(self, pair: LoraPair, weight: Target, scale: float, magnitude: Target | None) -> Change:
        kinds = (True,) if pair.embedding else (False, True)
        blocks = self._blocks(pair, weight)
        fitting = _check_shapes(pair, weight, kinds, blocks)
        transposed = fitting[0] if len(fitting) == 1 else self._is_transposed()
        label = f"W + {_product(scale)}" + (", transposed" if transposed else "")
        inputs, scratch = (pair.a, pair.b), _scratch(pair, 3)
        diag = self.left.pop(f"{pair.key}.lora_diag", None)
        if magnitude is not None:
            formula: Formula = partial(merge_formulas.dora, scale=scale, transposed=transposed)
            return Change((*inputs, magnitude), formula, f"DoRA of {label}", not transposed, 2 * scratch)
        if diag is not None and not transposed:
            formula = partial(merge_formulas.diagonal, scale=scale)
            return Change((*inputs, diag), formula, f"{label} (KaSA)", True, scratch)
        if self.config.get("use_bdlora") and not transposed and not pair.embedding:
            formula = partial(merge_formulas.block_diagonal, scale=scale, blocks=blocks)
            return Change(inputs, formula, f"{label} (blocks)", True, scratch)
        twice = pair.embedding or self.config.get("init_lora_weights") == "mica"
        made = merge_formulas.rounded if twice else merge_formulas.linear
        return Change(inputs, partial(made, scale=scale, transposed=transposed), label, True, scratch)

    def _blocks(self, pair: LoraPair, weight: Target) -> tuple[int, int]:
        """Return the number of diagonal blocks of factor A, and of factor B."""
        if not self.config.get("use_bdlora") or any(
            len(t.shape) != 2 or 0 in t.shape for t in (weight, pair.a, pair.b)
        ):
            return 1, 1
        rank = pair.a.shape[0]
        return max(1, weight.shape[1] // pair.a.shape[1]), max(1, rank // pair.b.shape[1])

    def _is_transposed(self) -> bool:
        """Return whether square weights are stored as [in, out].

        The shapes of the checkpoint's non-square weights decide. If these shapes do not show the orientation, the
        config decides. PEFT itself looks at the module's class, and corrects `fan_in_fan_out` accordingly.
        """
        proved = set()
        for pair in self.split.pairs.values():
            weight = self.split.base.get(f"{pair.module}.weight")
            if weight is None or pair.embedding or len(weight.shape) != 2 or weight.shape[0] == weight.shape[1]:
                continue
            proved.add((pair.b.shape[0], pair.a.shape[-1]) != weight.shape)
        return proved.pop() if len(proved) == 1 else bool(self.config.get("fan_in_fan_out"))

    def _convolution(self, pair: LoraPair, weight: Target, scale: float, magnitude: Target | None) -> Change:
        shapes = _shapes(pair, weight)
        ndim = len(weight.shape)
        if ndim > 5 or len(pair.a.shape) != ndim or len(pair.b.shape) != ndim:
            raise CheckpointMismatchError(f"{pair.module!r}: the factors do not match the weight ({shapes}).")
        if pair.a.shape[1] != weight.shape[1] or pair.b.shape[1] != pair.a.shape[0]:
            raise UnsupportedFormatError(
                f"{pair.module!r} is a grouped convolution ({shapes}), which PEFT cannot merge either. {_ADVICE}"
            )
        if pair.a.shape[2:] != weight.shape[2:] or pair.b.shape[0] != weight.shape[0]:
            raise CheckpointMismatchError(f"{pair.module!r}: the factors do not match the weight ({shapes}).")
        if ndim == 5 and weight.shape[2:4] == (1, 1):
            raise UnsupportedFormatError(
                f"{pair.module!r} is a 3-D convolution with a flat kernel ({shapes}), which PEFT fails to merge. "
                f"{_ADVICE}"
            )
        inputs = (pair.a, pair.b) if magnitude is None else (pair.a, pair.b, magnitude)
        label = f"W + {scale:g} * A convolved with B"
        label = label if magnitude is None else f"DoRA of {label}"
        return Change(inputs, partial(merge_formulas.conv, scale=scale), label, False, _scratch(pair, 6))

    def _add_bias(self, pair: LoraPair, scale: float) -> None:
        added = self.left.pop(f"{pair.key}.lora_B.bias", None)
        if added is None:
            return
        name = f"{pair.module}.bias"
        if name not in self.split.base:
            raise UnsupportedFormatError(
                f"the adapter has a bias for {pair.module!r}, whose base layer has none: PEFT can't merge it either. "
                f"{_ADVICE}"
            )
        if self.split.base[name].shape != added.shape:
            raise CheckpointMismatchError(
                f"{name!r} has shape {list(self.split.base[name].shape)}, but the adapter's has {list(added.shape)}."
            )
        formula = partial(merge_formulas.bias, scale=scale)
        self._add(name, Change((added,), formula, f"bias + {scale:g} * bias of B", True, 8))

    # --- parameters: experts

    def _parameters(self, module: str) -> list[str]:
        wanted = target_parameters(self.config)
        names = [name for name in self.split.base if name.rpartition(".")[0] == module]
        return [name for name in names if any(name == key or name.endswith(f".{key}") for key in wanted)]

    def _add_parameters(self, module: str, pairs: Sequence[LoraPair]) -> None:
        in_first, names = self._assigned(module, pairs)
        for pair, name in zip(pairs, names, strict=True):
            weight = self.split.base[name]
            _check_dtypes(pair, weight)
            scale = scaling(self.config, name)
            label = f"W + {_product(scale)}"
            formula: Formula = partial(merge_formulas.rounded, scale=scale)
            if len(weight.shape) == 3:
                formula = partial(merge_formulas.experts, scale=scale, count=weight.shape[0], in_first=in_first)
                label += " of each expert" + (", transposed" if in_first else "")
            self._add(name, Change((pair.a, pair.b), formula, label, True, _scratch(pair, 5)))

    def _assigned(self, module: str, pairs: Sequence[LoraPair]) -> tuple[bool, Sequence[str]]:
        """Return (whether experts are stored as [experts, in, out], the parameter to which each pair belongs).

        If several parameters of a module have adapters, PEFT nests the adapters in the order of the parameters. The
        names do not show which pair belongs to which parameter, so the shapes decide.

        Raises:
            UnsupportedFormatError: The shapes allow several assignments.
        """
        names = self._parameters(module)
        shapes = {name: self.split.base[name].shape for name in names}
        if len(names) != len(pairs) or len(names) > _MOST_PARAMETERS:
            raise CheckpointMismatchError(
                f"{module!r} has {len(pairs)} parameter adapters, but the adapter config targets {len(names)} "
                f"parameters: {', '.join(names)}."
            )
        found = [
            (in_first, order)
            for in_first in ((False, True) if any(len(shape) == 3 for shape in shapes.values()) else (False,))
            for order in itertools.permutations(names)
            if all(_fits(pair, shapes[name], in_first) for pair, name in zip(pairs, order, strict=True))
        ]
        if self.model_type is not None and len(found) > 1:
            usual = self.model_type in _IN_FIRST
            found = [item for item in found if item[0] is usual] or found
        if not found:
            factors = "; ".join(_shapes(pair) for pair in pairs)
            raise CheckpointMismatchError(
                f"{module!r}: the factors ({factors}) match none of its parameters ("
                f"{', '.join((f'{name} {list(shape)}' for name, shape in shapes.items()))})."
            )
        if len(found) > 1:
            hint = " The base model's config.json may decide it: pass --base." if self.model_type is None else ""
            raise UnsupportedFormatError(
                f"{module!r}: neither PEFT's names nor the shapes determine which factors belong to which "
                f"parameter of {', '.join(names)}, or their order.{hint} {_ADVICE}"
            )
        return found[0]

    # --- embeddings with some rows trained

    def _add_tokens(self, name: str) -> None:
        rows = self.left.pop(name)
        module = name.removesuffix(".token_adapter.trainable_tokens_delta")
        weight = self._base(f"{module}.weight")
        indices = _token_indices(self.config, module)
        if rows.shape != (len(indices), *weight.shape[1:]) or any(not 0 <= i < weight.shape[0] for i in indices):
            raise CheckpointMismatchError(
                f"the adapter config's trainable_token_indices select {len(indices)} rows of {module!r} "
                f"{list(weight.shape)}, but the trained rows in the checkpoint are {list(rows.shape)}."
            )
        label = f"W with rows {first_few(list(map(str, indices)), 4)} of the adapter"
        formula = partial(merge_formulas.tokens, indices=indices)
        self._add(f"{module}.weight", Change((rows,), formula, label, True, 8))


def _is_for_training(name: str) -> bool:
    """Return whether a tensor is only used during training. PEFT's merge ignores such tensors."""
    return ".lora_monteclora_sampler." in name or name.endswith(".lora_velora_embed")


def _token_indices(config: Mapping[str, Any], module: str) -> list[int]:
    given = config.get("trainable_token_indices")
    if isinstance(given, Mapping):
        given = next((rows for key, rows in given.items() if module.endswith(str(key))), None)  # as PEFT matches
    if not isinstance(given, (list, tuple)) or not all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        raise CheckpointMismatchError(
            f"the adapter config's trainable_token_indices do not list the rows of {module!r} that were trained."
        )
    return list(given)


# --- shapes and dtypes


def _product(scale: float) -> str:
    return f"{scale:g} * B @ A"


def _scratch(pair: LoraPair, times: int) -> int:
    """Return the memory for `times` temporary arrays of the weight's size, in bytes per element of the weight.

    The arrays have the factors' dtype, but at least 32 bits, because 16-bit factors are multiplied in float32.
    """
    return times * max(4, dtype_of(pair.b.dtype).itemsize)


def _shapes(pair: LoraPair, weight: Target | None = None) -> str:
    of_weight = f"W {list(weight.shape)}, " if weight is not None else ""
    return f"{of_weight}A {list(pair.a.shape)}, B {list(pair.b.shape)}"


def _check_dtypes(pair: LoraPair, weight: Target) -> None:
    kinds = {dtype_of(target.dtype).kind for target in (weight, pair.a, pair.b)}
    if kinds != {"float"} or pair.a.dtype != pair.b.dtype:
        advice = "--dtype bf16 dequantizes the base first." if dtype_of(weight.dtype).kind == "float8" else _ADVICE
        raise UnsupportedFormatError(
            f"{pair.module!r}: factors of {pair.a.dtype} (A) and {pair.b.dtype} (B) cannot be merged into a weight of "
            f"{weight.dtype}. {advice}"
        )


def _check_shapes(
    pair: LoraPair, weight: Target, kinds: Sequence[bool], blocks: tuple[int, int] = (1, 1)
) -> list[bool]:
    """Return those orientations in `kinds` (transposed or not) in which the factors' product fits the weight."""
    a, b = pair.a.shape, pair.b.shape
    fits: list[bool] = []
    if len(weight.shape) == len(a) == len(b) == 2 and a[0] == b[1] * blocks[1]:
        product = (b[0], a[1] * blocks[0])
        fits = [transposed for transposed in kinds if product == (weight.shape[::-1] if transposed else weight.shape)]
    if not fits:
        raise CheckpointMismatchError(
            f"{pair.module!r}: the factors do not match the weight ({_shapes(pair, weight)}). Was it "
            "quantized, or is this the adapter of another model?"
        )
    return fits


def _fits(pair: LoraPair, shape: tuple[int, ...], in_first: bool) -> bool:
    a, b = pair.a.shape, pair.b.shape
    if len(a) != 2 or len(b) != 2 or b[1] != a[0] or len(shape) not in (2, 3):
        return False
    if len(shape) == 2:
        return shape == (b[0], a[1])
    if a[0] % max(1, shape[0]) or (in_first and shape[0] == 1):
        return False
    return shape[1:] == ((a[1], b[0]) if in_first else (b[0], a[1]))
