"""A checkpoint of one cluster into one of another: the same tensors, cut for other ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.entry import Catalog, ObjectEntry, Role, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.address import resolve_url
from ckptkit.errors import UsageError
from ckptkit.formats.manifest import MESHES, PLACEMENTS
from ckptkit.formats.options import ReadOptions
from ckptkit.offline.copy import CopyReport, Progress, execute
from ckptkit.offline.coverage import check_plan
from ckptkit.offline.plan import OutputFile, Plan
from ckptkit.offline.publish import open_target
from ckptkit.offline.rank_files import RankBoxes, lay_out_dcp
from ckptkit.offline.report import ConvertReport, peak_memory
from ckptkit.offline.seal import Seal, objects_json, seal
from ckptkit.offline.target_mesh import Cut, TargetMesh, cut_of_placements
from ckptkit.units import parse_size

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source

__all__ = ["reshard"]

_OBJECTS = "objects.json"


def reshard(
    src: str,
    dst: str,
    *,
    world_size: int,
    mesh: str | Mapping[str, int] | None = None,
    type: str = "sharded",
    workers: int = 0,
    max_memory: str | int = "512MB",
    check: bool = True,
    verify: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the checkpoint at `src` for `world_size` ranks to `dst`, a committed checkpoint that any job can load.

    File r of the result holds the slices that rank r will ask for. Tensors that were replicated stay so. State that
    belongs to single ranks (RNG, dataloader) is carried over under the keys it has: a load with another number of
    ranks decides by its `rng_on_resize` policy.

    Args:
        mesh: "replicate=2,shard=4,tp=2", or a mapping; None shards over all ranks.
        type: "sharded", or "local".

    Raises:
        UsageError: The mesh does not fit the world size.
        CorruptCheckpointError: The source is damaged or incomplete; nothing was published.
    """
    started = time.perf_counter()
    if type != "sharded":
        raise UsageError(f"--type {type}: only sharded is written so far.")
    target = TargetMesh.parse(mesh, world_size=world_size)
    from ckptkit.formats.detect import open_source

    source = open_source(
        resolve_url(src, storage_options=storage_options), storage_options=storage_options, options=ReadOptions()
    )
    place = open_target(dst, single_file=False, overwrite=overwrite, storage_options=storage_options)
    plan, sealing = _plan(source, target, dst)
    report = ConvertReport(
        src, dst, source.url, source.catalog.info.format, "ckptkit-sharded", plan,
        tensors=len(plan.placements), nbytes=plan.nbytes, notes=source.catalog.info.notes, dry_run=dry_run,
    )  # fmt: skip
    if dry_run:
        check_plan(plan)
        return report
    memory = parse_size(max_memory)
    verified = None
    with place.stage(plan) as session:

        def copied() -> CopyReport:
            return execute(
                plan, source.store, session.store, workers=workers, max_memory=memory, check=check,
                progress=progress, only=session.only,
            )  # fmt: skip

        def proved() -> int:
            from ckptkit.offline.prove import prove_equal

            return prove_equal(plan, source.store, session.store, max_memory=memory, workers=workers)

        done = session.everyone(copied)
        if verify:
            verified = session.one(proved)
        record = session.one(lambda: seal(plan, session.store, sealing, workers=workers))
    facts = ["every element covered once", f"committed as step {record.step} of {world_size} ranks"]
    if done.records:
        facts.insert(1, f"{done.records} digests of the source checked")
    if verified is not None:
        facts.append(f"{verified}/{len(plan.placements)} tensors equal to the source")
    return replace(
        report,
        nbytes_read=done.nbytes_read,
        checked=done.records,
        verified=verified,
        proved=tuple(facts),
        seconds=time.perf_counter() - started,
        peak_memory=peak_memory(),
    )


def _plan(source: Source, mesh: TargetMesh, dst: str) -> tuple[Plan, Seal]:
    catalog = source.catalog
    entries = {name: replace(entry, name=name) for name, entry in _named(catalog).items()}
    names = list(entries)
    originals = [catalog.tensors[source_name] for source_name in _named(catalog, sources=True).values()]
    cuts = [_cut(catalog, entry) for entry in originals]
    boxes: list[RankBoxes] = [mesh.boxes(entry.shape, cut) for entry, cut in zip(originals, cuts, strict=True)]
    targets = [Target.of(entry, name) for entry, name in zip(originals, names, strict=True)]
    records, values = _objects(source)
    keys = [entry.key or tuple(name.split(".")) for name, entry in entries.items()]
    files, placements, last = lay_out_dcp(catalog, targets, boxes, keys=keys, objects=records)
    objects = {
        name: ObjectEntry(name, files[0].path, start, nbytes, role=role, key=key)
        for name, (key, role, start, nbytes) in _object_places(records, catalog).items()
    }
    small = [OutputFile.of_bytes(_OBJECTS, objects_json(values)), *_side_files(source)]
    plan = Plan(catalog, (*files, *small), tuple(placements), (*last, "checkpoint.json"), (), (), ())
    ranks = np.array([_rank(file.path) for file in plan.files], np.int32)
    dims = mesh.dims
    about = {"shape": list(dims.values()), "names": list(dims), "ranks": list(range(mesh.size))}
    placed = {name: (0, mesh.placements(cut)) for name, cut in zip(names, cuts, strict=True) if cut != Cut(None)}
    info = catalog.info
    sealing = Seal(
        name=dst.rstrip("/").rpartition("/")[2],
        step=info.step or 0,
        state_dict_type="sharded",
        world_size=mesh.size,
        mesh={"shape": list(dims.values()), "names": list(dims)},
        entries=entries,
        ranks=ranks,
        objects=objects,
        extra={MESHES: [about], PLACEMENTS: placed, "step": info.step or 0, "objects": _OBJECTS},
        record=_carried(source),
    )
    return plan, sealing


def _named(catalog: Catalog, *, sources: bool = False) -> dict[str, Any]:
    """Return the tensors under the keys of our own layout; with `sources`, the names they have in the catalog."""
    found: dict[str, Any] = {}
    for name, entry in catalog.tensors.items():
        own = name if catalog.info.format.startswith("ckptkit-") else _own_name(entry)
        if own in found:
            raise UsageError(f"tensor {own!r} is in the source twice: its optimizer and its model share a name.")
        key = entry.key if own == name else ()
        found[own] = name if sources else replace(entry, name=own, key=key)
    return found


def _own_name(entry: TensorEntry) -> str:
    if entry.role is Role.MODEL:
        return f"model.{entry.fqn}"
    if entry.role is Role.MASTER:
        return f"optimizer.master.{entry.fqn}"
    if entry.role is Role.OPTIMIZER and entry.fqn and entry.state:
        return f"optimizer.state.{entry.fqn}.{entry.state}"
    return entry.name


def _cut(catalog: Catalog, entry: TensorEntry) -> Cut:
    """Return how the tensor was cut, where that was recorded; else as FSDP2 would, unless it was in one piece while
    others were not (a buffer, a step count)."""
    if not entry.shape:
        return Cut(None)
    placements, meshes = catalog.info.extra.get(PLACEMENTS), catalog.info.extra.get(MESHES)
    if placements is not None and meshes is not None:
        placed = placements.get(entry.name)
        if placed is None:
            return Cut(None)
        index, texts = placed
        return cut_of_placements(tuple(meshes[index]["names"]), tuple(texts))
    whole = len(entry.slices) <= 1 and (catalog.info.world_size or 1) > 1
    return Cut(None) if whole else Cut(0)


Records = list[tuple[tuple[str | int, ...], bytes]]


def _objects(source: Source) -> tuple[Records, dict[str, ObjectEntry]]:
    """Return the objects that lie as records in DCP files, copied as they are, and those that are values."""
    records: Records = []
    values: dict[str, ObjectEntry] = {}
    for name, entry in source.catalog.objects.items():
        if entry.encoding == "value":
            values[name] = entry
        elif entry.codec is None:
            data = source.store.read(entry.path, entry.start, entry.start + entry.nbytes)
            records.append((entry.key or (name,), data))
    return records, values


def _object_places(records: Sequence[Any], catalog: Catalog) -> dict[str, Any]:
    places: dict[str, Any] = {}
    start = 0
    for key, data in records:
        name = ".".join(map(str, key))
        role = catalog.objects[name].role if name in catalog.objects else Role.OTHER
        places[name] = (tuple(key), role, start, len(data))
        start += len(data)
    return places


def _side_files(source: Source) -> list[OutputFile]:
    return [
        OutputFile.of_bytes(path.rpartition("/")[2], source.store.read(path)) for path in source.catalog.info.side_files
    ]


def _carried(source: Source) -> dict[str, Any]:
    """Return what the new record takes over from that of a checkpoint of ours."""
    if not source.catalog.info.format.startswith("ckptkit-"):
        return {}
    from ckptkit.formats.layout import read_record

    record = read_record(source.store)
    return {
        "sequence": record.sequence,
        "metrics": dict(record.metrics),
        "objective": record.objective,
        "client_state": record.client_state,
    }


def _rank(path: str) -> int:
    head = path[2:].split("_", 1)[0] if path.startswith("__") else ""
    return int(head) if head.isdigit() else -1
