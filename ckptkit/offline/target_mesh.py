"""Which box of a tensor each rank of another mesh will hold: FSDP2's rule, over tensor parallelism, with replicas."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import UsageError
from ckptkit.offline.rank_files import RankBoxes

__all__ = ["Cut", "TargetMesh", "cut_of_placements"]

Int64 = npt.NDArray[np.int64]

_NAMES = ("replicate", "shard", "tp")
_ALIASES = {
    **dict.fromkeys(("replicate", "dp_replicate", "ddp", "hsdp_replicate", "inter", "replica"), "replicate"),
    **dict.fromkeys(("shard", "dp_shard", "fsdp", "dp", "dp_shard_cp", "hsdp_shard", "intra", "data"), "shard"),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "model", "mp"), "tp"),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut: along which dimension by FSDP, and by tensor parallelism; None where it is not.

    Attributes:
        also: "shard" or "tp": where it is no cut, but the job holds a DTensor that is replicated there. It decides
            nothing about bytes; a LOCAL checkpoint loads only where the same is recorded.
    """

    fsdp: int | None = 0
    tp: int | None = None
    also: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it."""
        return self.fsdp is None and self.tp is None

    def on(self, kind: str) -> bool:
        """Whether the tensor is a DTensor over this kind of mesh dimension; FSDP's replicas go with its shards."""
        kind = "tp" if kind == "tp" else "shard"
        return (self.tp if kind == "tp" else self.fsdp) is not None or kind in self.also


@dataclass(frozen=True, slots=True)
class TargetMesh:
    """The mesh of the new job: replicate x shard x tp, the last innermost, as DeviceMesh numbers its ranks.

    Attributes:
        labels: (kind, the name it was given) of the dimensions that were named; they count even with a size of 1.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str | Mapping[str, int] | None, *, world_size: int) -> TargetMesh:
        """Return the mesh that `text` names ("replicate=2,shard=4,tp=2"); all ranks shard where it is None.

        A size that is left out is 1, "shard" is what the others leave. Whatever the order in `text`, replicas are
        outermost and tensor parallelism innermost, as FSDP2 wants them.

        Raises:
            UsageError: A name is unknown, a size is no positive number, or the product is not `world_size`.
        """
        if world_size < 1:
            raise UsageError(f"world size {world_size}: there must be a rank at least.")
        sizes, labels = _sizes(text)
        if "shard" not in sizes:
            rest = sizes.get("replicate", 1) * sizes.get("tp", 1)
            if world_size % rest:
                raise UsageError(f"mesh {text}: {rest} ranks a shard do not divide the world size {world_size}.")
            sizes["shard"] = world_size // rest
        mesh = cls(**sizes, labels=labels)
        if mesh.size != world_size:
            shown = " x ".join(f"{name}={getattr(mesh, name)}" for name in _NAMES)
            raise UsageError(f"mesh {shown} has {mesh.size} ranks, but the world size is {world_size}.")
        return mesh

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.tp

    @property
    def kinds(self) -> tuple[str, ...]:
        """The dimensions as the new job's DeviceMesh has them: those of size 1 are left out, unless they were named
        or there is no other."""
        named = dict(self.labels)
        return tuple(name for name in _NAMES if getattr(self, name) > 1 or name in named) or ("shard",)

    def describe(self, kinds: Sequence[str] | None = None) -> dict[str, Any]:
        """Return {"shape", "names", "ranks"} of the mesh, or of its part with these dimensions that has rank 0."""
        kinds = self.kinds if kinds is None else kinds
        named = dict(self.labels)
        grid = np.arange(self.size).reshape(self.replicate, self.shard, self.tp)
        index = tuple(slice(None) if name in kinds else 0 for name in _NAMES)
        return {
            "shape": [getattr(self, kind) for kind in kinds],
            "names": [named.get(kind, kind) for kind in kinds],
            "ranks": grid[index].reshape(-1).tolist(),
        }

    def boxes(self, shape: tuple[int, ...], cut: Cut, *, turn: int = 0) -> RankBoxes:
        """Return which rank stores which box: each once, empty ones left out.

        FSDP2 cuts what tensor parallelism left to a rank, both by the rule of torch.chunk. Cut by both along one
        dimension, a rank's part is the shard-th chunk of the tp-th chunk. A tensor with no elements has one empty
        box, so that it is there.

        Args:
            turn: Which of the replicas stores it, counted round: 0 is the first, so that the ranks of the first
                replica find all they ask for in their own files.
        """
        return _boxes(self, tuple(shape), cut.fsdp, cut.tp, turn % self.replicas(cut))

    def replicas(self, cut: Cut) -> int:
        """Return how many ranks hold each element."""
        return self.replicate * (self.shard if cut.fsdp is None else 1) * (self.tp if cut.tp is None else 1)

    def placement(self, cut: Cut) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return (mesh dimensions, the placement on each in the texts of the manifest) of a DTensor that is cut so;
        None for a plain tensor. Parameters that tensor parallelism leaves alone lie on the other dimensions only."""
        kinds = tuple(kind for kind in self.kinds if cut.on(kind))
        if not kinds:
            return None
        texts = []
        for kind in kinds:
            dim = {"replicate": None, "shard": cut.fsdp, "tp": cut.tp}[kind]
            strided = kind == "shard" and dim is not None and dim == cut.tp and "tp" in kinds
            texts.append("R" if dim is None else f"SS({dim},{self.tp})" if strided else f"S({dim})")
        return kinds, tuple(texts)


@functools.lru_cache(maxsize=4096)
def _boxes(mesh: TargetMesh, shape: tuple[int, ...], fsdp: int | None, tp: int | None, turn: int) -> RankBoxes:
    ndim = len(shape)
    free = [mesh.replicate, mesh.shard if fsdp is None else 1, mesh.tp if tp is None else 1]
    replica = np.unravel_index(turn, free)
    shards = np.arange(mesh.shard) if fsdp is not None else np.zeros(1, np.int64)
    tps = np.arange(mesh.tp) if tp is not None else np.zeros(1, np.int64)
    shard, part = (grid.reshape(-1) for grid in np.meshgrid(shards, tps, indexing="ij"))
    offsets = np.zeros((len(shard), ndim), np.int64)
    sizes = np.tile(np.array(shape, np.int64), (len(shard), 1))
    if tp is not None:
        _take_chunk(offsets, sizes, tp, mesh.tp, part)
    if fsdp is not None:
        _take_chunk(offsets, sizes, fsdp, mesh.shard, shard)
    ranks = ((replica[0] * mesh.shard + shard + replica[1]) * mesh.tp + part + replica[2]).astype(np.int64)
    kept = np.flatnonzero((sizes > 0).all(axis=1))
    if not len(kept):
        zeros = np.zeros((1, ndim), np.int64)
        return RankBoxes(np.zeros(1, np.int64), zeros, np.array([shape], np.int64).reshape(1, ndim))
    return RankBoxes(ranks[kept], offsets[kept], sizes[kept])


def _take_chunk(offsets: Int64, sizes: Int64, dim: int, parts: int, index: Int64) -> None:
    """Narrow each row to its chunk along `dim`: ceil(n / parts) long, the last ones shorter or empty."""
    total = sizes[:, dim].copy()
    length = -(-total // parts)
    first = np.minimum(index * length, total)
    offsets[:, dim] += first
    sizes[:, dim] = np.minimum(length, total - first)


def _sizes(text: str | Mapping[str, int] | None) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    if text is None:
        return {}, ()
    if isinstance(text, str):
        pairs = [item.partition("=")[::2] for item in text.split(",") if item]
    else:
        pairs = [(name, str(size)) for name, size in text.items()]
    sizes: dict[str, int] = {}
    labels: dict[str, str] = {}
    for given, size in pairs:
        label = given.strip()
        name = _ALIASES.get(label, "")
        if not name or name in sizes:
            raise UsageError(
                f"mesh {text!r}: {given!r} is no dimension, or is there twice. Known: {', '.join(_NAMES)}."
            )
        if not size.strip().isdecimal() or int(size) < 1:
            raise UsageError(f"mesh {text!r}: the size of {given!r} is {size!r}, expected a number from 1 on.")
        sizes[name] = int(size)
        labels[name] = label
    return sizes, tuple(labels.items())


def cut_of_placements(names: Sequence[str], texts: Sequence[str]) -> Cut:
    """Return how a tensor with these placements on a mesh with these dimension names is cut.

    A dimension called "tp" (or a synonym) is tensor parallelism, one whose name says so is FSDP's. Of dimensions
    without a telling name ("dim0"), a strided shard is FSDP's, and so is the first that shards; a second one is
    tensor parallelism, which FSDP2 keeps innermost.
    """
    dims: dict[str, int] = {}
    also: dict[str, None] = {}
    for name, text in zip(names, texts, strict=True):
        kind = _ALIASES.get(name, "")
        if not text.startswith(("S(", "SS(")):
            also["tp" if kind == "tp" else "shard"] = None
            continue
        if not kind:
            kind = "tp" if "shard" in dims and not text.startswith("SS(") else "shard"
        kind = "tp" if kind == "tp" else "shard"
        dims.setdefault(kind, int(text[text.index("(") + 1 : -1].split(",")[0]))
    return Cut(dims.get("shard"), dims.get("tp"), tuple(kind for kind in also if kind not in dims))
