"""Finds plain (unsharded) tensors and optimizer values that differ between ranks, and saves each rank's copy.

Plain tensors and optimizer values are normally equal on all ranks, so a checkpoint stores only one copy of each. If the
values differ (running statistics of each rank's data, unsynchronised parameters, optimizer states computed from a
shard), one copy would silently lose the values of all other ranks. `checkpoint/state/optimizer/layout` decides on which
ranks of a later job a rank's own optimizer states may be loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.entry import Catalog
from ckptkit.checkpoint.state.capture import Captured
from ckptkit.checkpoint.state.local_part import ShardLayout, holders_of, layout_of, parts_here, this_rank
from ckptkit.checkpoint.state.optimizer.capture import CapturedOptimizer
from ckptkit.checkpoint.state.optimizer.layout import layouts, places
from ckptkit.checkpoint.state.values import references
from ckptkit.digests import digest_of, hash_of, signature_of
from ckptkit.errors import CorruptCheckpointError, SaveError
from ckptkit.formats.dcp.host_bytes import local_part, row_major
from ckptkit.units import counted, first_few

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

PER_RANK = "per_rank"
"""`per_rank.<rank>.<key>` is the copy of one rank. `<key>` alone is the copy of the lowest rank that has the key."""

_BOUND = "bound"
"""Wraps a value in `per_rank.<rank>` that may be loaded only where parameters are sharded in the same way."""

_PLACES = "places"  # where a rank is in the meshes that shard an optimizer's parameters
_SHARED = "shared"
_PARTS = ("param_groups", "values", _SHARED)  # parts of an optimizer's JSON, each of which is compared as a whole
_NAMES = "names"  # names of a rank's plain states, which differ between ranks that update different parameters
_SAMPLE = 4096  # bytes that are sampled at the start, middle and end of a tensor that is not on the host
_BLOCK, _TURNS = 1 << 16, 16  # each save hashes one block in 16 of a large replica on the host
_SHOWN = 5
_NAME, _CONTENT, _CLASS = range(3)  # columns of a table of fingerprints

EVERY = 0
"""The class of plain tensors as long as it is unknown which ranks have them."""


class Fingerprints:
    """Holds a 24-byte fingerprint of each of this rank's plain tensors, optimizer values and replicated DTensor parts.

    The fingerprints are divided into *classes*: a class contains the values that are on the same ranks. All these ranks
    should have the same keys and contents in the class, so a save exchanges only one signature for each class. The mesh
    of a replicated DTensor determines its class. For a plain tensor, it is not known before the first comparison which
    ranks have the tensor. Until then, its class is `EVERY`, which all ranks send.

    Plain tensors on the host are hashed completely (tens of GB/s). For a tensor on a device, the fingerprint covers a
    reduction over all words, and three samples of bytes. Only a few KB per tensor are copied to the host. For a large
    replicated DTensor on the host, each save hashes only every 16th block, so 16 saves together hash all blocks. If
    each save hashed all blocks, the hashing would take a third of the save's time.

    If a DTensor is on a mesh of only some ranks, a DTensor with the same name may be on other meshes, for example if
    each mesh has its own experts. The lowest rank of each mesh sends the names of such tensors once (`apart`). If
    several meshes have a tensor of the same name (`shared_names`), the tensors are compared like plain tensors.

    Args:
        classes: The class of each plain tensor, by the digest of the tensor's name, as `differing` returns them.
        shared: The result of `shared_names`.
        turn: Selects the blocks to hash. It is the same on all ranks, and grows by 1 with each save.
        world_size: The number of ranks that save.

    Attributes:
        apart: The input of `shared_names`. Contains a digest of the mesh and a digest of the name for each DTensor
            whose mesh does not have all ranks, if this rank is the mesh's lowest.
        apart_signature: Changes if tensors on meshes of only some ranks are added or removed. b"" if there are none.
    """

    def __init__(
        self, captured: Captured, classes: Mapping[int, int], shared: Collection[int], turn: int, world_size: int
    ) -> None:
        import torch
        from torch.distributed.tensor import DTensor

        rank = this_rank()
        found: dict[str, torch.Tensor] = {}
        declared: dict[str, torch.Tensor] = {}
        replicas: dict[str, tuple[torch.Tensor, int]] = {}
        partial: list[tuple[tuple[int, ...], int]] = []  # (ranks, name digest) on meshes of only some ranks
        for key, tensor in captured.tensors(aliases=False):
            if key in captured.declared:
                declared[key] = tensor
            elif isinstance(tensor, DTensor):
                if key in captured.own or key in captured.unlike:
                    continue
                layout = layout_of(tensor)
                if len(layout.mesh_ranks) != world_size and rank in layout.mesh_ranks:
                    partial.append((layout.mesh_ranks, digest := _name_digest(key)))
                    if digest in shared:
                        declared[key] = tensor
                        continue
                if kind := _class_by_mesh(layout, rank):
                    replicas[key] = local_part(tensor), kind
            elif (
                type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
                and not tensor.is_meta and not tensor.is_quantized and key not in captured.own
            ):  # fmt: skip
                found[key] = tensor
        rows = np.array([(_class_of_ranks(ranks), name) for ranks, name in partial], "<u8").reshape(-1, 2)
        self.apart = rows[[min(ranks) == rank for ranks, _ in partial]].tobytes()
        self.apart_signature = signature_of(rows.tobytes()) if partial else b""
        unshaped = {key for taken in captured.optimizers.values() for key in taken.unshaped}
        kinds = {key: (tensor.dtype, tensor.shape) for key, tensor in found.items()}
        names = [_name_digest(key, *(kind if key not in unshaped else ())) for key, kind in kinds.items()]
        contents = list(_contents(list(found.values())))
        contents = [
            content ^ _name_digest("", *kind) if key in unshaped else content
            for (key, kind), content in zip(kinds.items(), contents, strict=True)
        ]
        # These are the parts of the optimizers' JSON that are not saved for each rank anyway.
        apart = {key for own in captured.rank_objects.values() if isinstance(own, dict) for key in own}
        trees = {
            f"{section}.{part}": digest_of(json.dumps(tree).encode())
            for section, taken in captured.optimizers.items()
            for part, tree in _parts(taken).items()
            if f"{section}.{part}" not in apart
        }
        self.keys = [*found, *trees, *declared, *replicas]
        # Hash the parameters' names, too: ranks with different parameters (pipeline stages) have different values. But
        # not for "shared", which belongs to no parameter, and has the same names on all ranks.
        salts = {
            f"{section}.{part}": "".join(f" {fqn}" for group in taken.tree["param_groups"] for fqn in group["params"])
            for section, taken in captured.optimizers.items()
            for part in (*_PARTS, _NAMES)
            if part != _SHARED
        }
        names += [_name_digest(key + salts.get(key, "")) for key in trees]
        names += [
            _name_digest(f"{key} {parts_here(tensor, local_part(tensor))[1]}") for key, tensor in declared.items()
        ]
        self._table = np.empty((len(self.keys), 3), "<u8")
        self._table[:, _NAME] = [
            *names,
            *(_name_digest(f"{key} replica", local.dtype, local.shape) for key, (local, _) in replicas.items()),
        ]
        self._table[:, _CONTENT] = [
            *contents,
            *trees.values(),
            *_contents([local_part(tensor) for tensor in declared.values()]),
            *_contents([local for local, _ in replicas.values()], turn),
        ]
        self._table[:, _CLASS] = [
            *(classes.get(name, EVERY) for name in names),
            *(kind for _, kind in replicas.values()),
        ]

    @property
    def signatures(self) -> dict[int, bytes]:
        """Return, for each fingerprint class that this rank sends, a signature of the class's keys and contents."""
        rows = self._table[np.lexsort((self._table[:, _NAME], self._table[:, _CLASS]))]
        kinds, starts = np.unique(rows[:, _CLASS], return_index=True)
        parts = np.split(rows, starts)[1:]
        return {EVERY: b""} | {k: signature_of(part.tobytes()) for k, part in zip(kinds.tolist(), parts, strict=True)}

    def to_bytes(self, unequal: Collection[int]) -> bytes:
        """Return the fingerprints that may differ between ranks, as input for `differing`.

        Args:
            unequal: The fingerprint classes whose signatures differ. If such a class contains plain tensors, all plain
                tensors are compared.
        """
        kinds = self._table[:, _CLASS]
        chosen = np.isin(kinds, np.array(list(unequal), "<u8"))
        if not all(map(_is_by_mesh, unequal)):
            chosen |= kinds % 2 == 0
        return self._table[chosen].tobytes()

    def differing(self, tables: Sequence[bytes]) -> tuple[dict[str, int], bool, dict[int, int]]:
        """Compare the ranks' fingerprints. Returns three values:

        - {key: lowest rank that has the key}, for each key of this rank whose contents differ between ranks;
        - whether any rank has such a key;
        - {digest of the name: fingerprint class}, for each plain tensor of any rank.

        Args:
            tables: The results of `to_bytes` on all ranks.
        """
        holders: dict[int, list[int]] = {}
        contents: dict[int, set[int]] = {}
        plain: set[int] = set()
        for rank, table in enumerate(tables):
            for name, content, kind in np.frombuffer(table, "<u8").reshape(-1, 3).tolist():
                holders.setdefault(name, []).append(rank)
                contents.setdefault(name, set()).add(content)
                if not _is_by_mesh(kind):
                    plain.add(name)
        several = {name for name, found in contents.items() if len(found) > 1}
        mine = zip(self.keys, self._table[:, _NAME].tolist(), strict=True)
        keepers = {key: holders[name][0] for key, name in mine if name in several}
        return keepers, bool(several), {name: _class_of_ranks(tuple(holders[name])) for name in plain}


def shared_names(tables: Sequence[bytes]) -> list[int]:
    """Return the digests of all names that DTensors on different meshes share.

    Args:
        tables: `Fingerprints.apart` of each rank.
    """
    rows = np.unique(np.frombuffer(b"".join(tables), "<u8").reshape(-1, 2), axis=0)
    names, counts = np.unique(rows[:, 1], return_counts=True)
    return names[counts > 1].tolist()  # type: ignore[no-any-return]


def unequal_classes(signatures: Sequence[Mapping[int, bytes]]) -> list[int]:
    """Return the fingerprint classes whose signatures differ between ranks.

    Of the classes of replicated DTensors, returns only a few, which are enough for an error message.

    Args:
        signatures: `Fingerprints.signatures` of each rank.
    """
    found: dict[int, set[bytes]] = {}
    for table in signatures:
        for kind, signature in table.items():
            found.setdefault(kind, set()).add(signature)
    unequal = sorted(kind for kind, several in found.items() if len(several) > 1)
    # A few classes give enough names for the error. In a large job, all ranks' tables would be many GB.
    by_mesh = list(filter(_is_by_mesh, unequal))[:_SHOWN]
    return [*(kind for kind in unequal if not _is_by_mesh(kind)), *by_mesh]


@lru_cache(maxsize=1 << 12)
def _class_of_ranks(ranks: tuple[int, ...]) -> int:
    return (digest_of(str(ranks).encode()) | 3) - 1  # even, and not EVERY


def _is_by_mesh(kind: int) -> bool:
    return kind % 2 == 1


@lru_cache(maxsize=1 << 10)
def _class_by_mesh(layout: ShardLayout, rank: int) -> int:
    """Return the fingerprint class (see `Fingerprints`) of a DTensor with the given layout.

    Returns 0 if no other rank has a copy of this rank's part.
    """
    same = holders_of(layout, rank)
    return _class_of_ranks(tuple(sorted(same))) + 1 if len(same) > 1 else 0  # odd


@lru_cache(maxsize=1 << 16)
def _name_digest(key: str, dtype: torch.dtype | None = None, shape: Sequence[int] = ()) -> int:
    return digest_of(f"{key} {dtype} {tuple(shape)}".encode("utf-8", "surrogatepass"))


def _parts(taken: CapturedOptimizer) -> dict[str, Any]:
    """Return, by key, those values of an optimizer that the ranks compare.

    These are parts of the optimizer's JSON, and the names of the states that are not DTensors.
    """
    from torch.distributed.tensor import DTensor

    names = [f"{fqn}.{state}" for (fqn, state), tensor in taken.tensors.items() if not isinstance(tensor, DTensor)]
    return {**{part: taken.tree[part] for part in _PARTS}, _NAMES: names}


def part_ways(captured: Captured, keepers: Mapping[str, int], rank: int) -> None:
    """Rename tensors that differ between ranks: one rank's copy keeps the shared key, all other copies get new keys.

    The new keys contain the rank. Optimizer values that differ are saved for every rank. If a tensor in `extra` belongs
    to no module, only one rank's copy is saved. To save all copies, users wrap the object in `PerRank`.

    Args:
        keepers: For each of this rank's keys that differs between ranks: the rank whose copy keeps the shared key.
    """
    from torch.distributed.tensor import DTensor

    # Every rank saves this dict, even if it is empty, because a load counts these dicts to get the number of ranks.
    own = captured.rank_objects.setdefault(f"{PER_RANK}.{rank}", {})
    for section, taken in captured.optimizers.items():
        taken.tree.setdefault("own", {"layouts": layouts(taken.cut), "states": []})
        own[f"{section}.{_PLACES}"] = places(taken.cut, this_rank())
        for part, tree in _parts(taken).items():
            if (key := f"{section}.{part}") in keepers:
                own[key] = tree if part == _NAMES else {_BOUND: tree}
                if part == "values" and keepers[key] != rank:
                    taken.tree[part] = {}  # SHARDED also writes these for torch, so only one rank keeps them
    bound = _bound(captured)
    for key, same, holder, name in list(captured.places()):
        if same not in keepers or isinstance(holder[name], DTensor):  # declared as a shard since an earlier save
            continue
        if keepers[same] != rank:
            if holder is not captured.loose or key in bound or captured.is_in_module(key):
                mine = f"{PER_RANK}.{rank}.{same}"
                own[key] = {_BOUND: {"$ref": mine}} if key in bound else {"$ref": mine}
                captured.loose[mine] = holder[name]
                captured.own.add(mine)
            del holder[name]
        elif key in bound:
            own[key] = {_BOUND: {"$ref": key}}


def _bound(captured: Captured) -> set[str]:
    """Return the keys of plain optimizer states that may have been computed from this rank's parameter shards."""
    found: set[str] = set()
    for section, taken in captured.optimizers.items():
        found.update(taken.loose)
        found.update(f"{section}.state.{fqn}.{state}" for fqn, state in taken.tensors if fqn in taken.cut)
    return found


def refuse_unlike(keys: Collection[str], captured: Captured) -> None:
    """Raise SaveError if plain parameters, or copies of the same part of a sharded tensor, differ between ranks.

    Saving them would be wrong: a load on a different mesh would give all ranks the values of one rank, and an export
    would contain only the values of one rank.
    """
    from torch.distributed.tensor import DTensor

    unlike = sorted(captured.declared.intersection(keys))
    if unlike:
        raise SaveError(
            f"the values of {first_few(unlike)} differ between ranks that have the same part according to "
            "TrainState(layout=...), so only one rank's values would be saved. If these ranks have different parts "
            "(experts), declare a Shard over their mesh, too; if they should agree, broadcast the values."
        )
    unlike = sorted(key for key, tensor in captured.tensors(aliases=False) if key in keys and type(tensor) is DTensor)
    if unlike:
        raise SaveError(
            f"the values of {first_few(unlike)} differ between ranks that have replicas of the same DTensor, so only "
            "one rank's values would be saved. Replicas diverge if ranks initialize or update them differently: "
            "broadcast the values after initialization, and reduce the gradients over the replicas. If these ranks "
            "have different parts (experts), declare it: TrainState(layout={'*.experts.*': ckptkit.Shard(0, "
            "mesh=ep)}). If one replica is enough, because they differ only by rounding: layout={'NAME': "
            "'any_replica'}. A buffer that each rank computes from its own data must be a plain tensor, not a DTensor: "
            "then each rank's values are saved. In extra, wrap plain tensors that differ in ckptkit.PerRank."
        )
    unlike = sorted(captured.alike.intersection(keys))
    if unlike:
        raise SaveError(
            f"plain (unsharded) parameters differ between ranks: {first_few(unlike)}. If each rank has a part of a "
            "larger tensor (experts), declare it: TrainState(layout={'*.experts.*': ckptkit.Shard(0, mesh=ep)}). If "
            "the ranks should agree, broadcast the values after initialization. If each rank is to keep its own: "
            "layout={'NAME': 'per_rank'}."
        )


def warn_of(keys: Collection[str], captured: Captured) -> None:
    """Log which keys differ between ranks, and how they are saved."""
    names = {f"{section}.{_NAMES}" for section in captured.optimizers}
    bound = _bound(captured) | {f"{section}.{part}" for section in captured.optimizers for part in _PARTS}
    keys = set(keys) - names
    own = sorted(keys & bound)
    extra = sorted(key for key in keys if key in captured.loose and key not in bound and not captured.is_in_module(key))
    other = sorted(keys - {*own, *extra})
    texts = {
        "The values of %s differ between ranks; one rank's values are saved. To save all, use ckptkit.PerRank.": extra,
        "The values of %s differ between ranks: each rank's own values are saved. They load only on the same number of "
        "ranks with the same shards.": own,
        "Unsharded tensors differ between ranks (%s): each rank's own values are saved, and restored on the "
        "same number of ranks. On a different number of ranks, all get one rank's values.": other,
    }
    for text, found in texts.items():
        if found:
            _log.warning(text, first_few(found))


@dataclass(frozen=True, slots=True)
class OwnCopies:
    """A checkpoint as one rank loads it. Where the ranks had different values at the save, it contains this rank's own.

    Attributes:
        note: If the number of ranks has changed, a message that lists the tensors that differed between ranks, and of
            which all ranks now get one rank's values. Otherwise "".
    """

    catalog: Catalog
    objects: dict[str, Any]
    note: str = ""
    bound: list[str] = field(default_factory=list)  # keys of optimizer states whose values differ between ranks
    ranks: int = 0  # how many ranks saved their own values
    mine: set[tuple[str, str]] = field(default_factory=set)  # optimizer and FQN of parameters with values of this rank
    others: set[tuple[str, str]] = field(default_factory=set)  # the same, for parameters that only other ranks had
    places: dict[str, Any] = field(default_factory=dict)  # by optimizer: `places` of the rank that saved the values
    fits: bool = True  # whether the number of ranks is the same as at the save


def own_copies(catalog: Catalog, objects: Mapping[str, Any], *, rank: int, world_size: int) -> OwnCopies:
    """Return the checkpoint as `rank` loads it: values that differed between ranks at the save are those of `rank`."""
    saved = {name.partition(".")[2]: tree for name, tree in objects.items() if name.startswith(f"{PER_RANK}.")}
    for name, tree in saved.items():
        if not isinstance(tree, dict) or any(key not in catalog.tensors for key in references(tree)):
            raise CorruptCheckpointError(
                f"objects.json: the value of '{PER_RANK}.{name}' is not a table of existing tensors."
            )
    if not saved:
        return OwnCopies(catalog, dict(objects))
    bound_keys = sorted({key for tree in saved.values() for key, value in tree.items() if _is_bound(value)})
    bound = {key: [tree.get(key) for tree in saved.values()] for key in bound_keys}
    keys = sorted({key for tree in saved.values() for key in tree if key in catalog.tensors} - bound.keys())
    names = [key if key in catalog.tensors else name for key in bound for name in _unlike(key, bound[key])]
    found = OwnCopies(catalog, dict(objects), bound=list(dict.fromkeys(names)), ranks=len(saved))
    if set(saved) != {str(number) for number in range(world_size)}:
        note = (
            f"{first_few(keys)} differed between the {len(saved)} ranks that saved them; with "
            f"{counted(world_size, 'rank')} now, all get one rank's values"
        )
        return replace(found, note=note if keys else "", fits=False)
    found.mine.update(_parameters(saved[str(rank)]))
    found.others.update({one for tree in saved.values() for one in _parameters(tree)} - found.mine)
    ending = f".{_PLACES}"
    found.places.update({k.removesuffix(ending): v for k, v in saved[str(rank)].items() if k.endswith(ending)})
    tensors = dict(catalog.tensors)
    for key, mine in saved[str(rank)].items():  # forget the plain states that only other ranks saved
        if key.endswith(f".{_NAMES}") and isinstance(mine, list):
            for name in {name for other in saved.values() for name in other.get(key, ())} - set(mine):
                tensors.pop(f"{key.removesuffix(_NAMES)}state.{name}", None)
    for key, value in saved[str(rank)].items():
        tree = value[_BOUND] if _is_bound(value) else value
        here = catalog.tensors.get(key)
        section, _, part = key.rpartition(".")
        if here is not None:  # if names are tied, a format may store only one of them
            for own in references(tree):
                tensors[key] = replace(catalog.tensors[own], name=key, role=here.role, fqn=here.fqn, state=here.state)
        elif part in _PARTS and isinstance(objects.get(section), dict):
            found.objects[section] = {**found.objects[section], part: tree}
    return replace(found, catalog=Catalog(tensors, catalog.objects, catalog.info))


def _parameters(saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (optimizer, FQN) of each parameter whose optimizer states the rank saved as its own."""
    for key, value in saved.items():
        section, _, state = key.partition(".state.")
        if _is_bound(value) and state:
            yield section, state.rpartition(".")[0]
        elif _is_bound(value) and key.endswith(".values") and isinstance(value[_BOUND], dict):
            yield from ((key.removesuffix(".values"), fqn) for fqn in value[_BOUND])


def _unlike(name: str, trees: Sequence[Any]) -> list[str]:
    """Return the paths under `name` at which the ranks' values differ."""
    trees = [tree[_BOUND] if _is_bound(tree) else tree for tree in trees]
    first = trees[0]
    if all(tree == first for tree in trees):
        return []
    if all(isinstance(tree, dict) for tree in trees):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return [path for key in keys for path in _unlike(f"{name}.{key}", [tree.get(key) for tree in trees])]
    if all(isinstance(tree, list) and len(tree) == len(first) for tree in trees):
        return [path for i in range(len(first)) for path in _unlike(f"{name}.{i}", [tree[i] for tree in trees])]
    return [name]


def _is_bound(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_BOUND}


# --- fingerprints of contents


def _contents(tensors: Sequence[torch.Tensor], turn: int | None = None) -> Iterator[int]:
    """Yield a 64-bit fingerprint of each tensor's contents.

    Args:
        turn: Hash only every 16th block of a large tensor on the host, from block `turn` % 16 on. None: hash all.
    """
    import torch

    # Process small contiguous host tensors of equal shape and dtype together, such as step counts.
    joined_dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
    kinds: dict[Any, list[int]] = {}
    away: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            if not tensor.is_cpu:
                away[index] = _summary(_bytes_of(tensor))
            elif 0 < tensor.numel() <= _SAMPLE and tensor.is_contiguous() and tensor.dtype in joined_dtypes:
                kinds.setdefault((tensor.dtype, tensor.shape), []).append(index)
        known: dict[int, int] = {}
        for rows in kinds.values():
            chosen = [tensors[index] for index in rows]
            if len(rows) > 1 and not any(map(torch.Tensor.is_neg, chosen)):
                joined = torch.stack(chosen).view(len(rows), -1).view(torch.uint8).numpy()
                known.update(zip(rows, map(digest_of, joined), strict=True))
        if len({row.device for row in away.values()}) == 1:
            # Copy all tensors on a device together, so that it is synchronized only once.
            sizes = [summary.numel() for summary in away.values()]
            away = dict(zip(away, torch.split(torch.cat(list(away.values())).cpu(), sizes), strict=True))
        for index, tensor in enumerate(tensors):
            if index in known:
                yield known[index]
                continue
            host = away[index].cpu() if index in away else _bytes_of(tensor)
            if turn is not None and host.numel() > _BLOCK * _TURNS:
                yield hash_of(_sampled(host, turn))
                continue
            yield digest_of(host.numpy().data) if host.numel() else 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a flat tensor, in memory order. Does not copy a dense tensor."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return row_major(tensor.permute(dims).reshape(-1)).view(torch.uint8)  # copies a tensor with gaps, like a column


def _sampled(row: torch.Tensor, turn: int) -> Iterator[Any]:
    """Yield every 16th block of the bytes in `row`, starting with block number `turn` % 16."""
    data = row.numpy()
    for start in range(turn % _TURNS * _BLOCK, len(data), _TURNS * _BLOCK):
        yield data[start : start + _BLOCK]


def _summary(row: torch.Tensor) -> torch.Tensor:
    import torch

    if row.numel() <= 3 * _SAMPLE:
        return row
    words = row[: row.numel() // 8 * 8]
    words = words.clone() if words.storage_offset() % 8 else words
    middle = row.numel() // 2
    total = torch.hash_tensor(words.view(torch.int64)).reshape(1).view(torch.uint8)
    return torch.cat([total, row[:_SAMPLE], row[middle : middle + _SAMPLE], row[-_SAMPLE:]])
