"""Converts any checkpoint to Hugging Face, DCP, torch or LOCAL files.

The steps are: open the catalog, rename the tensors, plan the files, and copy the bytes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckptkit.arguments import Location, check_int, globs, location, wrong
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.dtypes import export_dtype
from ckptkit.catalog.entry import Role
from ckptkit.errors import CheckpointNotFoundError, UnsupportedFormatError, UsageError
from ckptkit.formats.models import with_tied_names
from ckptkit.formats.options import ReadOptions
from ckptkit.gc_pause import collector_paused
from ckptkit.offline.conversion import ConvertReport, How, conclude
from ckptkit.offline.copying.copier import Progress
from ckptkit.offline.copying.plan import OutputFile, Plan
from ckptkit.offline.export.base import beside_source, export_config, open_base
from ckptkit.offline.export.checksums import write_checksums
from ckptkit.offline.export.files import check_headers, hf_files, torch_file
from ckptkit.offline.export.hf import HFExport, export_tensors, has_quantized, plan_export
from ckptkit.offline.export.weights import ExportOptions, choose_weights, with_masters
from ckptkit.offline.publish import Options, OutputPlace, open_target, options_of_both
from ckptkit.offline.reading import open_pinned, reads_checkpoints
from ckptkit.offline.serving import serving
from ckptkit.storage.retry import patient
from ckptkit.units import first_few, parse_size

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source
    from ckptkit.keymaps.keymap import NameMap
    from ckptkit.offline.resharding.rank_files import Laid
    from ckptkit.offline.resharding.seal import Seal
    from ckptkit.offline.vocabulary import NewRows
    from ckptkit.storage.store import Store


Format: TypeAlias = Literal["hf", "dcp", "torch", "local"]
Weights: TypeAlias = Literal["auto", "model", "master", "ema"]
Quantization: TypeAlias = Literal["fp8-block"]
_FORMATS = ("hf", "dcp", "torch", "local")
_MIN_MEMORY = 16_000_000


@reads_checkpoints
@patient()
def convert(  # noqa: PLR0913 - one argument per option
    src: Location,
    dst: Location,
    *,
    to: Format = "hf",
    dtype: str = "keep",
    vocab_size: int | None = None,
    new_rows: NewRows | None = None,
    quantize: Quantization | None = None,
    weights: Weights = "auto",
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
    layout: str | None = None,
    allow_pickle: bool = False,
    merge_adapter: bool = False,
    untie: bool = False,
    adapter_config: Mapping[str, Any] | None = None,
    sha256: bool = False,
) -> ConvertReport:
    """Convert the checkpoint at `src` and publish the result at `dst` atomically.

    Needs no process group and no model class. Under `torchrun`, every rank must call this; the ranks share the work and
    publish once.

    Args:
        to: The target format. "hf": a directory of model*.safetensors. "dcp": a DCP checkpoint for `world_size` ranks.
            "torch": one `torch.save` file; `dst` names the file, or the directory that will contain pytorch_model.bin.
            "local": a committed ckptkit checkpoint that contains only the model, with one file for each of `world_size`
            ranks.
        dtype: "keep", or a float dtype to which all floats are cast.
        vocab_size: The number of rows to which the embedding and the output head are trimmed or padded. config.json is
            changed to match.
        new_rows: How to fill added rows. "mean" (the default) averages the old rows in fp64 and rounds to the tensor's
            stored dtype. "zeros" writes zeros.
        quantize: "fp8-block" writes the weights of linear layers in FP8, in blocks of 128 x 128, for transformers, vLLM
            and SGLang. Weights that are already quantized are first dequantized to `dtype`, or to bf16 if `dtype` is
            "keep".
        weights: The weights to export. "model": the model's weights. "master": the fp32 copies that some optimizers
            keep. "ema": the moving average of the weights, which the checkpoint must contain. "auto": the fp32 copies,
            if they exist and `dtype` casts, or if there are no other weights. In all other cases, the model's weights.
        base: A Hugging Face directory or repo that provides the config, the tokenizer, and the expected names and
            shapes.
        key_map: A built-in name, a TOML or JSON file, or a NameMap.
        strip_prefix: A prefix to remove from every name.
        include, exclude: Globs of the tensors to export or to leave out.
        max_shard_size: Maximum size of one file of a Hugging Face export: bytes, or a string such as "5GB" (the
            default). A larger tensor gets its own file.
        world_size: The number of ranks for which "dcp" and "local" are sharded.
        workers: Number of worker threads. 0 chooses a number for this machine.
        max_memory: Maximum tensor data in memory: bytes, or a string such as "512MB".
        layout: URL of a file that describes the layout of flat parameters. Needed only if the source does not contain
            the layout.
        allow_pickle: Read torch.save files even if they name unknown classes. Objects of these classes are omitted. No
            code from the files runs.
        check: Check the source's recorded digests while reading.
        verify: Read the result back and compare every element with the source.
        dry_run: Only plan. See `ConvertReport.plan_lines()` and `ConvertReport.faults`.
        overwrite: Replace the checkpoint or export at `dst`.
        merge_adapter: Merge LoRA adapters into the weights of the source or of `base`.
        untie: Keep an output head that differs from the embedding although the config ties them. The config is
            corrected.
        progress: Called with (bytes done, bytes in all, path of the file).
        storage_options: Options for the file systems of the source, the destination and the base.
        src_storage_options, dst_storage_options: Override `storage_options` for the source or the destination.
        adapter_config: PEFT's adapter config, if neither the source nor the base has an adapter config.
        sha256: Write SHA256SUMS into a Hugging Face export, for `verify` and `sha256sum -c`.

    Raises:
        UsageError: Options conflict, or `vocab_size` would remove the row of a token.
        CheckpointNotFoundError: `src` contains no checkpoint.
        CheckpointExistsError: `dst` already exists. With `overwrite`: `dst` is not one checkpoint or one export.
        CheckpointMismatchError: Names or shapes differ from the base, or ckptkit cannot tell which tensors have one row
            per token.
        CorruptCheckpointError: The source is damaged or incomplete. Nothing was published.
        UnsupportedFormatError: The source, or a value in it, cannot be read or cannot be stored in the target format.
    """
    src, dst = location("src", src), location("dst", dst)
    there, here = options_of_both(storage_options, src_storage_options, dst_storage_options)
    memory = parse_size(max_memory, "max_memory")
    how = How(workers, memory, check, verify, dry_run, overwrite, there, here, progress)
    dtype = str(dtype)  # accepts torch.bfloat16
    export_dtype("float32", dtype)  # raises for an unknown dtype, before the source is opened
    if adapter_config is not None and not isinstance(adapter_config, Mapping):
        raise wrong("adapter_config", adapter_config, "the dict in PEFT's adapter_config.json")
    output = Output(dst, to, shard_bytes(max_shard_size), world_size, sha256, how)
    output.check(max_memory, max_shard_size)
    reading = ReadOptions(layout=layout, base=base, strip_prefix=strip_prefix, allow_pickle=allow_pickle)
    source = open_pinned(src, storage_options=there, options=reading, together=not dry_run, inner="weights")
    source = with_masters(replace(source, catalog=with_tied_names(source.catalog)), weights, dtype)
    vocabulary = None
    if vocab_size is not None or new_rows is not None:
        from ckptkit.offline.vocabulary import VocabSize

        vocabulary = VocabSize.of(vocab_size, new_rows, dry=dry_run)
    options = ExportOptions(
        dtype, "bf16" if quantize else "keep", weights, key_map_of(key_map), strip_prefix,
        globs("include", include), globs("exclude", exclude), untie,
        adapter_config, merge_adapter, quantize=quantize, strict=not dry_run,
        vocabulary=vocabulary,
    )  # fmt: skip
    if quantize not in (None, "fp8-block"):
        raise UsageError(f"quantize={quantize!r} is unknown. Known: fp8-block.")
    if quantize and to != "hf":
        raise UsageError(f"--quantize is for Hugging Face exports; it cannot be combined with --to {to}.")
    if merge_adapter and base is not None:
        source, options, base = _with_base(source, options, base, together=not dry_run, storage_options=storage_options)
    return write(src, source, choose(source, to, options, base, storage_options), options, output)


def _with_base(
    source: Source, options: ExportOptions, base_url: str, *, together: bool, storage_options: Options | None
) -> tuple[Source, ExportOptions, str]:
    """Join an adapter that has no base weights with the weights from --base.

    Returns the joined source, and the options and base URL for exporting it. Returns the arguments unchanged if the
    source has base weights or is not an adapter, or if --base contains no weights.
    """
    from ckptkit.offline.export.adapters import base_name, changes_base, without_base
    from ckptkit.offline.joined import join

    adapter = source.catalog.by_role(Role.MODEL)
    if not without_base(adapter):
        return source, options, base_url
    try:
        base = open_pinned(base_url, storage_options=storage_options, together=together)
        base = with_masters(base, options.weights, options.dtype)
    except CheckpointNotFoundError:
        return source, options, base_url  # --base is a Hub repo or a directory without weights
    config = (
        options.adapter_config or beside_source(source.store, source.catalog, options.strip_prefix).adapter_config or {}
    )
    if changed := changes_base(config):
        raise UnsupportedFormatError(
            f"the adapter config has {changed}: PEFT changed the base weights before training, and {base.url} may "
            "contain the original ones. If it contains the changed ones, remove that setting from a copy of "
            "adapter_config.json and pass it with --adapter-config; otherwise merge with PEFT."
        )
    weights = choose_weights(base.store, with_tied_names(base.catalog), options.weights, dtype=options.dtype)
    # The adapter contains the modules that PEFT trained in full (modules_to_save, biases) under the base model's names.
    trained = {base_name(name) for name in adapter}
    kept = [replace(entry, fqn=name, role=Role.MODEL) for name, entry in weights.entries.items() if name not in trained]
    joined = join([base, source], [kept, adapter.values()])
    notes = (f"base weights: {base.url.rpartition('/')[2]}", *weights.notes)
    return joined, replace(options, weights="model", notes=notes), base.url


@dataclass(frozen=True, slots=True)
class Output:
    """The options for writing the result. See `convert` for their meaning."""

    dst: str
    to: Format
    max_shard_size: int
    world_size: int | None
    sha256: bool
    how: How

    def check(self, max_memory: str | int, max_shard_size: str | int | None) -> None:
        """Raise UsageError if options conflict. The arguments are the sizes as the user wrote them, for messages."""
        if self.to not in _FORMATS:
            raise UsageError(f"to={self.to!r} is unknown. Known: {', '.join(_FORMATS)}.")
        if self.how.max_memory < _MIN_MEMORY:
            raise UsageError(f"--max-memory {max_memory} is too small: expected at least 16MB.")
        if self.world_size is not None:
            check_int("world_size", self.world_size, least=1)
        if self.sha256 and self.to != "hf":
            raise UsageError(f"--sha256 is for Hugging Face exports; it cannot be combined with --to {self.to}.")
        if self.max_shard_size < 1:
            raise UsageError(f"--max-shard-size {max_shard_size} is too small for a tensor: give a size such as 5GB.")
        if max_shard_size is not None and self.to != "hf":
            raise UsageError(
                f"--max-shard-size is for Hugging Face exports; it cannot be combined with --to {self.to}."
            )


def shard_bytes(max_shard_size: str | int | None) -> int:
    """Return the maximum size of one file of an export, in bytes. The default is 5 GB."""
    return parse_size("5GB" if max_shard_size is None else max_shard_size, "max_shard_size")


def write(src: str, source: Source, export: HFExport, options: ExportOptions, output: Output) -> ConvertReport:
    """Write the chosen tensors of a source and publish the result. For a dry run, only plan."""
    to, how = output.to, output.how
    for item in source.checkpoints:
        place = open_target(
            output.dst, source=item.url, single_file=to == "torch", overwrite=how.overwrite, storage_options=how.here
        )
    laid, sealing = _lay_out(source, export, place, output)
    files, placements, last = laid
    plan = Plan(
        source.catalog, tuple(files), tuple(placements), last, export.leftovers, export.missing,
        export.notes,
    )  # fmt: skip
    report = ConvertReport(
        src, output.dst, source.url, source.catalog.info.format, to, plan,
        tensors=len(export.tensors), nbytes=plan.nbytes, notes=_notes(source, export, plan), dry_run=how.dry_run,
        faults=export.faults, serving=_serving(export, options, output.dst) if to == "hf" else "",
    )  # fmt: skip

    @collector_paused()
    def look(store: Store) -> str:
        compared = check_headers(plan, store)
        if output.sha256:
            write_checksums(store, [file.path for file in plan.files])
        return f"{compared} header entr{'y matches' if compared == 1 else 'ies match'} the plan"

    return conclude(
        report, source, place, how, compared=export.checked, sealing=sealing,
        masters_of={name for tensor in export.tensors for name in tensor.sources},
        look=look if to == "hf" else None,
    )  # fmt: skip


def _serving(export: HFExport, options: ExportOptions, dst: str) -> str:
    """Return the report's line on serving with vLLM, or "" if vLLM might not load the export."""
    if "://" in dst:  # vLLM reads local directories only
        return ""
    # A key map or a filter may give names that vLLM does not know. With a base, the names were checked.
    touched = options.key_map or options.strip_prefix is not None or options.include or options.exclude
    if touched and not export.checked and export.kind == "model":
        return ""
    if export.missing or export.extra:  # vLLM refuses the tensors of a second model, for example
        return ""
    files = {file.path: b"".join(literal.data for literal in file.literals) for file in export.files}
    names = {tensor.name for tensor in export.tensors}
    return serving(files, names, shlex.quote(dst), compared=bool(export.checked))


def key_map_of(named: NameMap | str | None) -> NameMap | None:
    """Return the key map that an option names, or None if the option is not set."""
    if named is None:
        return None
    from ckptkit.keymaps.named import resolve_key_map

    return resolve_key_map(named)


@collector_paused()
def choose(
    source: Source, to: Format, options: ExportOptions, base: str | None, storage_options: Mapping[str, Any] | None
) -> HFExport:
    """Return the planned contents of the result: tensors under their new names, and small files.

    Raises:
        UsageError: An option cannot be combined with the format `to`, or contradicts the checkpoint.
    """
    known = own = None
    if base is not None:
        if source.joined:  # the source includes the base model's weights
            weights, adapter = source.joined
            known = beside_source(weights.store, weights.catalog)
            own = beside_source(adapter.store, adapter.catalog, options.strip_prefix)
        if not os.path.isfile(base):
            found = open_base(base, storage_options=storage_options)
            known = found.over(known) if known is not None else found
    if to == "hf":
        return plan_export(source.store, source.catalog, base=known, own=own, options=options)
    if options.merge_adapter:
        raise UsageError(f"--merge-adapter is for Hugging Face exports; --to {to} keeps adapters unchanged.")
    config = known.config if known is not None else None
    tensors, dropped, notes = export_tensors(source.store, source.catalog, options=options, config=config)
    own = beside_source(source.store, source.catalog, options.strip_prefix)
    side = known.over(own) if known is not None else own
    if options.vocabulary is not None:
        from ckptkit.offline.vocabulary import resize

        tensors, config, said = resize(
            tensors, side.config, options.vocabulary, store=source.store, catalog=source.catalog, files=side.files
        )
        side, notes = replace(side, config=config), (*notes, *said)
    used = {key for tensor in tensors.values() for key in tensor.sources}
    leftovers = [
        (name, dropped.get(name) or f"{entry.role.value} state")
        for name, entry in source.catalog.tensors.items()
        if name not in used
    ]
    if side.config is not None:
        corrected, said = export_config(side.config, dtype=None, untied=False, quantized=has_quantized(tensors))
        side, notes = replace(side, config=corrected), (*notes, *said)
    # A later conversion to hf restores the model's side files.
    files = tuple(OutputFile.of_bytes(name, data) for name, data in side.contents().items())
    return HFExport(tuple(tensors.values()), files, "model", config, "", tuple(leftovers), notes=notes)


@collector_paused()
def _lay_out(source: Source, export: HFExport, place: OutputPlace, output: Output) -> tuple[Laid, Seal | None]:
    """Assign the tensors to files of the target format.

    For a LOCAL target, also return the fields of its manifest and commit record (`Seal`).
    """
    catalog, tensors, to, world_size = source.catalog, export.tensors, output.to, output.world_size
    if world_size is not None and to in ("hf", "torch"):
        raise UsageError(f"--world-size cannot be combined with --to {to}, which is not sharded by rank.")
    odd = [tensor.name for tensor in tensors if dtype_of(tensor.dtype).bits == 6]
    if odd and to in ("torch", "dcp"):
        raise UnsupportedFormatError(
            f"{', '.join(odd[:3])}: torch has no FP6, so --to {to} cannot store it. Use --to hf, or --exclude."
        )
    if to == "local":
        from ckptkit.offline.reshard import identity_of
        from ckptkit.offline.resharding.mesh import TargetMesh
        from ckptkit.offline.resharding.plan import plan_local

        mesh = TargetMesh.parse(None, world_size=world_size or 1)
        identity = identity_of(source, output.dst, output.how.here)
        plan, sealing = plan_local(catalog, tensors, mesh, identity, export.files)
        return (list(plan.files), list(plan.placements), plan.last), sealing
    if to == "torch":
        files, placements, last = torch_file(catalog, tensors, path=place.file_name)
    elif to == "dcp":
        from ckptkit.offline.resharding.rank_files import dcp_files

        files, placements, last = dcp_files(catalog, tensors, world_size=world_size or 1)
    else:
        adapter, size = export.kind == "adapter", output.max_shard_size
        files, placements, last = hf_files(
            catalog, tensors, max_shard_size=size, metadata=export.metadata, adapter=adapter
        )
    return ([*files, *(() if place.is_file else export.files)], placements, last), None


def _notes(source: Source, export: HFExport, plan: Plan) -> tuple[str, ...]:
    notes = [item.note for item in source.checkpoints if item.note]
    notes += [note for item in source.checkpoints for note in item.catalog.info.notes]
    notes += plan.notes
    if plan.leftovers:
        counts = (f"{len(names)} ({reason}{_groups(names, reason)})" for reason, names in plan.left_over().items())
        notes.append(f"tensors skipped: {', '.join(counts)}")
    return tuple(dict.fromkeys(notes))


def _groups(names: Sequence[str], reason: str) -> str:
    """Return a phrase to append to `reason`, such as ", in model, optimizer": the first components of the names.

    Components that the reason already contains are omitted. Returns "" if none is left.
    """
    found = [group for group in dict.fromkeys(name.partition(".")[0] for name in names) if group not in reason]
    return f", in {first_few(found, 3)}" if found else ""
