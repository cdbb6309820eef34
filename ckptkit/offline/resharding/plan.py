"""Plans a reshard: the rank that stores each part of a tensor, the objects to keep, and the commit record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Digest, ObjectEntry, Role
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.state.values import decode
from ckptkit.digests import DIGEST, crc32, digest_of
from ckptkit.formats.dcp.records import frame_object, is_plain
from ckptkit.formats.hf.header import TensorToWrite, lay_out
from ckptkit.formats.models import side_file_names
from ckptkit.formats.own.local import LocalTensor, file_metadata, file_name
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS
from ckptkit.formats.own.reader import OBJECTS_NAME
from ckptkit.formats.own.record import RECORD_NAME
from ckptkit.offline.copying.plan import OutputFile, OutputTensor, Placement, Plan
from ckptkit.offline.export.base import beside_source, read_side_files
from ckptkit.offline.export.files import in_disk_order
from ckptkit.offline.resharding.mesh import Cut, Cuts, RankBoxes, TargetMesh, TPPlan
from ckptkit.offline.resharding.own_state import OwnState, OwnTensor, own_state
from ckptkit.offline.resharding.rank_files import Laid, lay_out_dcp
from ckptkit.offline.resharding.seal import Seal
from ckptkit.offline.vocabulary import VocabSize, resize_state

if TYPE_CHECKING:
    from ckptkit.storage.store import Store


# --- LOCAL files: one per rank, with the boxes that the rank stores


Placed = tuple[int, tuple[str, ...]] | None


def lay_out_local(
    catalog: Catalog,
    tensors: Sequence[OutputTensor],
    boxes: Sequence[RankBoxes],
    *,
    world_size: int,
    meshes: Sequence[dict[str, Any]],
    placements: Sequence[Placed],
) -> Laid:
    """Lay out each rank's boxes in a file `local_<rank>.safetensors`.

    Args:
        placements: The DTensor placements to record for each tensor: (index into `meshes`, placements as text). None
            for a plain tensor.
    """
    place = {id(tensor): i for i, tensor in enumerate(tensors)}
    order = [place[id(tensor)] for tensor in in_disk_order(catalog, tensors)]
    ordered = [boxes[i] for i in order]
    starts = [np.zeros(len(item.ranks), np.int64) for item in ordered]
    # Each rank's boxes, as (tensor, row) pairs sorted by rank.
    empty, counts = np.zeros(0, np.int64), [len(item.ranks) for item in ordered]
    ranks = np.concatenate([empty, *(item.ranks for item in ordered)])
    owners, rows = np.repeat(np.arange(len(ordered)), counts), np.concatenate([empty, *map(np.arange, counts)])
    by_rank = np.lexsort((owners, ranks))
    bounds = np.searchsorted(ranks[by_rank], np.arange(world_size + 1)).tolist()
    files = []
    for rank in range(world_size):
        parts = []
        own = by_rank[bounds[rank] : bounds[rank + 1]]
        mine = list(zip(owners[own].tolist(), rows[own].tolist(), strict=True))
        for owner, row in mine:
            tensor, item = tensors[order[owner]], ordered[owner]
            box = Box(tuple(item.offsets[row].tolist()), tuple(item.sizes[row].tolist()))
            name = tensor.name
            parts.append(LocalTensor(name, name, tensor.dtype, tensor.shape, box, placements[order[owner]]))
        headers = [TensorToWrite(part.name, part.dtype, part.box.sizes) for part in parts]
        layout = lay_out(headers, file_metadata(rank, world_size, meshes, parts))
        files.append(OutputFile.of_layout(file_name(rank), layout))
        for (owner, row), start in zip(mine, layout.starts, strict=True):
            starts[owner][row] = start
    placed = [
        Placement(tensors[i], item.ranks.astype(np.int32), start, item.offsets, item.sizes)
        for i, item, start in zip(order, ordered, starts, strict=True)
    ]
    return files, placed, ()


Record = tuple[tuple[str | int, ...], Role, bytes]
Planned = tuple[Plan, Seal]


@dataclass(frozen=True, slots=True)
class Identity:
    """The step and name of the new checkpoint, and fields of its commit record.

    Attributes:
        tag: The name of the directory. None if the name is derived from the step.
        record: Fields copied from the source's commit record.
        known: Whether the step is known from the source or from the directory's name.
    """

    step: int
    tag: str | None
    record: Mapping[str, Any]
    known: bool = True


def plan_reshard(
    store: Store,
    catalog: Catalog,
    mesh: TargetMesh,
    *,
    type: str,
    identity: Identity,
    tp_plan: TPPlan | None = None,
    vocabulary: VocabSize | None = None,
) -> Planned:
    """Return the plan of a reshard, and the fields of the result's manifest and commit record (`Seal`).

    Takes seconds for a million slices.

    Reads the source's objects. Reads tensors only to compute the mean of embeddings.

    Raises:
        UsageError: The mesh has a tp dimension, but ckptkit cannot tell which tensors this dimension splits. Also
            raised if the source contains several models.
        UnsupportedFormatError: A tensor can be read only by its Python class.
        CheckpointMismatchError: ckptkit cannot tell which tensors `vocabulary` applies to.
    """
    own = own_state(store, catalog, step=identity.step, sharded=type == "sharded")
    cuts = Cuts(catalog, mesh, tp_plan=tp_plan)
    own.notes += cuts.notes
    extra = {key: catalog.info.extra[key] for key in ("module_prefix",) if key in catalog.info.extra}
    aliases = catalog.info.extra.get("aliases")
    if aliases and type != "sharded" and catalog.info.format.startswith("ckptkit-"):
        extra["aliases"] = aliases
    shared, in_folders = side_file_names(store, catalog)
    names = shared | in_folders
    side = {names[path]: data for path, data in read_side_files(store, names, own.notes).items()}
    if "adapter_config.json" not in side and any(".lora_" in name for name in catalog.tensors):
        # The adapter's config may be elsewhere, for example in verl's lora_adapter/.
        found = beside_source(store, catalog).contents()
        side |= {name: found[name] for name in ("adapter_config.json",) if name in found}
    if vocabulary is not None:
        base = beside_source(store, catalog)
        config = resize_state(own, base.config, vocabulary, store=store, catalog=catalog, files=base.files)
        if config is not base.config and "config.json" in side:
            side["config.json"] = replace(base, config=config).contents()["config.json"]
    chosen = [cuts.of(item.source) for item in own.tensors]
    files = [OutputFile.of_bytes(name, data) for name, data in side.items()]
    return _planned(catalog, own, mesh, chosen, type, identity, extra, files)


def plan_local(
    catalog: Catalog, tensors: Sequence[OutputTensor], mesh: TargetMesh, identity: Identity, side: Sequence[OutputFile]
) -> Planned:
    """Return the plan of a LOCAL checkpoint for FSDP2 ranks, and the fields of its manifest and commit record (`Seal`).

    The checkpoint contains only a model, and the files `side`. A tensor that is copied unchanged keeps its sharding (an
    unsharded one stays unsharded). Any other tensor is sharded along dimension 0 if it contains floats, and unsharded
    otherwise.
    """
    known, own = Cuts(catalog, mesh), OwnState(trees={"step": identity.step})
    chosen = []
    for tensor in tensors:
        entry = catalog.tensors[tensor.sources[0]]
        plain = isinstance(tensor, Target) and tensor.only_part is not None
        sharded = bool(tensor.shape) and dtype_of(tensor.dtype).kind == "float"
        unchanged = plain and entry.shape == tensor.shape
        chosen.append(known.of(entry) if unchanged else Cut(fsdp=0 if sharded else None))
        named = replace(tensor, name=f"model.{tensor.name}")
        own.tensors.append(OwnTensor(named, entry, Role.MODEL, tensor.name, "", ("model", tensor.name)))
    return _planned(catalog, own, mesh, chosen, "local", identity, side=side)


def _planned(
    catalog: Catalog,
    own: OwnState,
    mesh: TargetMesh,
    cuts: Sequence[Cut],
    type: str,
    identity: Identity,
    extra: Mapping[str, Any] = MappingProxyType({}),
    side: Sequence[OutputFile] = (),
) -> Planned:
    """Return the plan that writes a state, and the fields of the result's manifest and commit record (`Seal`).

    Args:
        extra: Additional fields for the manifest.
        side: Additional files to write.
    """
    kinds: dict[tuple[str, ...], int] = {}  # index of each distinct mesh
    placements: list[Placed] = []
    placed_by_cut = {cut: mesh.placement(cut) for cut in dict.fromkeys(cuts)}
    for on in (placed_by_cut[cut] for cut in cuts):
        placements.append(None if on is None else (kinds.setdefault(on[0], len(kinds)), on[1]))
    meshes = [mesh.describe(dims) for dims in kinds]
    tensors = [item.tensor for item in own.tensors]
    records: list[Record] = []
    if type == "sharded":
        records = _records(catalog, own)
        boxes = [mesh.boxes(tensor.shape, cut) for tensor, cut in zip(tensors, cuts, strict=True)]
        keys, objects = [item.key for item in own.tensors], [(key, data) for key, _, data in records]
        files, placed, last = lay_out_dcp(catalog, tensors, boxes, keys=keys, objects=objects, save_id="reshard")
    else:
        # Training jobs spread replicated tensors over the replicas by the same hash.
        turns = [crc32(tensor.name.encode("utf-8", "surrogatepass")) for tensor in tensors]
        boxes = [
            mesh.boxes(tensor.shape, cut, turn=turn) for tensor, cut, turn in zip(tensors, cuts, turns, strict=True)
        ]
        files, placed, last = lay_out_local(
            catalog, tensors, boxes, world_size=mesh.size, meshes=meshes, placements=placements
        )
    placed_names = {
        tensor.name: [where[0], list(where[1])]
        for tensor, where in zip(tensors, placements, strict=True)
        if where is not None
    }
    stated: dict[str, Any] = {MESHES: meshes, PLACEMENTS: placed_names, "step": identity.step, **extra}
    if own.trees or type != "sharded":
        body = json.dumps({"format": 1, "objects": own.trees}, separators=(",", ":"), allow_nan=False).encode()
        files = [*files, OutputFile.of_bytes(OBJECTS_NAME, body)]
        stated["objects"] = OBJECTS_NAME
    notes = tuple(dict.fromkeys((*own.notes, *_resized(own.trees, mesh.size))))
    plan = Plan(catalog, (*files, *side), tuple(placed), (*last, RECORD_NAME), tuple(own.leftovers), notes=notes)
    entries: dict[str, ObjectEntry] = {}
    start = 0
    for key, role, data in records:  # they are at the beginning of the first file
        digest = Digest(DIGEST, digest_of(data), start, len(data))
        name, path = ".".join(map(str, key)), plan.files[0].path
        entries[name] = ObjectEntry(name, path, start, len(data), role=role, key=tuple(key), digest=digest)
        start += len(data)
    seal = Seal(
        step=identity.step,
        tag=identity.tag,
        state_dict_type=type,
        world_size=mesh.size,
        mesh=mesh.describe(),
        tensors={item.tensor.name: item for item in own.tensors},
        ranks=np.array([_rank(file.path) for file in plan.files], np.int32),
        objects=entries,
        extra=stated,
        record=identity.record,
    )
    return plan, seal


def _rank(path: str) -> int:
    for head in ("__", "local_"):
        if path.startswith(head):
            digits = path[len(head) :].split("_", 1)[0].split(".", 1)[0]
            return int(digits) if digits.isdigit() else -1
    return -1


def _resized(trees: Mapping[str, Any], world_size: int) -> list[str]:
    """Return notes about per-rank state that was saved by a different number of ranks."""
    found = []
    for kind in ("rng", "dataloader"):
        saved = sum(name.startswith(f"{kind}.") for name in trees)
        if saved and saved != world_size:
            option = "rng_on_resize" if kind == "rng" else "per_rank_on_resize"
            states = "the state of 1 rank is" if saved == 1 else f"the states of {saved} ranks are"
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            found.append(f"{kind}: {states} kept; on load, {option} decides what {ranks} get")
    return found


# --- objects for plain torch


def _records(catalog: Catalog, own: OwnState) -> list[Record]:
    """Return the encoded objects that torch's own DCP reader needs, such as the settings of parameter groups.

    The objects of a DCP source are copied. For any other source, only the settings of parameter groups are encoded.
    """
    if own.records or not own.trees or catalog.info.format == "ckptkit-sharded":
        return [
            (entry.key if ".".join(map(str, entry.key)) == entry.name else (entry.name,), entry.role, data)
            for entry, data in own.records
        ]
    records: list[Record] = []
    for section, tree in own.trees.items():
        if not section.startswith("optimizer") or not isinstance(tree, dict):
            continue
        for index, group in enumerate(tree.get("param_groups", ())):
            for setting, value in {**group, "param_names": group["params"]}.items():
                if any(tag in json.dumps(value) for tag in ('"$tensor"', '"$ndarray"', '"$npscalar"', '"$ref"')):
                    continue  # only torch could write this value; it remains in objects.json
                plain = decode(value, str)
                if is_plain(plain):
                    key = (section, "param_groups", index, setting)
                    records.append((key, Role.OPTIMIZER, frame_object(plain)))
    return records
