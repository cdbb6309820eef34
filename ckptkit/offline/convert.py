"""Converts any checkpoint to Hugging Face, DCP, torch or LOCAL files: catalog -> names -> plan -> copy."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckptkit.errors import CheckpointNotFoundError, UnsupportedFormatError, UsageError
from ckptkit.formats.options import ReadOptions
from ckptkit.gc_pause import collector_paused
from ckptkit.offline.conversion import Converted, ConvertReport, How, carry_out
from ckptkit.offline.copying.copier import Progress
from ckptkit.offline.copying.coverage import check_plan
from ckptkit.offline.copying.plan import OutputFile, OutputTensor, Plan
from ckptkit.offline.dry_run import refusals
from ckptkit.offline.export.files import check_headers
from ckptkit.offline.publish import open_target, options_of_both
from ckptkit.offline.reading import open_pinned, reads_checkpoints
from ckptkit.offline.serving import serving
from ckptkit.storage.retry import patient
from ckptkit.units import parse_size

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source
    from ckptkit.keymaps.keymap import NameMap
    from ckptkit.offline.resharding.rank_files import Laid
    from ckptkit.storage.store import Store

__all__ = ["TensorChoice", "Chosen", "ConvertReport", "Format", "Output", "Weights", "choose", "convert", "write"]

Format: TypeAlias = Literal["hf", "dcp", "torch", "local"]
Weights: TypeAlias = Literal["auto", "model", "master"]
_FORMATS = ("hf", "dcp", "torch", "local")
_MIN_MEMORY = 16_000_000


@dataclass(frozen=True, slots=True)
class Chosen:
    """The content of the result: tensors under their new names, and small files."""

    tensors: tuple[OutputTensor, ...]
    files: tuple[OutputFile, ...] = ()
    leftovers: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = "model"
    compared: str = ""
    faults: tuple[str, ...] = ()


@reads_checkpoints
@patient()
def convert(  # noqa: PLR0913 - one argument an option
    src: str,
    dst: str,
    *,
    to: Format = "hf",
    dtype: str = "keep",
    weights: Weights = "auto",
    base: str | None = None,
    key_map: NameMap | str | None = None,
    strip_prefix: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_shard_size: str | int = "5GB",
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
    layout: str | None = None,
    allow_pickle: bool = False,
    merge_adapter: bool = False,
    untie: bool = False,
    adapter_config: Mapping[str, Any] | None = None,
    sha256: bool = False,
) -> ConvertReport:
    """Convert the checkpoint at `src` and publish the result at `dst` atomically.

    Holds at most `max_memory` bytes of tensor data. Needs no process group and no model class. Under `torchrun` every
    rank must call it: the ranks share the work and publish once.

    Args:
        to: "hf" (a directory of model*.safetensors), "dcp" (for `world_size` ranks), "torch" (one file of
            `torch.save`; `dst` names the file, or a directory to put pytorch_model.bin in), "local" (a committed
            ckptkit checkpoint of the model only: one file for each of `world_size` ranks).
        dtype: "keep", or the float dtype that floats are cast to.
        weights: "master" exports the fp32 copies that some optimizers keep; "auto" does so if `dtype` casts.
        base: Hugging Face directory or repo that provides config, tokenizer, and the expected names and shapes.
        key_map: A built-in name, a TOML or JSON file, or a NameMap.
        layout: URL of a layout of flat parameters, for formats that need one.
        allow_pickle: Read torch.save files that name unknown classes, without their values; no code is run.
        check: Check the source's recorded digests while reading.
        verify: Read the result back and compare every element with the source.
        dry_run: Only plan; see `ConvertReport.plan_lines()` and `ConvertReport.faults`.
        storage_options: For the file systems of source, destination and base.
        src_storage_options, dst_storage_options: For one of them; override the common ones.
        adapter_config: PEFT's adapter config, if neither the source nor the base has one.
        sha256: Write SHA256SUMS for a Hugging Face export, for `verify` and `sha256sum -c`.

    Raises:
        UsageError: Options conflict.
        CheckpointMismatchError: Names or shapes differ from the base.
        CorruptCheckpointError: The source is damaged or incomplete; nothing was published.
    """
    started = time.perf_counter()
    output = Output(
        dst, to, max_shard_size, world_size, overwrite, sha256, dry_run, How(workers, 0, check, verify, progress)
    ).checked(max_memory)
    options = ReadOptions(layout=layout, base=base, strip_prefix=strip_prefix, allow_pickle=allow_pickle)
    there, here = options_of_both(storage_options, src_storage_options, dst_storage_options)
    source = open_pinned(src, storage_options=there, options=options, together=not dry_run)
    choice = TensorChoice(
        to, dtype, weights, base, key_map, strip_prefix, tuple(include), tuple(exclude), merge_adapter, untie,
        adapter_config, not dry_run,
    )  # fmt: skip
    if merge_adapter and base is not None:
        source, choice = _with_base(source, choice, together=not dry_run, storage_options=storage_options)
    chosen = choose(source, choice, storage_options)
    return write(src, source, chosen, choice, output, storage_options=here, started=started)


def _with_base(
    source: Source, choice: TensorChoice, *, together: bool, storage_options: Mapping[str, Any] | None
) -> tuple[Source, TensorChoice]:
    """Return an adapter joined with the weights of --base, if it lacks the weights that it changes."""
    from ckptkit.catalog.entry import Role
    from ckptkit.offline.export.adapters import base_name, changes_base, without_base
    from ckptkit.offline.export.base import beside_source
    from ckptkit.offline.export.weights import choose_weights
    from ckptkit.offline.joined import join

    adapter = source.catalog.by_role(Role.MODEL)
    if not without_base(adapter):
        return source, choice
    try:
        base = open_pinned(str(choice.base), storage_options=storage_options, together=together)
    except CheckpointNotFoundError:
        return source, choice  # config and tokenizer alone, or a repo of the Hub
    config = choice.adapter_config or beside_source(source.store, source.catalog).adapter_config or {}
    if changed := changes_base(config):
        raise UnsupportedFormatError(
            f"the adapter config has {changed}, with which PEFT changed the base weights before training, so "
            f"{base.url} may hold others. If it holds the changed ones, remove that setting from a copy of "
            "adapter_config.json and pass it with --adapter-config; otherwise merge with PEFT."
        )
    weights = choose_weights(base.catalog, choice.weights, dtype=choice.dtype)
    # What PEFT trained in full (modules_to_save, biases) is in the adapter under the base model's names.
    trained = {base_name(name) for name in adapter}
    kept = [replace(entry, fqn=name, role=Role.MODEL) for name, entry in weights.entries.items() if name not in trained]
    joined = join([base, source], [kept, adapter.values()])
    return joined, replace(
        choice, base=base.url, weights="model", notes=(f"base weights: {base.url.rpartition('/')[2]}", *weights.notes)
    )


@dataclass(frozen=True, slots=True)
class Output:
    """Where and how the result is written: see `convert`."""

    dst: str
    to: Format
    max_shard_size: str | int
    world_size: int | None
    overwrite: bool
    sha256: bool
    dry_run: bool
    how: How

    def checked(self, max_memory: str | int) -> Output:
        """Return the output with a memory limit. Raises UsageError if options conflict."""
        if self.to not in _FORMATS:
            raise UsageError(f"to={self.to!r} is unknown. Known: {', '.join(_FORMATS)}.")
        memory = parse_size(max_memory)
        if memory < _MIN_MEMORY:
            raise UsageError(f"--max-memory {max_memory} is too small: expected at least 16MB.")
        if self.sha256 and self.to != "hf":
            raise UsageError(f"--sha256 is for Hugging Face exports; it cannot be combined with --to {self.to}.")
        _shard_size(self.max_shard_size)
        return replace(self, how=replace(self.how, max_memory=memory))


def write(
    src: str,
    source: Source,
    chosen: Chosen,
    choice: TensorChoice,
    output: Output,
    *,
    storage_options: Mapping[str, Any] | None,
    started: float,
) -> ConvertReport:
    """Write the chosen tensors of a source and publish the result, or only plan it."""
    to = output.to
    for item in source.checkpoints:
        target = open_target(
            output.dst, source=item.url, single_file=to == "torch", overwrite=output.overwrite,
            storage_options=storage_options,
        )  # fmt: skip
    sealing = None
    if to == "local":
        from ckptkit.offline.resharding.local_target import local_target

        laid, sealing = local_target(
            source, chosen.tensors, output.dst, world_size=output.world_size or 1, storage_options=storage_options
        )
        plan = _planned(source, chosen, laid)
    else:
        plan = _plan(source, chosen, to, target.file_name, _shard_size(output.max_shard_size), output.world_size)
    report = ConvertReport(
        src, output.dst, source.url, source.catalog.info.format, to, plan,
        tensors=len(chosen.tensors), nbytes=plan.nbytes, notes=_notes(source, plan), dry_run=output.dry_run,
        faults=chosen.faults, serving=_serving(chosen, choice, output.dst),
    )  # fmt: skip
    if output.dry_run:
        check_plan(plan)
        return replace(report, faults=(*report.faults, *refusals(plan, source, target, check=output.how.check)))
    outcome = carry_out(
        plan, source, target, output.how,
        masters_of={name for tensor in chosen.tensors for name in tensor.sources},
        look=partial(_look, plan, output.sha256) if to == "hf" else None, sealing=sealing,
    )  # fmt: skip
    return outcome.told(report, proved=tuple(_proved(outcome, chosen)), started=started)


@collector_paused()
def _look(plan: Plan, sha256: bool, store: Store) -> int:
    compared = check_headers(plan, store)
    if sha256:
        from ckptkit.offline.export.checksums import write_checksums

        write_checksums(store, [file.path for file in plan.files])
    return compared


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """The user's choice of tensors from the source."""

    to: Format
    dtype: str
    weights: Weights
    base: str | None
    key_map: NameMap | str | None
    strip_prefix: str | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    merge_adapter: bool
    untie: bool
    adapter_config: Mapping[str, Any] | None
    strict: bool
    notes: tuple[str, ...] = ()


def _serving(chosen: Chosen, choice: TensorChoice, dst: str) -> str:
    """Names that the user changed or filtered count as a model's only if they were compared with one."""
    if choice.to != "hf" or "://" in dst:  # vLLM reads directories
        return ""
    touched = choice.key_map or choice.strip_prefix is not None or choice.include or choice.exclude
    if touched and not chosen.compared and chosen.kind == "model":
        return ""
    files = {file.path: b"".join(literal.data for literal in file.literals) for file in chosen.files}
    names = {tensor.name for tensor in chosen.tensors}
    return serving(files, names, shlex.quote(dst), compared=bool(chosen.compared))


def _shard_size(value: str | int) -> int:
    size = parse_size(value)
    if size < 1:
        raise UsageError(f"--max-shard-size {value} is too small for a tensor: give a size such as 5GB.")
    return size


def _key_map(named: NameMap | str | None) -> NameMap | None:
    if named is None:
        return None
    from ckptkit.offline.export.key_maps import resolve_key_map

    return resolve_key_map(named)


@collector_paused()
def choose(source: Source, choice: TensorChoice, storage_options: Mapping[str, Any] | None) -> Chosen:
    from ckptkit.offline.export.hf import ExportOptions, export_tensors, plan_export

    options = ExportOptions(
        dtype=choice.dtype,
        weights=choice.weights,
        key_map=_key_map(choice.key_map),
        strip_prefix=choice.strip_prefix,
        include=choice.include,
        exclude=choice.exclude,
        untie=choice.untie,
        merge_adapter=choice.merge_adapter,
        adapter_config=choice.adapter_config,
        strict=choice.strict,
        notes=choice.notes,
    )
    known = own = None
    if choice.base is not None:
        from ckptkit.offline.export.base import beside_source, open_base

        if source.joined:  # the base's weights are in it
            base, adapter = source.joined
            known = beside_source(base.store, base.catalog)
            own = beside_source(adapter.store, adapter.catalog)
        if not os.path.isfile(choice.base):
            found = open_base(choice.base, storage_options=storage_options)
            known = found.over(known) if known is not None else found
    if choice.to == "hf":
        export = plan_export(source.store, source.catalog, base=known, own=own, options=options)
        return Chosen(
            export.tensors, export.files, export.leftovers, export.missing, export.notes, export.kind, export.checked,
            export.faults,
        )  # fmt: skip
    if choice.merge_adapter:
        raise UsageError(f"--merge-adapter is for Hugging Face exports; --to {choice.to} keeps adapters unchanged.")
    config = known.config if known is not None else None
    tensors, dropped, notes = export_tensors(source.catalog, options=options, config=config)
    used = {key for tensor in tensors.values() for key in tensor.sources}
    leftovers = [
        (name, dropped.get(name) or f"{entry.role.value} state")
        for name, entry in source.catalog.tensors.items()
        if name not in used
    ]
    files: tuple[OutputFile, ...] = ()
    if choice.to == "dcp":  # the model's side files are restored with the weights
        from ckptkit.offline.export.base import beside_source

        own = beside_source(source.store, source.catalog)
        small = (known.over(own) if known is not None else own).contents()
        files = tuple(OutputFile.of_bytes(name, data) for name, data in small.items())
    return Chosen(tuple(tensors.values()), files, tuple(leftovers), (), notes)


@collector_paused()
def _plan(
    source: Source, chosen: Chosen, to: Format, file_name: str, max_shard_size: int, world_size: int | None
) -> Plan:
    """Lay out the chosen tensors in the files of the target format."""
    catalog, tensors = source.catalog, chosen.tensors
    if world_size is not None and to in ("hf", "torch"):
        raise UsageError(f"--world-size cannot be combined with --to {to}, which is not sharded by rank.")
    if to == "hf":
        from ckptkit.offline.export.files import adapter_files, hf_files

        if chosen.kind == "adapter":
            files, placements, last = adapter_files(catalog, tensors)
        else:
            files, placements, last = hf_files(catalog, tensors, max_shard_size=max_shard_size)
    elif to == "torch":
        from ckptkit.offline.export.torch_file import torch_file

        files, placements, last = torch_file(catalog, tensors, path=file_name)
    else:
        from ckptkit.offline.resharding.rank_files import dcp_files

        files, placements, last = dcp_files(catalog, tensors, world_size=world_size or 1)
    return _planned(source, chosen, (files, placements, last))


def _planned(source: Source, chosen: Chosen, laid: Laid) -> Plan:
    files, placements, last = laid
    return Plan(
        source.catalog,
        (*files, *chosen.files),
        tuple(placements),
        last,
        chosen.leftovers,
        chosen.missing,
        chosen.notes,
    )


def _notes(source: Source, plan: Plan) -> tuple[str, ...]:
    notes = [item.note for item in source.checkpoints if item.note]
    notes += [note for item in source.checkpoints for note in item.catalog.info.notes]
    notes += plan.notes
    if plan.leftovers:
        reasons: dict[str, list[str]] = {}
        for name, reason in plan.leftovers:
            reasons.setdefault(reason, []).append(name)
        counts = ", ".join(f"{len(names)} ({reason}{_groups(names, reason)})" for reason, names in reasons.items())
        notes.append(f"tensors skipped: {counts}")
    return tuple(dict.fromkeys(notes))


def _groups(names: Sequence[str], reason: str) -> str:
    """The first name components, unless the reason already contains them."""
    found = [group for group in dict.fromkeys(name.partition(".")[0] for name in names) if group not in reason]
    return ": " + ", ".join(found[:3]) + (", ..." if len(found) > 3 else "") if found else ""


def _proved(outcome: Converted, chosen: Chosen) -> Iterator[str]:
    """Yield the checks that passed: each phrase stands for a check that would have raised."""
    if chosen.compared:
        yield f"names and shapes match {chosen.compared}"
    if outcome.looked is not None:
        yield f"{outcome.looked} header entr{'y matches' if outcome.looked == 1 else 'ies match'} the plan"
