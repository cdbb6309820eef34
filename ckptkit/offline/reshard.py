"""Rewrites a checkpoint for a different number of ranks: the same tensors, sharded differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptkit.arguments import Location, location
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.formats.models import with_tied_names, with_trained_weights
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.own.record import CommitRecord, check_tag, find_record, step_name, step_of_name
from ckptkit.formats.training_state import saved_step
from ckptkit.offline.conversion import ConvertReport, How, check_source_files, conclude
from ckptkit.offline.copying.copier import Progress
from ckptkit.offline.copying.plan import Plan
from ckptkit.offline.gaps import refuse_partial
from ckptkit.offline.publish import open_target, options_of_both
from ckptkit.offline.reading import open_pinned, reads_checkpoints
from ckptkit.offline.resharding.mesh import TargetMesh, TPPlan
from ckptkit.offline.resharding.plan import Identity, plan_reshard
from ckptkit.offline.vocabulary import NewRows, VocabSize
from ckptkit.storage.open import open_store
from ckptkit.storage.retry import patient
from ckptkit.units import first_few, parse_size

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source


_TYPES = ("sharded", "local")


@reads_checkpoints
@patient()
def reshard(  # noqa: PLR0913 - one argument per option
    src: Location,
    dst: Location,
    *,
    world_size: int,
    mesh: str | Mapping[str, int] | None = None,
    type: str = "sharded",
    tp_plan: str | Mapping[str, int | None] | None = None,
    layout: str | None = None,
    vocab_size: int | None = None,
    new_rows: NewRows | None = None,
    allow_pickle: bool = False,
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
) -> ConvertReport:
    """Reshard the checkpoint at `src` for `world_size` ranks, and write a committed ckptkit checkpoint to `dst`.

    Each shard is stored once, in the file of a rank that will read it. Replicated tensors stay replicated. The result
    has the step and the training state of the source:

    - from a ckptkit checkpoint: the whole state. Per-rank state (RNG, dataloader) keeps the keys of the old ranks. If
      the number of ranks changes, `rng_on_resize` and `per_rank_on_resize` apply when the result is loaded.
    - from a DCP checkpoint of another program, if `type` is "sharded": all keys and values, unchanged.
    - from other systems: weights, masters, moments, parameter-group settings, torch schedulers, and plain user values
      (returned as `LoadReport.extra`), but no RNG states.

    The report lists what was skipped. Under `torchrun`, every rank must call this; the ranks share the work and publish
    once.

    Args:
        dst: The directory of the new checkpoint. A CheckpointManager of the parent directory finds it.
        world_size: The number of ranks of the job that will load the result.
        mesh: The sizes of the mesh dimensions, as "replicate=2,shard=4,tp=2" or as a mapping. None shards over all
            ranks.
        type: "sharded" (for any job) or "local" (one file per rank, only for jobs with this world size and mesh).
        tp_plan: A mapping from globs of parameter names to the dimension to split, or a JSON file with such a mapping.
            Needed only for sources without tensor parallelism. None derives the plan from the source's config.json, if
            the model is llama-like.
        layout: URL of a file that describes the layout of flat parameters. Needed only if the source does not contain
            the layout (FSDP1 LOCAL).
        vocab_size: The number of rows to which the embedding and the output head are trimmed or padded, including
            masters and optimizer states. config.json is changed to match.
        new_rows: How to fill the added rows of weights and masters: with the "mean" of the old rows (the default) or
            with "zeros"; see `convert`. In optimizer states, added rows are zeros.
        allow_pickle: Read torch.save files even if they name unknown classes. Objects of these classes are omitted. No
            code from the files runs.
        workers, max_memory, check, verify, dry_run, overwrite, progress, storage_options: The same as in `convert`.
        src_storage_options, dst_storage_options: Override `storage_options` for the source or the destination.

    Raises:
        UsageError: The mesh does not match the world size, `dst` is named after a different step, or a tp plan is
            missing.
        CheckpointNotFoundError: `src` contains no checkpoint.
        CheckpointExistsError: `dst` already exists. With `overwrite`: `dst` is not one checkpoint or one export.
        CheckpointMismatchError: ckptkit cannot tell which tensors `vocab_size` applies to.
        UnsupportedFormatError: A tensor can be read only by its Python class.
        IncompleteCheckpointError: A rank's file is missing. The message names the rank.
        CorruptCheckpointError: The source is damaged. Nothing was published.
    """
    src, dst = location("src", src), location("dst", dst)
    if type not in _TYPES:
        raise UsageError(f"type={type!r} is unknown. Known: {', '.join(_TYPES)}.")
    target = TargetMesh.parse(mesh, world_size=world_size)
    split = None if tp_plan is None else TPPlan.of(tp_plan)
    vocabulary = VocabSize.of(vocab_size, new_rows, dry=dry_run)
    there, here = options_of_both(storage_options, src_storage_options, dst_storage_options)
    memory = parse_size(max_memory, "max_memory")
    how = How(workers, memory, check, verify, dry_run, overwrite, there, here, progress)
    reading = ReadOptions(layout=layout, allow_pickle=allow_pickle)
    source = open_pinned(src, storage_options=there, options=reading, together=not dry_run, inner="all")
    catalog = with_trained_weights(source.catalog)
    source = replace(source, catalog=with_tied_names(catalog) if type == "sharded" else catalog)
    refuse_partial(source.store, source.catalog)
    check_source_files(source.store, source.catalog.tensors.values())
    place = open_target(dst, source=source.url, single_file=False, overwrite=overwrite, storage_options=here)
    identity = identity_of(source, dst, here)
    plan, sealing = plan_reshard(
        source.store, source.catalog, target, type=type, identity=identity, tp_plan=split, vocabulary=vocabulary
    )
    report = ConvertReport(
        src, dst, source.url, source.catalog.info.format, f"ckptkit-{type}", plan,
        tensors=len(plan.placements), nbytes=plan.nbytes, notes=_notes(source, plan, identity), dry_run=dry_run,
    )  # fmt: skip
    return conclude(report, source, place, how, sealing=sealing)


def _notes(source: Source, plan: Plan, identity: Identity) -> tuple[str, ...]:
    notes = [*([source.note] if source.note else []), *source.catalog.info.notes, *plan.notes]
    if not identity.known:
        notes.append("the source does not record its step, so the result is step 0; to set it, name DST step_00001000")
    for reason, names in plan.left_over().items():
        notes.append(f"skipped: {first_few(names, 3)}: {reason}")
    return tuple(dict.fromkeys(notes))


# --- the result's step, name and position in the run


def identity_of(source: Source, dst: str, storage_options: Mapping[str, Any] | None) -> Identity:
    """Return the new checkpoint's identity: its step, its tag and its position in the run.

    Raises:
        UsageError: `dst` is named after a different step, or its name is not valid for a checkpoint.
    """
    head, separator, name = dst.rstrip("/").rpartition("/")
    step = saved_step(source.store, source.catalog)
    stated = int(name) if name.isdecimal() else step_of_name(name)
    known = step is not None
    if step is None:
        step = stated or 0
    if stated is not None and stated != step:
        raise UsageError(f"{dst} has the name of step {stated}, but the source is step {step}. Choose another name.")
    tag = None if name in (step_name(step), "", ".", "..") else check_tag(name, step)
    record: dict[str, Any] = {}
    ours = source.catalog.info.format.startswith("ckptkit-")
    origin = find_record(source.store) if ours and not source.joined else None
    if origin is not None:
        record = {"metrics": dict(origin.metrics), "objective": origin.objective, "client_state": origin.client_state}
    parent = head or ("/" if separator else ".")
    record["sequence"] = _sequence(parent, name, step, origin, storage_options)
    return Identity(step, tag, record, known=known or stated is not None)


def _sequence(
    parent: str, name: str, step: int, origin: CommitRecord | None, storage_options: Mapping[str, Any] | None
) -> int:
    """Return the `CommitRecord.sequence` of the result, which orders the checkpoints of the run at `parent`.

    If the source is in the run, the result gets the source's number. Otherwise, the number is computed from the step.
    Checkpoints with the same number are ordered by step, and then by date.
    """
    from ckptkit.checkpoint.run.inventory import list_checkpoints

    try:
        committed = list_checkpoints(open_store(parent, storage_options=storage_options)).committed
    except (OSError, CkptkitError):
        return 1  # the directory does not exist yet
    others = [item.record for item in committed if item.name != name]
    if not others:
        return 1  # it is the first checkpoint in the run
    if origin is not None and any(item.save_id == origin.save_id for item in others):
        return origin.sequence
    before = [item.sequence for item in others if item.step <= step]
    return max(before) if before else max(0, min(item.sequence for item in others) - 1)
