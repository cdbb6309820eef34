"""Averages the model weights of several checkpoints, and writes the result as `convert` does."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.arguments import Location, check_int, globs, location, wrong
from ckptkit.catalog.casts import cast_into, float_values, round_pairs, split_pairs
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.dtypes import export_dtype
from ckptkit.catalog.targets import Target
from ckptkit.digests import crc32
from ckptkit.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    UsageError,
)
from ckptkit.formats.dcp.class_records import recipes_of
from ckptkit.formats.dcp.subclasses import outer_name
from ckptkit.formats.models import with_tied_names
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.own.record import step_of_name
from ckptkit.offline.conversion import ConvertReport, How
from ckptkit.offline.convert import Format, Output, Weights, choose, key_map_of, shard_bytes, write
from ckptkit.offline.copying.copier import Progress
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.offline.export.hf import HFExport
from ckptkit.offline.export.tied import config_ties, same_values, tied_pairs
from ckptkit.offline.export.weights import MATCHES_NONE, ExportOptions, with_masters
from ckptkit.offline.joined import join, taken_from
from ckptkit.offline.publish import options_of_both
from ckptkit.offline.reading import open_pinned, reads_checkpoints
from ckptkit.storage.open import open_store
from ckptkit.storage.retry import patient
from ckptkit.units import counted, first_few, parse_size

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source
    from ckptkit.keymaps.keymap import NameMap


Bytes = npt.NDArray[np.uint8]
Sums: TypeAlias = Literal["fp32", "fp64"]
_NAMED = 5
_LABELS = ("_name_or_path", "transformers_version", "peft_version")
_SCALING = ("lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "fan_in_fan_out")
_SETS = ("target_modules", "exclude_modules")  # PEFT writes these lists in any order
_PIECE = 1 << 18  # elements; larger pieces leave the cache, and smaller ones wait for the GIL more often


@reads_checkpoints
@patient()
def merge(  # noqa: PLR0913 - one argument an option
    sources: Sequence[Location],
    dst: Location,
    *,
    weights: str | Sequence[float] = "uniform",
    last: int | None = None,
    steps: str | None = None,
    sum_dtype: Sums = "fp32",
    to: Format = "hf",
    dtype: str = "keep",
    take: Weights = "auto",
    base: str | None = None,
    key_map: NameMap | str | None = None,
    strip_prefix: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_shard_size: str | int | None = None,
    world_size: int | None = None,
    workers: int = 0,
    max_memory: str | int = "512MB",
    check: bool = True,
    verify: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    src_storage_options: Mapping[str, Any] | None = None,
    dst_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    sha256: bool = False,
) -> ConvertReport:
    """Write the weighted sum of several checkpoints' model weights to `dst`, published atomically.

    Each float tensor becomes ((w1 * x1 + w2 * x2) + w3 * x3) + .... If w1, w2, ... are all equal, it becomes the mean
    of the tensors, ((x1 + x2) + x3 + ...) / n. Every operation is rounded to `sum_dtype` (for fp64 tensors, to fp64),
    and the result is cast once. The result is bit-identical for any number of workers and any memory limit. Other
    tensors (integers, booleans) are copied from the last source. Quantized weights (FP8, MXFP4, compressed-tensors) are
    first dequantized to fp32, and the sum is written in bf16, or in `dtype`. The sources may have different formats,
    layouts and world sizes, but their tensors must have the same names and shapes. Unquantized tensors must also have
    the same dtypes. Optimizer states are not merged. Config and tokenizer come from the last source.

    Args:
        sources: The checkpoints, oldest first, or a single run if `last` or `steps` is set.
        weights: The weights of the sources. "uniform": equal weights. "minus-sqrt": equivalent to a 1 - sqrt learning
            rate decay over the sources, as in Megatron-LM. "ema:DECAY": the exponential moving average that starts at
            the first source. Otherwise, numbers that add up to 1, as a sequence or as text: "0.2,0.3,0.5".
        last: Merge the last N committed checkpoints of the run.
        steps: "FIRST:LAST" merges the run's committed checkpoints from step FIRST to step LAST, inclusive.
        sum_dtype: "fp32" or "fp64".
        take: Which weights to merge, like the argument `weights` of `convert`.
        to, dtype, base, key_map, ...: The same as in `convert`.

    Raises:
        UsageError: Options conflict, or weights do not add up to 1.
        CheckpointNotFoundError: The run does not exist, or has too few checkpoints.
        CheckpointMismatchError: The sources differ in names, shapes or dtypes.
        UnsupportedFormatError: ckptkit cannot dequantize a tensor.
    """
    if isinstance(sources, (str, os.PathLike)) or not isinstance(sources, Iterable):
        raise wrong("sources", sources, "a sequence of URLs, such as [first, second]")
    given = [location(f"sources[{index}]", source) for index, source in enumerate(sources)]
    dst = location("dst", dst)
    if sum_dtype not in ("fp32", "fp64"):
        raise UsageError(f"sum_dtype={sum_dtype!r}: expected 'fp32' or 'fp64'.")
    there, here = options_of_both(storage_options, src_storage_options, dst_storage_options)
    memory = parse_size(max_memory, "max_memory")
    how = How(workers, memory, check, verify, dry_run, overwrite, there, here, progress)
    dtype = str(dtype)  # accepts torch.bfloat16
    export_dtype("float32", dtype)  # raises for an unknown dtype, before a source is opened
    output = Output(dst, to, shard_bytes(max_shard_size), world_size, sha256, how)
    output.check(max_memory, max_shard_size)
    urls = _of_run(given, last, steps, there)
    factors = weights_of(weights, len(urls))
    reading = ReadOptions(base=base, strip_prefix=strip_prefix)
    found = _opened(urls, partial(open_pinned, storage_options=there, options=reading, together=not dry_run))
    whole = (replace(source, catalog=with_tied_names(source.catalog)) for source in found)
    opened = [with_masters(source, take, dtype) for source in whole]
    options = ExportOptions(
        dtype, "bf16", take, key_map_of(key_map), strip_prefix, globs("include", include), globs("exclude", exclude),
        strict=not dry_run,
    )  # fmt: skip
    said = "merged from " + ", ".join(
        f"{f:.6g} * {s.url.rpartition('/')[2]}" for f, s in zip(factors, opened, strict=True)
    )
    each = [options] * (len(opened) - 1) + [replace(options, notes=(said,))]
    parts = []
    for source, own in zip(opened, each, strict=True):
        with _named(source.url):
            parts.append(choose(source, to, own, base, storage_options))
    _refuse_parts(opened, parts)
    # Sum quantized weights in fp32, so that only the result is rounded.
    wide = replace(options, dtype="keep", dequantize="fp32")
    named: list[dict[str, OutputTensor]] = []
    used = []
    for index, (source, part) in enumerate(zip(opened, parts, strict=True)):
        dequantized = choose(source, to, wide, base, storage_options) if _is_quantized(part) else part
        named.append(_terms(index, source, part, dequantized))
        keys = dict.fromkeys(key for tensor in part.tensors for key in tensor.sources)
        used.append([source.catalog.tensors[key] for key in keys])
    heads = _settle_heads(opened, parts, named)
    export = _combined(opened, parts, named, factors, sum_dtype, said)
    export = replace(export, notes=(*export.notes, *heads))
    return write(", ".join(given), join(opened, used), export, options, output)


def _opened(urls: Sequence[str], open_one: Callable[[str], Source]) -> list[Source]:
    """Open all sources. Raises UsageError if a checkpoint is given twice."""
    opened: list[Source] = []
    for url in urls:
        with _named(url):
            source = open_one(url)
        if source.url in [other.url for other in opened]:
            other = ", with the sum of its weights" if len(urls) > 2 else " with another checkpoint"
            raise UsageError(f"{source.url} is given twice. Give it once{other}.")
        opened.append(source)
    return opened


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Add the source's URL to the message of any error in the block."""
    try:
        yield
    except CkptkitError as error:
        if url in str(error):
            raise
        raise type(error)(f"{url}: {error}") from error


def _is_quantized(part: HFExport) -> bool:
    return any(isinstance(tensor, ComputedTensor) for tensor in part.tensors)


# --- which checkpoints, and their weights


def weights_of(weights: str | Sequence[float], count: int) -> tuple[float, ...]:
    """Return the weight of each of the `count` checkpoints, oldest first.

    "minus-sqrt" imitates a learning rate that decays as d(x) = 1 - sqrt(x), with source i at x = i / count. The weight
    of a source is the decrease of d from this source to the next (Megatron-LM, `tools/checkpoint/weighted_merge.py`).

    Raises:
        UsageError: The weights are malformed or do not add up to 1, or their number is not `count`.
    """
    if isinstance(weights, str):
        if weights == "uniform":
            return (1 / count,) * count
        if weights == "minus-sqrt":
            decayed = [1 - math.sqrt(i / count) for i in range(count)] + [0.0]
            found = [decayed[i] - decayed[i + 1] for i in range(1, count)]
            return (1 - sum(found), *found)
        if weights.startswith("ema:"):
            decay = _number(weights[4:], weights)
            if not 0 < decay < 1:
                raise UsageError(f"--weights {weights}: the decay must be between 0 and 1, such as ema:0.9.")
            return (decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - i) for i in range(1, count)))
        weights = [_number(text, weights) for text in weights.split(",")]
    if not isinstance(weights, Iterable) or not all(isinstance(value, (int, float)) for value in weights):
        raise wrong("weights", weights, "'uniform', 'minus-sqrt', 'ema:0.9' or a sequence of numbers")
    given = tuple(float(value) for value in weights)
    if len(given) != count:
        raise UsageError(
            f"{counted(len(given), 'weight', 'are')} given for {count} checkpoints; expected one for each."
        )
    total = sum(given)
    if not math.isclose(total, 1, abs_tol=1e-6):
        scaled = ",".join(f"{value / total:.6g}" for value in given) if math.isfinite(total) and total else ""
        raise UsageError(
            f"the weights add up to {total:g}; expected 1." + (f" Scaled, they are {scaled}." if scaled else "")
        )
    return given


def _number(text: str, given: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"--weights {given}: expected uniform, minus-sqrt, ema:DECAY, or numbers such as 0.2,0.3,0.5."
        ) from None


def _of_run(
    sources: Sequence[str], last: int | None, steps: str | None, storage_options: Mapping[str, Any] | None
) -> list[str]:
    """Return the URLs of the checkpoints to merge, oldest first."""
    if last is None and steps is None:
        if len(sources) < 2:
            raise UsageError("one checkpoint cannot be merged. Name several, or a run with --last N or --steps A:B.")
        return list(sources)
    if len(sources) != 1 or (last is not None and steps is not None):
        raise UsageError("--last and --steps each choose checkpoints of one run: name one run, and use one of them.")
    if last is not None:
        check_int("last", last, least=2)
    from ckptkit.checkpoint.run.inventory import list_checkpoints
    from ckptkit.offline.listing import nothing_of_ours

    run = sources[0].rstrip("/")
    root = open_store(run, storage_options=storage_options)
    inventory = list_checkpoints(root)
    committed = inventory.committed
    if not committed:
        raise CheckpointNotFoundError(nothing_of_ours(run, inventory, root, storage_options=storage_options))
    if last is not None:
        if not 1 < last <= len(committed):
            raise CheckpointNotFoundError(
                f"--last {last}: {run} has {counted(len(committed), 'committed checkpoint')}."
            )
        chosen = list(committed[-last:])
        begin, end = chosen[0].step, math.inf
    else:
        first, _, final = (steps or "").partition(":")
        if not (first.isdecimal() and final.isdecimal()):
            raise UsageError(f"--steps {steps}: expected FIRST:LAST, such as 8000:10000.")
        begin, end = int(first), int(final)
        chosen = [item for item in committed if begin <= item.step <= end and not item.superseded]
        if len(chosen) < 2:
            shown = ", ".join(str(item.step) for item in committed[-10:]) or "none"
            raise CheckpointNotFoundError(
                f"--steps {steps}: {run} has {len(chosen)} committed checkpoints in this range. Steps: {shown}."
            )
    for skipped in inventory.skipped:
        step = step_of_name(skipped.path)
        if skipped.damaged and step is not None and begin <= step <= end:
            raise CorruptCheckpointError(
                f"{run}/{skipped.path} can't be opened: {skipped.reason} To merge without it, name the checkpoints."
            )
    return [f"{run}/{item.path}" for item in chosen]


# --- the sums


def _combined(
    opened: Sequence[Source],
    parts: Sequence[HFExport],
    named: Sequence[Mapping[str, OutputTensor]],
    factors: Sequence[float],
    sum_dtype: Sums,
    said: str,
) -> HFExport:
    """Return the export with the summed tensors. All other contents come from the last source."""
    _check_names(opened, parts, named)
    result: list[OutputTensor] = []
    copied: list[str] = []
    dtypes = {tensor.name: tensor.dtype for tensor in parts[-1].tensors}
    for name in named[-1]:
        terms = [of[name] for of in named]
        newest = terms[-1]
        for source, term in zip(opened, terms, strict=True):
            if isinstance(term, ComputedTensor) or isinstance(newest, ComputedTensor):
                # A quantized weight is in fp32 here, so its dtype may differ from the other source's.
                same = dtype_of(term.dtype).kind == dtype_of(newest.dtype).kind == "float"
            else:
                same = term.dtype == newest.dtype
            if term.shape != newest.shape or not same:
                advice = "Convert them to one dtype first, or --exclude it" if not same else "Skip it with --exclude"
                raise CheckpointMismatchError(
                    f"{name!r} is {term.dtype} {list(term.shape)} in {source.url}, but {newest.dtype} "
                    f"{list(newest.shape)} in {opened[-1].url}. {advice}."
                )
        if dtype_of(newest.dtype).kind == "float":
            # Sum fp64 tensors in fp64, because the average of two equal tensors must be that tensor.
            sums = "float64" if newest.dtype == "float64" else dtype_of(sum_dtype).name
            result.append(_sum(terms, factors, dtypes[name], sums))
        else:
            copied.append(name)
            result.append(newest)
    notes = [said, *_compare_configs(opened, parts)]
    for note in (note for part in parts for note in part.notes):
        if not note.endswith(MATCHES_NONE) or all(note in part.notes for part in parts):
            notes.append(note)
    if any(".lora_" in name for name in named[-1]):
        notes.append(
            "lora_A and lora_B are averaged separately, so the result is not the average of the adapted models. For "
            "that, first merge each adapter into its base model (convert --merge-adapter)"
        )
    if any(map(_is_quantized, parts)):
        notes.append("quantized weights were dequantized to fp32, summed, and rounded once")
    if copied:
        many = "tensors are" if len(copied) > 1 else "tensor is"
        notes.append(f"{len(copied)} {many} not floating point and copied from the last source: {first_few(copied)}")
    leftovers = tuple(dict.fromkeys(item for part in parts for item in part.leftovers))
    faults = tuple(dict.fromkeys(fault for part in parts for fault in part.faults))
    noted = tuple(dict.fromkeys(notes))
    return replace(parts[-1], tensors=tuple(result), leftovers=leftovers, faults=faults, notes=noted)


def _refuse_parts(opened: Sequence[Source], parts: Sequence[HFExport]) -> None:
    """Raise if a source has weights that torchao quantized, because codes and scales cannot be averaged."""
    for source, part in zip(opened, parts, strict=True):
        recipes = recipes_of(source.catalog)
        outers = {outer_name(key, recipes) for tensor in part.tensors for key in tensor.sources} if recipes else set()
        if found := sorted(outers & recipes.keys()):
            raise UnsupportedFormatError(
                f"{source.url}: {counted(len(found), 'weight')} of torchao: {first_few(found)}. The average of "
                "quantized weights is not that of their codes and scales: merge weights that are not quantized, or "
                "--exclude these."
            )


def _compare_configs(opened: Sequence[Source], parts: Sequence[HFExport]) -> Iterator[str]:
    """Yield a note for each source whose config.json or adapter_config.json differs from that of the last source.

    Raises:
        CheckpointMismatchError: The adapters scale the products of their factors differently.
    """
    for name in ("config.json", "adapter_config.json"):
        contents = [next((file for file in part.files if file.path == name), None) for part in parts]
        configs = [json.loads(b"".join(part.data for part in file.literals)) if file else {} for file in contents]
        last = configs[-1]
        for source, config in zip(opened, configs, strict=True):
            keys = sorted(config.keys() | last.keys()) if config and last else []
            differing = [key for key in keys if key not in _LABELS and _setting(config, key) != _setting(last, key)]
            if scaling := [key for key in differing if name == "adapter_config.json" and key in _SCALING]:
                raise CheckpointMismatchError(
                    f"{source.url} and {opened[-1].url} have adapters with different {', '.join(scaling)}, so their "
                    "factors cannot be averaged. First merge each adapter into its base model: convert --merge-adapter."
                )
            if differing:
                yield f"{name} is from the last source; {source.url} has another {first_few(differing, 3)}"


def _setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a value for comparisons. Older versions of PEFT omit settings whose default is false or empty."""
    value = config.get(key) or None
    return sorted(map(str, value)) if key in _SETS and isinstance(value, list) else value


def _settle_heads(
    opened: Sequence[Source], parts: Sequence[HFExport], named: Sequence[dict[str, OutputTensor]]
) -> list[str]:
    """Give each source the same tied tensors as the last one, such as an output head. Returns notes.

    If a source lacks a head that the last source has, its embedding is used as the head, provided that its config ties
    the two. If the last source has no head because its config ties the two, another source's head is left out if it
    equals that source's embedding.
    """
    notes = []
    for source, part, terms in zip(opened, parts, named, strict=True):
        shapes = {name: tensor.shape for name, tensor in {**named[-1], **terms}.items()}
        for head, kept in tied_pairs(shapes) if terms.keys() != named[-1].keys() else ():
            if kept not in terms or (head in terms) == (head in named[-1]):
                continue
            if head not in terms and config_ties(part.config):
                terms[head] = replace(terms[kept], name=head)
                notes.append(f"{source.url} has no {head}: its config ties it to {kept}, which is used")
            elif head in terms and config_ties(parts[-1].config) and _are_equal(source, part, (head, kept)):
                del terms[head]
                why = f"it equals {kept}, and the last source's config ties the two"
                notes.append(f"{head} of {source.url} is left out: {why}")
    return notes


def _are_equal(source: Source, part: HFExport, names: tuple[str, str]) -> bool:
    """Return whether two tensors of an export are copies of source tensors with equal bytes."""
    copies = [tensor.only_part for tensor in part.tensors if tensor.name in names and isinstance(tensor, Target)]
    entries = [source.catalog.tensors[copy.source] for copy in copies if copy is not None]
    return len(entries) == 2 and same_values(source.store, *entries)


def _check_names(
    opened: Sequence[Source], parts: Sequence[HFExport], named: Sequence[Mapping[str, OutputTensor]]
) -> None:
    for source, names in zip(opened, named, strict=True):
        for of, others in ((opened[-1], named[-1].keys() - names.keys()), (source, names.keys() - named[-1].keys())):
            if others:
                without = source if of is opened[-1] else opened[-1]
                heads = {head for head, _ in tied_pairs({name: tensor.shape for name, tensor in names.items()})}
                if of is source and others <= heads and config_ties(parts[-1].config):
                    ways = f"To keep it, name {of.url} last; --exclude loses it"
                else:
                    ways = "--exclude skips some, --key-map and --strip-prefix rename them"
                raise CheckpointMismatchError(
                    f"{of.url} has {counted(len(others), 'tensor')} that {without.url} does not have: "
                    f"{first_few(sorted(others))}. Only checkpoints with the same tensors can be merged. {ways}."
                )


def _terms(index: int, source: Source, part: HFExport, wide: HFExport) -> dict[str, OutputTensor]:
    """Return, by name, the tensors that one source adds to the sum.

    Tensors that are quantized in the source come, dequantized, from `wide`. All other tensors come from `part`, in
    their own dtype.
    """
    found: dict[str, OutputTensor] = {}
    dequantized = {tensor.name: tensor for tensor in wide.tensors}
    for plain in part.tensors:
        tensor = dequantized[plain.name]
        if isinstance(tensor, ComputedTensor):
            found[tensor.name] = taken_from(tensor, index)
            continue
        if dtype_of(tensor.source_dtype).kind not in ("float", "int", "bool"):
            raise UnsupportedFormatError(
                f"{source.url}: {tensor.name!r} is {tensor.source_dtype}, which cannot be averaged. Skip it with "
                "--exclude, or convert the checkpoint to bf16 or fp32 first."
            )
        found[tensor.name] = taken_from(replace(tensor, dtype=tensor.source_dtype), index)
    return found


def _sum(terms: Sequence[OutputTensor], factors: Sequence[float], dtype: str, sum_dtype: str) -> ComputedTensor:
    """Return the weighted sum of tensors of the same shape.

    If every term can be computed for a range of rows, the sum can be, too.
    """
    first = terms[0]
    computed = [term for term in terms if isinstance(term, ComputedTensor)]
    # Show all digits of the factors: an interrupted merge resumes only if its plan has the same labels.
    labels = [term.label if isinstance(term, ComputedTensor) else f"W{i + 1}" for i, term in enumerate(terms)]
    label = " + ".join(f"{factor!r} * {said}" for factor, said in zip(factors, labels, strict=True))
    if len(set(factors)) == 1:
        label = f"({' + '.join(labels)}) / {len(terms)}"
    if len(terms) > _NAMED:
        seed = repr(factors) if not computed else repr((factors, labels))
        label = f"weighted sum of {len(terms)} [{crc32(seed.encode()):08x}]"
    cut: Callable[[int, int], ComputedTensor] | None = None
    if first.shape and all(term.cut is not None for term in computed):

        def cut(start: int, stop: int) -> ComputedTensor:
            return _sum([term.rows(start, stop) for term in terms], factors, dtype, sum_dtype)

    scratch = 3 * min(first.numel, _PIECE) * dtype_of(sum_dtype).itemsize
    dtypes = tuple(term.dtype for term in terms)
    compute = partial(_summed, dtypes=dtypes, factors=tuple(factors), sums=sum_dtype, target=dtype)
    by_element = all(term.by_element for term in computed)
    return ComputedTensor(
        terms[-1].name, dtype, first.shape, tuple(terms), compute, f"{label} in {sum_dtype}", scratch, cut, by_element,
    )  # fmt: skip


def _summed(
    data: Sequence[Bytes], out: Bytes, *, dtypes: tuple[str, ...], factors: tuple[float, ...], sums: str, target: str
) -> int:
    """Compute ((w1 * x1 + w2 * x2) + ...) for each element, with each operation rounded to the dtype `sums`.

    If the `factors` w1, w2, ... are all equal, compute ((x1 + x2) + ...) / n, which takes fewer operations. If an
    element's sum overflows, the element is computed in float64 instead.
    """
    kind = np.dtype(sums).type
    sizes = [dtype_of(dtype).itemsize for dtype in dtypes]
    size, numel = dtype_of(target).itemsize, len(data[0]) // sizes[0]
    is_mean = len(set(factors)) == 1
    sum_of_block, product_of_block = (np.empty(min(numel, _PIECE), kind) for _ in range(2))
    in_pairs = kind is np.float32 and all(dtype == "bfloat16" for dtype in (target, *dtypes))
    infinite = 0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, numel, _PIECE):
            n = min(_PIECE, numel - start)
            apart = in_pairs and n % 2 == 0
            total, product = sum_of_block[:n], product_of_block[:n]

            def read(i: int, into: Any, start: int = start, n: int = n, apart: bool = apart) -> Any:
                block = data[i][start * sizes[i] : (start + n) * sizes[i]]
                return split_pairs(block, into) if apart else float_values(block, dtypes[i])

            for i, factor in enumerate(factors):
                into = product if i else total
                term = read(i, into)
                if not is_mean:
                    term = np.multiply(term, kind(factor), out=into, dtype=kind)
                if i:
                    np.add(total, term, out=total)
                elif term is not total:
                    total[:] = term
            if is_mean and len(data) > 1:
                np.divide(total, kind(len(data)), out=total)
                if not np.isfinite(total).all():
                    lost = np.flatnonzero(~np.isfinite(total))
                    total[lost] = sum(read(i, product)[lost].astype(np.float64) for i in range(len(data))) / len(data)
            made = out[start * size : (start + n) * size]
            infinite += round_pairs(total, made) if apart else cast_into(total.view(np.uint8), made, sums, target)
    return infinite
