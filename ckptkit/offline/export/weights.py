"""Selects the tensors to export (model weights or fp32 masters), and removes wrappers from their names."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ckptkit.catalog.dtypes import export_dtype
from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, CheckpointNotFoundError, UnsupportedFormatError, UsageError
from ckptkit.formats.dcp.class_records import recipes_of
from ckptkit.formats.dcp.subclasses import lower_bits_of, outer_name
from ckptkit.formats.hf.torchao import CLASSES
from ckptkit.formats.models import masters_of, model_names
from ckptkit.formats.parameter_names import with_named_masters
from ckptkit.formats.training_state import read_training_state
from ckptkit.keymaps.wrappers import strip_infixes, strip_prefix
from ckptkit.storage.store import Store
from ckptkit.units import counted, first_few

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source
    from ckptkit.keymaps.keymap import NameMap
    from ckptkit.offline.vocabulary import VocabSize


MATCHES_NONE = "matches no tensor"  # the end of a note about a glob
_EXTRA_STATE = "_extra_state"  # what a module's get_extra_state returned; in TransformerEngine, a tensor

_NAMELESS = "their optimizer numbers its parameters, and order and shapes do not prove which is which"

# --- the options of an export


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The user's options.

    Attributes:
        dtype: "keep" or a float dtype. Only floats are cast.
        dequantize: The dtype to which quantized weights are dequantized if `dtype` is "keep". If both options are
            "keep", weights stay quantized.
        weights: "model", "master" (the fp32 copies), "ema" (the moving average in the checkpoint), or "auto" (see
            `choose_weights`).
        key_map: The key map to apply. None chooses one if the choice is unambiguous.
        strip_prefix: A prefix to remove from every name. Tensors without this prefix are omitted.
        include, exclude: Globs. They match catalog keys, and names as they are before the key map is applied.
        untie: Export the output head and the embedding as two tensors, although the config ties them.
        adapter_config: PEFT's adapter config, if neither the checkpoint nor the base has an adapter config.
        merge_adapter: Merge the adapter into the base weights.
        quantize: "fp8-block" quantizes the result. None does not quantize.
        vocabulary: The vocabulary size to which the embedding and the output head are resized.
        card: Write README.md.
        strict: Whether mismatches with the base are raised. If False, they are listed in `HFExport.faults`.
        notes: Notes to add to README.md.
    """

    dtype: str = "keep"
    dequantize: str = "keep"
    weights: Literal["auto", "model", "master", "ema"] = "auto"
    key_map: NameMap | None = None
    strip_prefix: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    untie: bool = False
    adapter_config: Mapping[str, Any] | None = None
    merge_adapter: bool = False
    quantize: Literal["fp8-block"] | None = None
    vocabulary: VocabSize | None = None
    card: bool = True
    strict: bool = True
    notes: tuple[str, ...] = ()

    @property
    def chooses(self) -> bool:
        """Whether an option selects or renames tensors. If so, an export of several models is intended."""
        return bool(self.include or self.exclude or self.strip_prefix or self.key_map)


@dataclass(slots=True)
class Selection:
    """The tensors to export (by name), the kind of weights, and the omitted source tensors, each with the reason.

    flashoptim stores an fp32 weight as a bf16 or fp16 weight and a tensor with the lower bits. `lower_bits` contains
    the tensors with the lower bits, by the weight's name in the catalog.
    """

    weights: str
    targets: dict[str, Target] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lower_bits: dict[str, TensorEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weights:
    """The entries to export (by FQN), the kind of weights ("model", "master" or "ema"), and notes."""

    entries: dict[str, TensorEntry]
    weights: Literal["model", "master", "ema"]
    notes: tuple[str, ...] = ()


def select_targets(
    store: Store, catalog: Catalog, options: ExportOptions, *, wanted: Collection[str] = (), in_parts: bool = False
) -> Selection:
    """Return the tensors that the options select, under names without the prefixes of wrappers or `strip_prefix`.

    Args:
        wanted: The base model's names, which distinguish a wrapper's prefix from a prefix of the model.
        in_parts: Whether the export can store torchao's quantized weights as their inner tensors.

    Raises:
        UsageError: No tensor is left, or several models match the base equally well.
        UnsupportedFormatError: A selected tensor is of a Python class that ckptkit cannot export.
        CheckpointNotFoundError, CheckpointMismatchError: As for `choose_weights`.
    """
    lower = _lower_bits(catalog, options.weights, options.dtype)
    chosen = choose_weights(
        store, catalog, "model" if lower else options.weights, dtype=options.dtype, prefix=options.strip_prefix or ""
    )
    found = Selection("master" if lower else chosen.weights, notes=list(chosen.notes), lower_bits=lower)
    names = unwrapped = strip_infixes(chosen.entries)
    if options.strip_prefix:
        kept = strip_prefix(names.values(), options.strip_prefix)
        for name, short in names.items():
            if short not in kept:
                found.dropped[chosen.entries[name].name] = f"lacks the prefix {options.strip_prefix!r}"
        names = {name: kept[short] for name, short in names.items() if short in kept}
    elif wanted and not set(wanted) <= set(names.values()):
        names = _without_wrapper(names, chosen.entries, frozenset(wanted), options, found)
    recipes = recipes_of(catalog)
    known: list[tuple[str, ...]] = []
    for name, short in names.items():
        entry = chosen.entries[name]
        outer = outer_name(entry.name, recipes)
        # The master of a tied weight may be stored under its other name. Globs must not match that name.
        tied = entry.role is Role.MASTER and catalog.tensors[entry.name].fqn != name
        key = catalog.by_role(Role.MODEL)[name].name if tied else entry.name
        own: tuple[str, ...] = tuple(dict.fromkeys((short, unwrapped[name], key)))
        if outer != entry.name:
            own += (short.removesuffix(entry.name[len(outer) :]), outer)
        known.append(own)
        if short.rpartition(".")[2] == _EXTRA_STATE and short not in wanted:
            found.dropped[key] = "extra state of a module (get_extra_state), not a weight"
        elif options.include and not matches(options.include, *own):
            found.dropped[key] = "not included"
        elif matches(options.exclude, *own):
            found.dropped[key] = "excluded"
        else:
            found.targets[short] = Target.of(entry, short)
    if options.include or options.exclude:
        known += [(name, name.partition(".")[2]) for name in catalog.info.extra.get("opaque", {})]
    for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        idle = [glob for glob in patterns if not any(matches((glob,), *both) for both in known)]
        found.notes += [f"{option} {glob!r} {MATCHES_NONE}" for glob in idle]
    _refuse_opaque(catalog, found, options, in_parts=in_parts)
    if not found.targets:
        given = [*(f"--include {x!r}" for x in options.include), *(f"--exclude {x!r}" for x in options.exclude)]
        given += [f"--strip-prefix {options.strip_prefix!r}"] if options.strip_prefix else []
        after = f" after {' and '.join(given)}" if given else ""
        raise UsageError(
            f"nothing to export: of {counted(len(chosen.entries), f'{chosen.weights} tensor')}, none is left{after}."
        )
    return found


def _refuse_opaque(catalog: Catalog, found: Selection, options: ExportOptions, *, in_parts: bool) -> None:
    """Raise if a selected tensor is of a Python class (a tensor subclass) that ckptkit cannot export."""
    opaque = {}
    recipes = recipes_of(catalog)
    for name, why in catalog.info.extra.get("opaque", {}).items():
        item, names = catalog.objects.get(name), (name, name.partition(".")[2])
        wanted = not options.include or matches(options.include, *names)
        if item is not None and item.role is Role.MODEL and wanted and not matches(options.exclude, *names):
            opaque[name] = why
    for target in found.targets.values():
        for source in target.sources:
            if why := catalog.tensors[source].slices.opaque:
                opaque[source] = why
            outer = outer_name(source, recipes)
            if outer != source and not (in_parts and recipes[outer]["class"] in CLASSES.values()):
                opaque[outer] = f"is a {recipes[outer]['class']}, which is stored in parts"
    if opaque:
        known = all(recipes.get(name, {}).get("class") in CLASSES.values() for name in opaque)
        listed = "\n  ".join(f"tensor {name} {why}" for name, why in opaque.items())
        kept = "keeps them, and so does --to hf without --dtype" if known and not in_parts else "keeps them"
        raise UnsupportedFormatError(
            f"tensors that only their class can read cannot be exported ({len(opaque)}):\n  {listed}\nSkip them with "
            f"--exclude NAME. Resharding {kept}. To export their values, load them in a job that has the class, "
            "dequantize them, and save them there."
        )


def _without_wrapper(
    names: dict[str, str],
    entries: Mapping[str, TensorEntry],
    wanted: frozenset[str],
    options: ExportOptions,
    found: Selection,
) -> dict[str, str]:
    """Strip a wrapper's prefix: a prefix that the base model's names do not have.

    If the checkpoint contains several models that match the base, --include and --exclude choose one. If several are
    left, those whose names start with "model." take precedence. Of these, the model with the most matching names is
    taken.

    Raises:
        UsageError: Several models match the base equally well.
    """
    before = len(wanted - set(names.values()))
    allowed = min(len(wanted) // 20, before - 1)
    hits: Counter[str] = Counter()  # how many of the base's names follow each prefix
    for short in names.values():
        at = short.find(".") + 1
        while at:
            hits[short[:at]] += short[at:] in wanted
            at = short.find(".", at) + 1
    missing: dict[str, int] = {}
    for prefix in (prefix for prefix, count in hits.items() if before - count <= allowed):
        inside = {short.removeprefix(prefix) for short in names.values()}
        if len(inside) == len(names) and (lost := len(wanted - inside)) <= allowed:
            missing[prefix] = lost
    if not missing:
        return names
    chosen = [prefix for prefix in missing if _selects(options, names, entries, prefix)] or [*missing]
    chosen = [prefix for prefix in chosen if prefix.startswith("model.")] or chosen
    chosen = [prefix for prefix in chosen if missing[prefix] == min(missing[other] for other in chosen)]
    first = chosen[0]
    if len(chosen) > 1:
        raise UsageError(
            f"several models in the checkpoint match the base: their names start with {_listed(chosen)}. Choose one "
            f"with --strip-prefix {first.removesuffix('.')} or --include '{first}*'."
        )
    others = [prefix for prefix in missing if prefix != first]
    also = f"; to strip {_listed(others)} instead, which also fits, pass --strip-prefix" if others else ""
    found.notes.append(f"the prefix {first!r} was stripped: {len(wanted) - missing[first]} names match the base{also}")
    return {name: short.removeprefix(first) for name, short in names.items()}


def _selects(options: ExportOptions, names: Mapping[str, str], entries: Mapping[str, TensorEntry], prefix: str) -> bool:
    """Return whether --include and --exclude select any tensor whose name starts with `prefix`."""
    if not options.include and not options.exclude:
        return True
    for name, short in names.items():
        if short.startswith(prefix):
            own = (short.removeprefix(prefix), short, entries[name].name)
            if (not options.include or matches(options.include, *own)) and not matches(options.exclude, *own):
                return True
    return False


def _listed(prefixes: Collection[str]) -> str:
    return first_few([repr(prefix) for prefix in prefixes])


def several_models(entries: Collection[TensorEntry]) -> str:
    """Return a message for the user if the tensors belong to several models, otherwise ""."""
    models = model_names(entries)
    if len(models) < 2:
        return ""
    listed = first_few([repr(f"{name}.") if name else "no model's name" for name in models])
    first = next(filter(None, models))
    choice = f"--exclude '{first}.*'" if "" in models else f"--strip-prefix {first}"
    return (
        f"there are {len(models)} models, whose tensor names start with {listed}; transformers and vLLM load one. "
        f"Choose one, for example with `{choice}`."
    )


def matches(patterns: tuple[str, ...], *names: str) -> bool:
    """Return whether any of the names matches any of the globs."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def choose_weights(
    store: Store,
    catalog: Catalog,
    weights: Literal["auto", "model", "master", "ema"],
    *,
    dtype: str = "keep",
    prefix: str = "",
) -> Weights:
    """Return the requested weights. `prefix`: the model whose EMA is requested, if there are several models.

    "auto" means the model's weights, with two exceptions. It means the masters if there are only masters, or if `dtype`
    casts weights that were rounded from masters. If masters are exported, buffers and frozen parameters come from the
    model, because they have no masters.

    Raises:
        CheckpointNotFoundError: The checkpoint does not contain the requested weights.
        CheckpointMismatchError: Names or shapes of the masters, or of the EMA, do not match the model's weights.
        UsageError: There are several EMAs.
        UnsupportedFormatError: The EMA's tensors have no names.
    """
    if weights == "ema":
        from ckptkit.offline.export.ema import averaged

        entries, said = averaged(store, catalog, prefix)
        return Weights(entries, "ema", said)
    model = catalog.by_role(Role.MODEL)
    if weights == "model" or (weights == "auto" and model and not _rounded(catalog, dtype)):
        if not model:
            raise CheckpointNotFoundError(f"the checkpoint contains no model weights: {_roles(catalog)}.")
        lossy = weights == "auto" and dtype != "keep" and any(map(_is_nameless, catalog.tensors.values()))
        return Weights(model, "model", (f"the fp32 masters are not used: {_NAMELESS}",) if lossy else ())
    masters = masters_of(catalog)
    if not masters:
        what = "no fp32 masters" if weights == "master" else "neither model weights nor fp32 masters"
        why = "".join(f"\n  {note}" for note in catalog.info.notes)
        raise CheckpointNotFoundError(f"the checkpoint contains {what}: {_roles(catalog)}.{why}")
    if not model:
        return Weights(masters, "master", ("the checkpoint contains only fp32 masters, which are exported",))
    strange = [name for name in masters if name not in model]
    shapes = [n for n, e in masters.items() if n in model and model[n].shape != e.shape]
    if strange or shapes:
        why = f"\n{_NAMELESS}." if any(map(_is_nameless, masters.values())) else ""
        raise CheckpointMismatchError(
            "the fp32 masters do not match the model weights:\n  "
            + "\n  ".join([f"no model weight: {n}" for n in strange] + [f"different shape: {n}" for n in shapes])
            + why
        )
    chosen = {name: masters.get(name, entry) for name, entry in model.items()}
    alone = [name for name, entry in chosen.items() if entry.role is Role.MODEL]
    notes = (
        [
            f"{counted(len(alone), 'tensor', 'have')} no fp32 master (buffers, frozen parameters): the model's values "
            "are used"
        ]
        if alone
        else []
    )
    return Weights(chosen, "master", tuple(notes))


def with_masters(source: Source, weights: str, dtype: str) -> Source:
    """Return the source with FQNs for numbered masters, if an export with these options uses masters."""
    if weights not in ("auto", "master") or (weights == "auto" and dtype == "keep"):
        return source
    catalog = source.catalog
    return replace(source, catalog=with_named_masters(catalog, lambda: read_training_state(source.store, catalog)))


def _is_nameless(entry: TensorEntry) -> bool:
    return entry.role is Role.MASTER and not entry.fqn


def _lower_bits(catalog: Catalog, weights: str, dtype: str) -> dict[str, TensorEntry]:
    """Return, by the weight's name in the catalog, the tensors with the lower bits of fp32 weights.

    flashoptim stores an fp32 weight as a bf16 or fp16 weight and a tensor with the lower bits. Returns {} if there are
    no such tensors, or if the export does not need them. The export needs them if `weights` is "master", or if
    `weights` is "auto" and `dtype` casts a weight.
    """
    if weights not in ("auto", "master"):
        return {}
    model = catalog.by_role(Role.MODEL)
    found = {model[fqn].name: entry for fqn, entry in lower_bits_of(catalog).items()}
    casts = any(export_dtype(catalog.tensors[name].dtype, dtype) != catalog.tensors[name].dtype for name in found)
    return found if weights == "master" or casts else {}


def _rounded(catalog: Catalog, dtype: str) -> bool:
    """Return whether an export to `dtype` would cast weights that were rounded from fp32 masters.

    In this case, the masters are cast instead.
    """
    if dtype == "keep":
        return False
    model, masters = catalog.by_role(Role.MODEL), catalog.by_role(Role.MASTER)
    pairs = [(model[name], master) for name, master in masters.items() if name in model]
    if len(pairs) < len(masters) or any(a.shape != b.shape for a, b in pairs):
        return False
    return any(a.dtype != b.dtype and export_dtype(a.dtype, dtype) != a.dtype for a, b in pairs)


def _roles(catalog: Catalog) -> str:
    counts: dict[str, int] = {}
    for entry in catalog.tensors.values():
        counts[entry.role.value] = counts.get(entry.role.value, 0) + 1
    return ", ".join(counted(n, f"{role} tensor") for role, n in counts.items()) or "it holds no tensors"
