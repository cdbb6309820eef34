"""What a reshard will write: each tensor cut for its ranks, the objects beside them, and what the record will say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ckptkit.catalog.entry import Catalog, Digest, ObjectEntry, Role
from ckptkit.checkpoint.values import decode
from ckptkit.formats.dcp_encode import frame_object, is_plain
from ckptkit.formats.manifest import DIGEST, MESHES, PLACEMENTS
from ckptkit.formats.objects import decode_record
from ckptkit.offline.local_layout import lay_out_local, turn_of
from ckptkit.offline.own_state import OwnState, OwnTensor, own_state
from ckptkit.offline.plan import OutputFile, Plan
from ckptkit.offline.rank_cuts import Cuts
from ckptkit.offline.rank_files import Laid, lay_out_dcp
from ckptkit.offline.seal import Seal, SealedTensor
from ckptkit.offline.target_mesh import Cut, TargetMesh
from ckptkit.offline.tp_plan import TPPlan

if TYPE_CHECKING:
    from ckptkit.storage.store import Store

__all__ = ["Identity", "plan_reshard"]

_OBJECTS = "objects.json"
_RECORD = "checkpoint.json"
Record = tuple[tuple[str | int, ...], bytes]


@dataclass(frozen=True, slots=True)
class Identity:
    """What the new checkpoint is: its step, its tag where its directory is not called by the step, and the fields of
    its record that come from elsewhere."""

    step: int
    tag: str | None
    record: Mapping[str, Any]


def plan_reshard(
    store: Store,
    catalog: Catalog,
    mesh: TargetMesh,
    *,
    type: str,
    identity: Identity,
    tp_plan: TPPlan | None = None,
) -> tuple[Plan, Seal]:
    """Return the plan and what seals it. Reads objects of the source, no tensors; a million slices take seconds.

    Raises:
        UsageError: The mesh has a tp dimension and nothing tells what it cuts; or the source holds several models.
    """
    own = own_state(store, catalog, step=identity.step, untie=type == "sharded")
    cuts = Cuts(catalog, mesh, tp_plan=tp_plan)
    chosen = [cuts.of(item.source) for item in own.tensors]
    meshes, placements = _placements(mesh, chosen)
    records = _records(store, catalog, own) if type == "sharded" else []
    if type == "sharded":
        files, placed, last = _sharded(catalog, own, mesh, chosen, records)
    else:
        boxes = [
            mesh.boxes(item.source.shape, cut, turn=turn_of(item.tensor.name))
            for item, cut in zip(own.tensors, chosen, strict=True)
        ]
        tensors = [item.tensor for item in own.tensors]
        files, placed, last = lay_out_local(
            catalog, tensors, boxes, world_size=mesh.size, meshes=meshes, placements=placements
        )
    body = json.dumps({"format": 1, "objects": own.trees}, separators=(",", ":"), allow_nan=False).encode()
    side = [
        OutputFile.of_bytes(path.rpartition("/")[2], store.read(path))
        for path in dict.fromkeys(catalog.info.side_files)
    ]
    plan = Plan(
        catalog,
        (*files, OutputFile.of_bytes(_OBJECTS, body), *side),
        tuple(placed),
        (*last, _RECORD),
        tuple(own.leftovers),
        (),
        tuple(dict.fromkeys((*own.notes, *cuts.notes, *_resized(own.trees, mesh.size)))),
    )
    return plan, _seal(plan, own, mesh, type, identity, meshes, placements, records)


def _sharded(catalog: Catalog, own: OwnState, mesh: TargetMesh, cuts: Sequence[Cut], records: Sequence[Record]) -> Laid:
    boxes = [mesh.boxes(item.source.shape, cut) for item, cut in zip(own.tensors, cuts, strict=True)]
    return lay_out_dcp(
        catalog,
        [item.tensor for item in own.tensors],
        boxes,
        keys=[item.key for item in own.tensors],
        objects=records,
    )


def _placements(mesh: TargetMesh, cuts: Sequence[Cut]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The distinct meshes, and for each cut (mesh index, texts) or None."""
    kinds: dict[tuple[str, ...], int] = {}
    found: list[Any] = []
    for cut in cuts:
        placed = mesh.placement(cut)
        found.append(None if placed is None else (kinds.setdefault(placed[0], len(kinds)), placed[1]))
    return [mesh.describe(dims) for dims in kinds], found


def _seal(
    plan: Plan,
    own: OwnState,
    mesh: TargetMesh,
    type: str,
    identity: Identity,
    meshes: Sequence[dict[str, Any]],
    placements: Sequence[Any],
    records: Sequence[Record],
) -> Seal:
    placed = {
        item.tensor.name: [where[0], list(where[1])]
        for item, where in zip(own.tensors, placements, strict=True)
        if where is not None
    }
    extra: dict[str, Any] = {MESHES: list(meshes), PLACEMENTS: placed, "step": identity.step, "objects": _OBJECTS}
    aliases = plan.catalog.info.extra.get("aliases")
    if aliases and type != "sharded" and plan.catalog.info.format.startswith("ckptkit-"):
        extra["aliases"] = aliases
    about = {item.tensor.name: _about(item) for item in own.tensors}
    return Seal(
        step=identity.step,
        tag=identity.tag,
        state_dict_type=type,
        world_size=mesh.size,
        mesh=mesh.describe(),
        tensors=about,
        ranks=np.array([_rank(file.path) for file in plan.files], np.int32),
        objects=_object_entries(plan.files[0].path if plan.files else "", records),
        extra=extra,
        record=identity.record,
    )


def _about(item: OwnTensor) -> SealedTensor:
    return SealedTensor(item.role, item.fqn, item.state, item.key)


def _rank(path: str) -> int:
    for head in ("__", "local_"):
        if path.startswith(head):
            digits = path[len(head) :].split("_", 1)[0].split(".", 1)[0]
            return int(digits) if digits.isdigit() else -1
    return -1


def _resized(trees: Mapping[str, Any], world_size: int) -> list[str]:
    """What a person should know about state that belonged to single ranks."""
    found = []
    for kind in ("rng", "dataloader"):
        saved = sum(name.startswith(f"{kind}.") for name in trees)
        if saved and saved != world_size:
            option = "rng_on_resize" if kind == "rng" else "per_rank_on_resize"
            states = "the state of 1 rank is" if saved == 1 else f"the states of {saved} ranks are"
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            found.append(f"{kind}: {states} kept; at load, {option} decides for {ranks}")
    return found


# --- objects of plain torch


def _records(store: Store, catalog: Catalog, own: OwnState) -> list[Record]:
    """The records that plain torch DCP reads: those of a SHARDED source as they are, else the groups' settings."""
    if catalog.info.format == "ckptkit-sharded":
        return [
            (entry.key or (name,), _bytes_of(store, entry))
            for name, entry in catalog.objects.items()
            if entry.encoding == "torch_save"
        ]
    records: list[Record] = []
    for section, tree in own.trees.items():
        if not section.startswith("optimizer") or not isinstance(tree, dict):
            continue
        for index, group in enumerate(tree.get("param_groups", ())):
            for setting, value in group.items():
                if any(tag in json.dumps(value) for tag in ('"$tensor"', '"$ndarray"', '"$npscalar"', '"$ref"')):
                    continue  # only torch could make it; objects.json has it
                plain = decode(value, str)
                if is_plain(plain):
                    records.append(((section, "param_groups", index, setting), frame_object(plain)))
    return records


def _bytes_of(store: Store, entry: ObjectEntry) -> bytes:
    if entry.codec is not None:
        return decode_record(store, entry.path, entry.codec)
    return store.read(entry.path, entry.start, entry.start + entry.nbytes)


def _object_entries(path: str, records: Sequence[Record]) -> dict[str, ObjectEntry]:
    entries: dict[str, ObjectEntry] = {}
    start = 0
    for key, data in records:
        name = ".".join(map(str, key))
        role = Role.OPTIMIZER if name.startswith("optimizer") else Role.OTHER
        digest = Digest(DIGEST, xxhash.xxh3_64_intdigest(data), start, len(data))
        entries[name] = ObjectEntry(name, path, start, len(data), role=role, key=tuple(key), digest=digest)
        start += len(data)
    return entries
