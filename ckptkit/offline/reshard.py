"""A checkpoint of one cluster into one of another: the same tensors, cut for other ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.columns import distinct
from ckptkit.catalog.entry import Catalog
from ckptkit.errors import CkptkitError, IncompleteCheckpointError, UsageError
from ckptkit.formats.layout import CommitRecord, check_tag, find_record, step_name, step_of_name
from ckptkit.formats.options import ReadOptions
from ckptkit.offline.carry_out import How, Outcome, carry_out
from ckptkit.offline.copy import Progress
from ckptkit.offline.coverage import check_plan
from ckptkit.offline.plan import Plan
from ckptkit.offline.publish import open_target, options_of_both
from ckptkit.offline.reading import open_pinned, reads_checkpoints
from ckptkit.offline.report import ConvertReport
from ckptkit.offline.reshard_plan import Identity, plan_reshard
from ckptkit.offline.target_mesh import TargetMesh
from ckptkit.offline.tp_plan import TPPlan
from ckptkit.units import parse_size

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source
    from ckptkit.storage.store import Store

__all__ = ["reshard"]

_TYPES = ("sharded", "local")


@reads_checkpoints
def reshard(  # noqa: PLR0913 - one argument an option
    src: str,
    dst: str,
    *,
    world_size: int,
    mesh: str | Mapping[str, int] | None = None,
    type: str = "sharded",
    tp_plan: str | Mapping[str, int | None] | None = None,
    layout: str | None = None,
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
    """Write the checkpoint at `src` for `world_size` ranks to `dst`, a committed checkpoint that any job can load.

    `dst` is the checkpoint's own directory; a CheckpointManager of its parent finds it. It counts as the same moment
    of the run as its source. File r of the result holds the slices that rank r will ask for. Tensors that were
    replicated stay so. The whole training state is carried: of a checkpoint of ours all of it, of another system's
    the weights, masters, moments, the settings of the parameter groups and a scheduler of torch; the user's own
    plain values come back as `LoadReport.extra`; what is left out is listed. State that belongs to single ranks (RNG,
    dataloader) stays under the keys of the old ranks: where their number differs from the new job's, the load decides
    by `rng_on_resize` and `per_rank_on_resize`. Another system's RNG states are left out.

    Under `torchrun` every rank calls it: the files are shared out, and published once.

    Args:
        mesh: "replicate=2,shard=4,tp=2", or a mapping; None shards over all ranks.
        type: "sharded" (any job loads it), or "local" (one file a rank, for jobs of this world size and mesh).
        tp_plan: Globs of parameter names with the dimension that tensor parallelism cuts, or a JSON file of them; for
            sources that were not tensor parallel. None derives it from the config of a llama-like model beside the
            source.
        layout: URL of a layout of flat parameters, for formats that need one (FSDP1 LOCAL).
        allow_pickle: Read torch.save files that name unknown classes, without them; nothing of them is run.
        src_storage_options, dst_storage_options: Of one of the two file systems, over the common `storage_options`.

    Raises:
        UsageError: The mesh does not fit the world size, `dst` states another step, or a tp plan is missing.
        IncompleteCheckpointError: The file of a rank is missing; it names the rank.
        CorruptCheckpointError: The source is damaged; nothing was published.
    """
    started = time.perf_counter()
    if type not in _TYPES:
        raise UsageError(f"type={type!r} is none of {', '.join(_TYPES)}.")
    target = TargetMesh.parse(mesh, world_size=world_size)
    split = None if tp_plan is None else TPPlan.of(tp_plan)
    memory = parse_size(max_memory)
    there, here = options_of_both(storage_options, src_storage_options, dst_storage_options)
    options = ReadOptions(layout=layout, allow_pickle=allow_pickle)
    source = open_pinned(src, storage_options=there, options=options, together=not dry_run)
    _check_files(source.store, source.catalog)
    place = open_target(dst, source=source.url, single_file=False, overwrite=overwrite, storage_options=here)
    identity = identity_of(source, dst, here)
    plan, sealing = plan_reshard(source.store, source.catalog, target, type=type, identity=identity, tp_plan=split)
    report = ConvertReport(
        src, dst, source.url, source.catalog.info.format, f"ckptkit-{type}", plan,
        tensors=len(plan.placements), nbytes=plan.nbytes, notes=_notes(source, plan), dry_run=dry_run,
    )  # fmt: skip
    if dry_run:
        check_plan(plan)
        return report
    outcome = carry_out(plan, source, place, How(workers, memory, check, verify, progress), sealing=sealing)
    return outcome.told(report, proved=_facts(plan, outcome), started=started)


def _facts(plan: Plan, outcome: Outcome) -> list[str]:
    """What was checked and holds: each sentence stands for a check that would have raised."""
    facts, record = ["every element covered once"], outcome.record
    if outcome.copied.records:
        facts.append(f"{outcome.copied.records} digests of the source checked")
    if outcome.masters:
        facts.append(f"{outcome.masters} weights equal to their fp32 masters, cast")
    if outcome.verified is not None:
        facts.append(f"{outcome.verified}/{len(plan.placements)} tensors equal to the source")
    return [*facts, f"committed as step {record.step} of {record.world_size} ranks"] if record is not None else facts


def _notes(source: Source, plan: Plan) -> tuple[str, ...]:
    notes = [*([source.note] if source.note else []), *source.catalog.info.notes, *plan.notes]
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.leftovers:
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        shown = ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")
        notes.append(f"left out: {shown}: {reason}")
    return tuple(dict.fromkeys(notes))


# --- the source


def _check_files(store: Store, catalog: Catalog) -> None:
    """Raise where a file that slices lie in is missing or too short, before anything is written.

    Raises:
        IncompleteCheckpointError: Names the file, and the ranks that wrote it.
    """
    ranks: dict[str, set[int]] = {}
    ends: dict[str, int] = {}
    for entry in catalog.tensors.values():
        slices = entry.slices
        for index in distinct(slices.files).tolist():
            path, rows = slices.paths[index], slices.files == index
            plain = not slices.codecs
            ends[path] = max(ends.get(path, 0), int((slices.starts[rows] + slices.nbytes[rows]).max()) if plain else 0)
            if slices.ranks is not None:
                ranks.setdefault(path, set()).update(distinct(slices.ranks[rows]).tolist())
    folders = {path.rpartition("/")[0] for path in ends}
    there = {item.path: item.size for folder in folders for item in store.list(folder)}
    for path, end in ends.items():
        size = there.get(path, -1)
        if size < 0:  # a link, or a listing that leaves it out
            info = store.info(path)
            size = -1 if info is None else info.size
        if size < end:
            whose = sorted(rank for rank in ranks.get(path, ()) if rank >= 0)
            owner = f", which rank {', '.join(map(str, whose))} wrote," if whose else ""
            what = "is missing" if size < 0 else f"has {size} bytes, {end} are needed"
            raise IncompleteCheckpointError(f"{store.url}/{path}{owner} {what}. Nothing was written.")


# --- what the result is


def identity_of(source: Source, dst: str, storage_options: Mapping[str, Any] | None) -> Identity:
    """Return step, tag and place in the run of the new checkpoint.

    Raises:
        UsageError: The name of `dst` is that of another step, or can't be the name of a checkpoint.
    """
    head, separator, name = dst.rstrip("/").rpartition("/")
    step = source.catalog.info.step
    stated = int(name) if name.isdecimal() else step_of_name(name)
    if step is None:
        step = stated or 0
    if stated is not None and stated != step:
        raise UsageError(f"{dst}: its name says step {stated}, but the source is of step {step}. Call it otherwise.")
    tag = None if name in (step_name(step), "", ".", "..") else check_tag(name, step)
    record: dict[str, Any] = {}
    ours = source.catalog.info.format.startswith("ckptkit-")
    origin = find_record(source.store) if ours else None
    if origin is not None:
        record = {
            "metrics": dict(origin.metrics),
            "objective": origin.objective,
            "client_state": origin.client_state,
        }
    parent = head or ("/" if separator else ".")
    record["sequence"] = _sequence(parent, name, step, origin, storage_options)
    return Identity(step, tag, record)


def _sequence(
    parent: str, name: str, step: int, origin: CommitRecord | None, storage_options: Mapping[str, Any] | None
) -> int:
    """Return the place among the checkpoints of a run: beside the source where it is of that run; else behind those
    of lower or equal steps. Ties are settled by the step, then by the date: the newer copy comes later."""
    from ckptkit.checkpoint.inventory import list_checkpoints
    from ckptkit.storage.store import open_store

    own = origin.sequence if origin is not None else 1
    try:
        committed = list_checkpoints(open_store(parent, storage_options=storage_options)).committed
    except (OSError, CkptkitError):
        return own  # there is no such directory yet
    others = [item.record for item in committed if item.name != name]
    if not others or (origin is not None and any(item.save_id == origin.save_id for item in others)):
        return own
    before = [item.sequence for item in others if item.step <= step]
    return max(before) if before else max(0, min(item.sequence for item in others) - 1)
