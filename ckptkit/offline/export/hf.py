"""Plans a Hugging Face export: tensors under the Hub's names, config, tokenizer, model card. Writes nothing.

    export = plan_export(store, catalog, base=open_base(...), options=ExportOptions(...))

The steps, in order: select the role (model or masters), remove the prefixes of wrappers (such as DDP) and the given
prefix from names, apply the globs, separate or merge adapters, apply the key map, resolve tied weights, compare with
the base model, and cast.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.dtypes import export_dtype
from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError, UsageError
from ckptkit.formats.dcp.class_records import recipes_of
from ckptkit.formats.dcp.subclasses import SEPARATOR, Recipe, outer_name
from ckptkit.formats.hf.torchao import describe_tensors, stored_name
from ckptkit.formats.models import model_names
from ckptkit.offline.copying.plan import OutputFile, OutputTensor
from ckptkit.offline.export.base import BaseModel, WantedTensor, beside_source, export_config
from ckptkit.offline.export.check import absent_layers, compare_with_base, unexpected_buffers
from ckptkit.offline.export.model_card import CardFacts, model_card
from ckptkit.offline.export.tied import restore_embedding, same_values, settle_tied
from ckptkit.offline.export.weights import ExportOptions, matches, select_targets, several_models
from ckptkit.storage.store import Store
from ckptkit.units import counted, first_few

if TYPE_CHECKING:
    from ckptkit.keymaps.builtin import Choice
    from ckptkit.offline.export.adapter_merge import Change
    from ckptkit.offline.export.adapters import AdapterSplit
    from ckptkit.offline.export.dequantize import Dequantized

# If no name contains any of these strings, there is neither an adapter nor a layout that needs a built-in key map. The
# modules for adapters and key maps are then not imported, which makes a small export 10% faster.
_ADAPTER = ".lora_"
_PEFT = "base_model.model."
_MAPPED = (".experts.", "tok_embeddings.weight", "model.language_model.", "gpt_neox.")


@dataclass(frozen=True, slots=True)
class HFExport:
    """A planned export, before it is laid out in files.

    Attributes:
        tensors: The tensors to write, in the source's order.
        files: Small files: config.json, tokenizer, README.md.
        kind: "model" (model*.safetensors) or "adapter" (a single adapter_model.safetensors).
        config: The config to write. None if there is no config.
        key_map: Name of the applied key map.
        leftovers: Unused source tensors, each with the reason.
        missing: Names in the base model for which there is no source tensor.
        extra: Names that the base model lacks.
        faults: Mismatches with the base model. Empty if `ExportOptions.strict`, which raises them instead.
        notes: Notes for the user about decisions.
        checked: The path or repo with which names and shapes were compared. "" if there was no comparison.
        metadata: The entries of each safetensors header's `__metadata__`, in addition to "format": the source's
            metadata, or a description of torchao's weights.
    """

    tensors: tuple[OutputTensor, ...]
    files: tuple[OutputFile, ...]
    kind: Literal["model", "adapter"]
    config: Mapping[str, Any] | None
    key_map: str
    leftovers: tuple[tuple[str, str], ...]
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    checked: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Draft:
    """The state of an export during planning."""

    catalog: Catalog
    base: BaseModel
    options: ExportOptions
    targets: dict[str, Target] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    key_map: str = "hf"
    weights: str = "model"
    lower_bits: dict[str, TensorEntry] = field(default_factory=dict)  # see `Selection`
    untied: bool = False
    quantization: dict[str, Any] | None = None  # the export's quantization_config, if quantization was requested
    extra: list[str] = field(default_factory=list)
    described: dict[str, str] = field(default_factory=dict)  # the headers' description of torchao's weights
    live: dict[str, str] = field(default_factory=dict)  # source -> its tensor's name before the key map
    tied: dict[str, str] = field(default_factory=dict)  # source of an omitted tied tensor -> source of the kept one


def plan_export(
    store: Store,
    catalog: Catalog,
    *,
    base: BaseModel | None = None,
    own: BaseModel | None = None,
    options: ExportOptions | None = None,
) -> HFExport:
    """Plan the export of a checkpoint.

    Reads the checkpoint's side files (config, tokenizer), and the bytes of tied tensors that must be compared.

    Args:
        base: The model at --base. What it lacks is taken from `own` (see `BaseModel.over`).
        own: The checkpoint's own side files. If None, they are read from `store`.

    Raises:
        CheckpointMismatchError: Names collide, names or shapes differ from the base, or a tied head differs from the
            embedding.
        UnsupportedFormatError: safetensors does not support the dtype of a tensor, or an adapter has an unknown type.
        CheckpointNotFoundError: The checkpoint does not contain the requested weights.
        UsageError: Options contradict the checkpoint.
    """
    options = options or ExportOptions()
    own = own or beside_source(store, catalog, options.strip_prefix)
    in_parts = options.dtype == "keep" and not options.quantize and not options.merge_adapter
    draft = _draft(store, catalog, base.over(own) if base is not None else own, options, in_parts=in_parts)
    draft.notes += (*draft.options.notes, *draft.base.notes)
    quantized = _dequantized(draft)
    split = _split_adapter(draft.targets, mapped=draft.options.key_map is not None)
    if split is None and draft.options.merge_adapter:
        raise UsageError("--merge-adapter: the checkpoint contains no adapter (no lora_A or lora_B).")
    if split is not None:
        draft.dropped.update(split.dropped)
        draft.notes += [f"adapter {name!r}" for name in split.names if name != "default"]
        for option, given in (("--quantize", draft.options.quantize), ("--vocab-size", draft.options.vocabulary)):
            if given is not None and not draft.options.merge_adapter:
                raise UsageError(f"{option} is for models: the checkpoint contains an adapter. Add --merge-adapter.")
    if split is not None and not draft.options.merge_adapter:
        tensors, kind = _adapter_tensors(draft, split), "adapter"
    else:
        tensors, kind = _model_tensors(draft, split, quantized, store), "model"
        if not draft.base.wanted:  # if there is a base, the comparison with it reports the other models' tensors
            entries = [catalog.tensors[key] for t in tensors.values() for key in t.sources]
            several = several_models(entries)
            if several and not draft.options.chooses:
                raise UsageError(f"{several} To export all, pass --include '*'.")
            draft.notes += [several] if several else []
            if not draft.options.strip_prefix and not draft.options.key_map:
                draft.notes += _prefix_left(tensors, catalog)
    return _finish(draft, tensors, "adapter" if kind == "adapter" else "model", store.url)


def _prefix_left(names: Iterable[str], catalog: Catalog) -> list[str]:
    """Return a note if all names start with the name of one of the checkpoint's models."""
    top, *others = {name.partition(".")[0] for name in names}
    if others or top not in model_names(catalog.by_role(Role.MODEL).values()):
        return []
    return [
        f"all tensor names start with the model's name {top + '.'!r}, which transformers and vLLM do not expect. "
        f"--strip-prefix {top} removes it, and adds the model's config"
    ]


def export_tensors(
    store: Store, catalog: Catalog, *, options: ExportOptions, config: Mapping[str, Any] | None = None
) -> tuple[dict[str, OutputTensor], dict[str, str], tuple[str, ...]]:
    """Return the tensors for formats other than `hf`, the omitted tensors (each with the reason), and notes.

    Selects tensors by role and globs, removes prefixes, applies the given key map, and casts. Does not choose a key
    map, drop tied tensors, or compare with a base. If `config` is None, the checkpoint's own config is used.
    """
    own = catalog.info.extra.get("config")
    base = BaseModel("", config or (own if isinstance(own, Mapping) else None))
    draft = _draft(store, catalog, base, options, in_parts=False)
    quantized = _dequantized(draft)
    if options.key_map is not None:
        _map_names(draft)
    tensors: dict[str, OutputTensor] = {n: _cast(t, options.dtype) for n, t in draft.targets.items()}
    if quantized is not None:
        tensors = quantized.computed(tensors)
        draft.notes += [quantized.note()] if quantized.made else []
    return tensors, draft.dropped, tuple(draft.notes)


def _draft(store: Store, catalog: Catalog, base: BaseModel, options: ExportOptions, *, in_parts: bool) -> _Draft:
    if base.wanted and (recipes := recipes_of(catalog)) and in_parts:
        base = replace(base, wanted=_wanted_in_parts(base.wanted, recipes))
    chosen = select_targets(store, catalog, options, wanted=base.wanted, in_parts=in_parts)
    return _Draft(
        catalog, base, options, chosen.targets, chosen.dropped, list(chosen.notes), weights=chosen.weights,
        lower_bits=chosen.lower_bits,
    )  # fmt: skip


def _has_name(targets: Mapping[str, Target], *marks: str) -> bool:
    return any(mark in name for name in targets for mark in marks)


def _split_adapter(targets: Mapping[str, Target], *, mapped: bool) -> AdapterSplit | None:
    if _has_name(targets, _ADAPTER):
        from ckptkit.offline.export.adapters import split_adapter

        return split_adapter(targets)
    if not mapped and _has_name(targets, _PEFT):
        from ckptkit.offline.export.adapters import refuse_other_kinds

        refuse_other_kinds(targets)
    return None


def _map_names(draft: _Draft) -> None:
    options, config = draft.options, draft.base.config
    draft.live = {target.sources[0]: name for name, target in draft.targets.items() if target.sources}
    if options.key_map is None and not draft.base.wanted and not _has_name(draft.targets, *_MAPPED):
        return
    if options.key_map is None:
        from ckptkit.keymaps.builtin import choose_map

        chosen = choose_map(draft.targets, wanted=draft.base.wanted, config=config)
        chosen = _by_transformers(draft, chosen)
        mapped, key_map = chosen.mapped, chosen.key_map
        if key_map.name != "hf":
            draft.notes.append(f"key map {key_map.name}: {chosen.why}")
        if chosen.doubt:
            draft.notes.append(chosen.doubt)
    else:
        key_map = options.key_map
        mapped = key_map.apply(draft.targets, config=config)
        if padded := [name for name, target in mapped.targets.items() if target.is_padded]:
            raise UsageError(
                f"key map {key_map.name!r} pads {', '.join(padded[:3])}. Only a load into a model can do that: "
                "it keeps the model's own values there. Remove the rule; --vocab-size adds rows."
            )
    if not mapped.targets:
        raise UsageError(f"nothing to export: the key map {key_map.name} drops all tensors ({len(draft.targets)}).")
    draft.targets = dict(mapped.targets)
    draft.dropped.update(mapped.dropped)
    draft.key_map = key_map.name
    if options.key_map is not None:
        draft.notes += [f"key map {key_map.name}: {text} matched nothing" for text in mapped.unused]
        cast = [
            name
            for name, target in mapped.targets.items()
            if target.dtype != target.source_dtype and _cast(target, options.dtype).dtype != target.dtype
        ]
        if cast:
            draft.notes.append(
                f"--dtype {options.dtype} overrides the casts of key map {key_map.name}: {first_few(cast, 3)}"
            )


def _by_transformers(draft: _Draft, chosen: Choice) -> Choice:
    """Return `chosen`, or transformers' own renaming if that produces more of the base model's names."""
    wanted = draft.base.wanted
    if wanted.keys() <= chosen.mapped.targets.keys() or chosen.mapped.targets.keys() <= wanted.keys():
        return chosen  # nothing is missing, or nothing is left to rename
    from ckptkit.offline.export.transformers_names import live_model

    model = live_model(draft.base.config, wanted)
    return model.choose(draft.targets, wanted, chosen) if model is not None else chosen


# --- the two kinds of export


def _model_tensors(
    draft: _Draft, split: AdapterSplit | None, quantized: Dequantized | None, store: Store
) -> dict[str, OutputTensor]:
    options = draft.options
    changes: dict[str, Change] = {}
    if quantized is not None and quantized.made:
        draft.notes.append(quantized.note())
    if split is not None:
        from ckptkit.offline.export.adapter_merge import adapter_changes
        from ckptkit.offline.export.adapters import adapter_config

        config = adapter_config(_adapter_source(draft, split), split, base=draft.base.repo)
        changes = adapter_changes(split, config, model_type=_model_type(draft.base.config))
        draft.targets = {**split.base, **{name: replace(t, name=name) for name, t in split.saved.items()}}
        for pair in split.pairs.values():
            for factor in pair.factors.values():
                draft.dropped.update(dict.fromkeys(factor.sources, "merged into the base weight"))
        for other in split.others.values():
            draft.dropped.update(dict.fromkeys(other.sources, "part of the adapter that was merged"))
        draft.notes.append(f"adapter merged into {counted(len(split.pairs), 'weight')}")
    _map_names(draft)
    _settle_tied(draft, store)
    _drop_buffers(draft)
    _compare(draft)
    targets = {name: _cast(target, options.dtype) for name, target in draft.targets.items()}
    tensors: dict[str, OutputTensor] = dict(targets)
    if split is not None:
        from ckptkit.offline.export.adapter_merge import merge_adapter

        before = quantized.made if quantized is not None else {}
        tensors = merge_adapter(targets, changes, split.base, before=before, tied=draft.tied, notes=draft.notes)
        for tensor in tensors.values():
            for source in tensor.sources:
                draft.dropped.pop(source, None)
    elif quantized is not None:
        tensors = quantized.computed(tensors)
    if options.vocabulary is not None:
        from ckptkit.offline.vocabulary import resize

        base = draft.base
        tensors, resized, notes = resize(
            tensors, base.config, options.vocabulary, store=store, catalog=draft.catalog, files=base.files
        )
        draft.notes += notes
        draft.base = replace(base, config=resized)
    if options.quantize:
        from ckptkit.offline.export.quantize import quantize

        made = quantize(tensors, draft.base.config)
        draft.notes += made.notes
        draft.quantization = made.config
        tensors = made.tensors
    return _in_torchao_layout(draft, tensors)


def _wanted_in_parts(wanted: Mapping[str, WantedTensor], recipes: Mapping[str, Recipe]) -> dict[str, WantedTensor]:
    """Return `wanted`, the base model's tensors, with inner tensors in place of weights that torchao has quantized.

    `recipes` describes how the checkpoint's quantized weights are split into inner tensors.
    """
    found = dict(wanted)
    for name, recipe in recipes.items():
        for outer in (name, name.partition(".")[2]):
            parts = {f"{outer}{SEPARATOR}{attribute}": WantedTensor() for attribute in recipe["inner"]}
            listed = [found.pop(stored_name(part), None) for part in parts]  # an index lists the inner tensors
            if found.pop(outer, None) is not None or any(listed):
                found.update(parts)
    return found


def _in_torchao_layout(draft: _Draft, tensors: dict[str, OutputTensor]) -> dict[str, OutputTensor]:
    """Rename the inner tensors of torchao's weights as in torchao's safetensors files.

    Puts the description of the weights, which torchao expects in the safetensors header, into the draft.
    """
    recipes = recipes_of(draft.catalog)
    if not recipes:
        return tensors
    named: dict[str, OutputTensor] = {}
    weights: dict[str, Recipe] = {}
    for name, tensor in tensors.items():
        sources = {outer_name(source, recipes) for source in tensor.sources} & recipes.keys()
        if not sources:
            named[name] = tensor
            continue
        outer, _, attribute = name.partition(SEPARATOR)
        weights[outer] = recipe = recipes[sources.pop()]
        plain = isinstance(tensor, Target) and _whole_source(tensor) is not None
        if sources or not plain or attribute not in recipe["inner"] or "." not in outer:
            raise UnsupportedFormatError(
                f"the key map {draft.key_map} changes {tensor.sources[0]}, which is a part of a {recipe['class']}. "
                "Only its name may change."
            )
        named[stored_name(name)] = replace(tensor, name=stored_name(name))
    for outer, recipe in weights.items():
        for attribute in recipe["inner"]:
            if f"{outer}{SEPARATOR}{attribute}" not in tensors:
                raise UsageError(
                    f"--include or --exclude skips {attribute}, a part of {outer}. Use a glob that matches {outer!r}."
                )
    if weights:
        plain_names = [name for name in named if name in tensors]
        draft.described = describe_tensors(plain_names, weights)
        draft.notes.append(f"{counted(len(weights), 'weight', 'are')} stored in torchao's safetensors layout")
    return named


def _dequantized(draft: _Draft) -> Dequantized | None:
    """Replace the draft's quantized weights with dequantized ones, unless the dtype is "keep".

    Weights whose lower bits flashoptim stores in separate tensors are replaced with exact weights. Returns None if
    there is nothing to replace.
    """
    dtype = draft.options.dtype if draft.options.dtype != "keep" else draft.options.dequantize
    if not draft.lower_bits and (dtype == "keep" or not _quantized(draft)):
        return None
    from ckptkit.offline.export.dequantize import dequantize, with_lower_bits

    if draft.lower_bits:
        found = with_lower_bits(draft.targets, draft.lower_bits, draft.options.dtype)
    else:
        found = dequantize(draft.targets, dtype, draft.base.config)
    draft.targets = found.targets
    draft.dropped.update(found.dropped)
    wanted = {name: want for name, want in draft.base.wanted.items() if name not in found.names}
    for stored, name in found.names.items():
        if stored in draft.base.wanted and name in found.targets:  # the base is quantized in the same way
            wanted[name] = WantedTensor(found.targets[name].dtype, found.targets[name].shape)
    draft.base = replace(draft.base, wanted=wanted)
    return found


def _quantized(draft: _Draft) -> bool:
    """Return whether the export may contain quantized weights.

    FP8 tensors count even without a scale, so that a requested dtype is never ignored for them.
    """
    config, asked = draft.base.config or {}, draft.options.dtype != "keep"
    return "quantization_config" in config or any(
        _is_scale(name) or (asked and dtype_of(target.source_dtype).kind == "float8")
        for name, target in draft.targets.items()
    )


def _model_type(config: Mapping[str, Any] | None) -> str | None:
    """Return the config's model type (for a multimodal model, that of the text model), or None if unknown."""
    config = config or {}
    text = config.get("text_config")
    found = (text if isinstance(text, Mapping) else config).get("model_type") or config.get("model_type")
    return found if isinstance(found, str) else None


def _adapter_tensors(draft: _Draft, split: AdapterSplit) -> dict[str, OutputTensor]:
    from ckptkit.offline.export.adapters import adapter_config, export_adapter, named_base, repo_of, without_base

    given = _adapter_source(draft, split)
    config = adapter_config(given, split, base=draft.base.repo)
    made, notes = export_adapter(split, config, alone=without_base(draft.catalog.by_role(Role.MODEL)))
    draft.notes += [*notes, *named_base(given or {}, config)]
    for target in split.base.values():
        draft.dropped.update(dict.fromkeys(target.sources, "a base weight; only the adapter was exported"))
    draft.key_map = "peft"
    tensors = {name: _cast(target, draft.options.dtype) for name, target in made.items()}
    draft.base = replace(draft.base, config=None, adapter_config=config, wanted={}, repo=repo_of(config))
    return dict(tensors)


def _finish(draft: _Draft, tensors: dict[str, OutputTensor], kind: Literal["model", "adapter"], url: str) -> HFExport:
    _check_dtypes(tensors)
    if draft.faults and draft.options.strict:
        raise CheckpointMismatchError(
            f"the checkpoint does not match {draft.base.where}:\n  " + "\n  ".join(draft.faults) + _advice(draft)
        )
    counts: Counter[str] = Counter()  # elements by dtype
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numel
    config = _config(draft, tensors, counts) if kind == "model" else None
    files = _small_files(draft, config, kind)
    used = {source for tensor in tensors.values() for source in tensor.sources}
    leftovers = [
        (name, draft.dropped.get(name) or f"{entry.role.value} state, not part of the {draft.weights} weights")
        for name, entry in draft.catalog.tensors.items()
        if name not in used
    ]
    if draft.options.card:
        facts = CardFacts(
            url, kind, sum(counts.values()),
            sum(n * dtype_of(name).itemsize for name, n in counts.items()), counts, draft.weights, draft.key_map,
            draft.base.repo, tuple(draft.notes),
        )  # fmt: skip
        files["README.md"] = model_card(draft.catalog, facts).encode()
    return HFExport(
        tuple(tensors.values()),
        tuple(OutputFile.of_bytes(name, data) for name, data in files.items()),
        kind,
        config,
        draft.key_map,
        tuple(leftovers),
        tuple(draft.missing),
        tuple(draft.extra),
        tuple(draft.faults),
        tuple(dict.fromkeys(draft.notes)),
        _compared_with(draft),
        draft.described or draft.catalog.info.extra.get("metadata", {}),
    )


def _compared_with(draft: _Draft) -> str:
    if not draft.base.wanted:
        return ""
    counts = ((draft.missing, "missing tensor"), (draft.extra, "additional tensor"))
    more = " and ".join(counted(len(names), noun) for names, noun in counts if names)
    return f"{draft.base.where} (except {more})" if more else draft.base.where


# --- rules


def _settle_tied(draft: _Draft, store: Store) -> None:
    if not draft.base.config:
        return
    tensors = draft.catalog.tensors

    def same(first: Target, second: Target) -> bool:
        a, b = (_whole_source(target) for target in (first, second))
        if a is None or b is None or (first.dtype, second.dtype) != (second.dtype, first.dtype):
            return False
        return a == b or same_values(store, tensors[a], tensors[b])

    wanted = draft.base.wanted or None
    outcome = settle_tied(draft.targets, draft.base.config, same=same, wanted=wanted, untie=draft.options.untie)
    for name, other in outcome.names.items():
        _note_tied(draft, draft.targets[name], draft.targets[other])
    draft.targets = dict(outcome.targets)
    draft.dropped.update(outcome.dropped)
    draft.notes += outcome.notes
    draft.untied = outcome.untied
    if wanted and (draft.base.config or {}).get("tie_word_embeddings"):
        draft.targets = restore_embedding(draft.targets, wanted)
    if wanted and not draft.options.untie:
        _drop_aliases(draft, same)


def _drop_aliases(draft: _Draft, same: Callable[[Target, Target], bool]) -> None:
    """Drop tensors that the base model does not store, because they are tied to tensors that it stores.

    A tensor is dropped only if transformers ties it to a tensor of the base model, and both have equal bytes. Does
    nothing if the export lacks any tensor of the base model.
    """
    wanted, names = draft.base.wanted, draft.targets
    if not wanted.keys() <= names.keys() or len(names) == len(wanted):
        return
    kinds = {_kind(names[name]) for name in wanted}
    extra = [name for name in names if name not in wanted and _kind(names[name]) in kinds]
    if not extra:
        return
    from ckptkit.offline.export.transformers_names import live_model

    model = live_model(draft.base.config, wanted)
    if model is None or not model.tied:
        return
    kept: dict[str, str] = {}
    for name in wanted:
        live = draft.live.get(_whole_source(names[name]) or "", "")
        kept.setdefault(model.tied.get(live, live), name)
    for name in extra:
        live = draft.live.get(_whole_source(names[name]) or "", "")
        other = kept.get(model.tied.get(live, live)) if live else None
        if other is not None and same(names[name], names[other]):
            draft.dropped.update(dict.fromkeys(names[name].sources, f"tied: the same bytes as {other!r}"))
            draft.notes.append(f"{name} is tied to {other}: equal bytes, written once")
            _note_tied(draft, names[name], names[other])
            del names[name]


def _note_tied(draft: _Draft, target: Target, other: Target) -> None:
    first, second = _whole_source(target), _whole_source(other)
    if first is not None and second is not None and first != second:
        draft.tied[first] = second


def _kind(target: Target) -> tuple[str, tuple[int, ...], str]:
    """Return the properties that all names of a tied tensor share: dtype, shape, and the last component of the name."""
    return target.dtype, target.shape, target.name.rpartition(".")[2]


def _whole_source(target: Target) -> str | None:
    """Return the name of the source tensor of which `target` is an unchanged copy, or None if it is not a copy."""
    part = target.only_part
    return part.source if part is not None else None


def _drop_buffers(draft: _Draft) -> None:
    if not draft.base.wanted:
        return
    for name, reason in unexpected_buffers(draft.targets, draft.base.wanted, _model_type(draft.base.config)).items():
        for source in draft.targets.pop(name).sources:
            draft.dropped[source] = reason


def _compare(draft: _Draft) -> None:
    if not draft.base.wanted:
        if draft.base.config and not (draft.options.include or draft.options.exclude):
            draft.faults += absent_layers(draft.targets, draft.base.config)
        return
    targets = draft.targets
    if draft.options.vocabulary is not None:
        from ckptkit.offline.vocabulary import fitted

        shapes = {name: want.shape for name, want in draft.base.wanted.items()}
        targets = fitted(targets, shapes, draft.base.config, draft.options.vocabulary)
    result = compare_with_base(targets, draft.base, untied=draft.untied)
    draft.notes += result.notes
    draft.missing = list(result.missing)
    left_out = {name for name in result.missing if _left_out(draft, name)}
    if left_out:
        draft.notes.append(f"--include and --exclude skipped {counted(len(left_out), 'tensor')} of the base")
    draft.faults += [f"missing: {name}" for name in result.missing if name not in left_out]
    if draft.faults or result.shapes:
        draft.faults += [f"unexpected: {name} {list(draft.targets[name].shape)}" for name in result.unexpected]
    elif result.unexpected:
        # None of the base's tensors is missing, so the additional tensors were added on purpose and must not be lost.
        draft.extra = list(result.unexpected)
        draft.notes.append(
            f"kept, although the base has no such tensors: {first_few(draft.extra)}. Some loaders refuse "
            "them; --exclude skips them"
        )
    draft.faults += result.shapes


def _left_out(draft: _Draft, name: str) -> bool:
    """Return whether a name may be missing because of --include or --exclude.

    Globs are applied before the key map. If there is a key map, any glob may therefore be the reason.
    """
    options = draft.options
    if draft.key_map != "hf":
        return bool(options.include or options.exclude)
    return matches(options.exclude, name) or (bool(options.include) and not matches(options.include, name))


def _check_dtypes(tensors: Mapping[str, OutputTensor]) -> None:
    # Complex dtypes are refused too: safetensors has C64 since 0.8, but older readers reject the whole file.
    bad = [
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        if dtype_of(tensor.dtype).safetensors is None or dtype_of(tensor.dtype).kind == "complex"
    ]
    if bad:
        raise UnsupportedFormatError(
            f"safetensors, or most of its readers, do not support the dtype of: {', '.join(bad)}. Skip "
            "them with --exclude NAME, or write another format with --to."
        )


def _cast(target: Target, wanted: str) -> Target:
    """Return an output tensor with the `wanted` dtype. "keep" keeps the dtype from the source or the key map."""
    if wanted == "keep":
        return target
    return replace(target, dtype=export_dtype(target.dtype, wanted))


# --- small files


def _config(draft: _Draft, tensors: Mapping[str, OutputTensor], counts: Mapping[str, int]) -> dict[str, Any] | None:
    if draft.base.config is None:
        draft.notes.append(
            "there is no config.json, so transformers and vLLM cannot load the export. Pass --base MODEL"
        )
        return None
    floats = {name: n for name, n in counts.items() if dtype_of(name).kind == "float"}
    quantized = has_quantized(tensors) or bool(draft.described)
    given = draft.base.config.get("quantization_config")
    if draft.described and not (isinstance(given, Mapping) and given.get("quant_method") == "torchao"):
        raise UnsupportedFormatError(
            "the weights are torchao's, but config.json has no quantization_config with quant_method torchao: "
            "transformers would replace them with random values. Pass --base with a config.json that has it: "
            "model.config.quantization_config = TorchAoConfig(...)"
        )
    if draft.quantization is not None:
        scales = sum(tensors[name].numel for name in tensors if name.endswith("_scale_inv"))
        floats = {name: n - scales * (name == "float32") for name, n in floats.items()}
        dtype = max(floats, key=lambda name: floats[name]) if any(floats.values()) else None
    else:
        dtype = max(floats, key=lambda name: floats[name]) if floats and not quantized else None
    config, notes = export_config(draft.base.config, dtype=dtype, untied=draft.untied, quantized=quantized)
    draft.notes += notes
    if draft.quantization is not None:
        config["quantization_config"] = draft.quantization
    if "_diffusers_version" in config and "model_type" not in config:
        draft.notes.append(
            "config.json belongs to diffusers, which expects diffusion_pytorch_model*.safetensors: rename the files"
        )
    return config


def has_quantized(tensors: Mapping[str, OutputTensor]) -> bool:
    """Return whether any tensor of an export is a quantized weight or a scale."""
    return any(dtype_of(tensor.dtype).kind == "float8" or _is_scale(name) for name, tensor in tensors.items())


def _small_files(draft: _Draft, config: Mapping[str, Any] | None, kind: str) -> dict[str, bytes]:
    files = dict(draft.base.files)
    for taken in ("README.md", "config.json", "adapter_config.json"):
        files.pop(taken, None)
    if config is not None:
        files["config.json"] = _json(config)
    if kind == "adapter":
        files.pop("generation_config.json", None)
        files["adapter_config.json"] = _json(draft.base.adapter_config or {})
    return files


def _adapter_source(draft: _Draft, split: AdapterSplit) -> Mapping[str, Any] | None:
    given = draft.options.adapter_config
    return given if given is not None else draft.base.config_of_adapter(split.names[0])


def _json(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON can only contain as escapes
        return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _is_scale(name: str) -> bool:
    # Do not match every "_scale", because some models have such parameters, for example logit_scale.
    return name.endswith(
        (
            ".qweight",
            ".weight_packed",
            ".weight_scale",
            "_scale_inv",
            ".scales",
            ".absmax",
            "_proj_blocks",
            "_proj_scales",
        )
    )


def _advice(draft: _Draft) -> str:
    if any(fault.startswith("unexpected") for fault in draft.faults):
        from importlib.util import find_spec

        advice = "\n  Try --key-map, --strip-prefix, or --exclude NAME for tensors that the model does not have."
        if draft.missing and find_spec("transformers") is None:
            advice += " With transformers 5 installed, ckptkit also knows the names of models in memory."
        return advice
    return "\n  Is --base the model that was trained?"
