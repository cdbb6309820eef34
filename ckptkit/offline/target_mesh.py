"""Which box of a tensor each rank of another mesh will hold: FSDP2's rule, over tensor parallelism, with replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ckptkit.catalog.box import Box, chunk_box
from ckptkit.errors import UsageError
from ckptkit.offline.rank_files import RankBoxes

__all__ = ["Cut", "TargetMesh", "cut_of_placements"]

_NAMES = ("replicate", "shard", "tp")
_ALIASES = {"dp_replicate": "replicate", "ddp": "replicate", "dp": "shard", "fsdp": "shard", "dp_shard": "shard"}
_TP_NAMES = frozenset({"tp", "tensor", "tensor_parallel", "model", "mp"})


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut: along which dimension by FSDP, and by tensor parallelism; None where it is not.

    `Cut(None, None)` is a tensor that every rank holds whole.
    """

    fsdp: int | None = 0
    tp: int | None = None


@dataclass(frozen=True, slots=True)
class TargetMesh:
    """The mesh of the new job: replicate x shard x tp, the last innermost, as DeviceMesh numbers its ranks."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str | Mapping[str, int] | None, *, world_size: int) -> TargetMesh:
        """Return the mesh that `text` names ("replicate=2,shard=4,tp=2"); all ranks shard where it is None.

        A size that is left out is 1, "shard" is what the others leave.

        Raises:
            UsageError: A name is unknown, a size is no positive number, or the product is not `world_size`.
        """
        if world_size < 1:
            raise UsageError(f"world size {world_size}: there must be a rank at least.")
        sizes = _sizes(text)
        if "shard" not in sizes:
            rest = sizes.get("replicate", 1) * sizes.get("tp", 1)
            if world_size % rest:
                raise UsageError(f"mesh {text}: {rest} ranks a shard do not divide the world size {world_size}.")
            sizes["shard"] = world_size // rest
        mesh = cls(**sizes)
        if mesh.size != world_size:
            shown = " x ".join(f"{name}={getattr(mesh, name)}" for name in _NAMES)
            raise UsageError(f"mesh {shown} has {mesh.size} ranks, but the world size is {world_size}.")
        return mesh

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.tp

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions as the new job's DeviceMesh has them: those of size 1 are left out, unless it is the only
        one."""
        found = {name: getattr(self, name) for name in _NAMES if getattr(self, name) > 1}
        return found or {"shard": 1}

    def rank(self, replica: int, shard: int, tp: int) -> int:
        return (replica * self.shard + shard) * self.tp + tp

    def boxes(self, shape: tuple[int, ...], cut: Cut) -> RankBoxes:
        """Return which rank stores which box: each once, by the first replica that holds it, empty ones left out.

        FSDP2 cuts what tensor parallelism left to a rank, both by the rule of torch.chunk. Cut by both along one
        dimension, a rank's part is the shard-th chunk of the tp-th chunk.
        """
        rows: dict[Box, int] = {}
        for tp in range(self.tp):
            part = Box.whole(shape) if cut.tp is None else chunk_box(shape, cut.tp, self.tp, tp)
            for shard in range(self.shard):
                box = part if cut.fsdp is None else _within(part, cut.fsdp, self.shard, shard)
                if box.numel:
                    rows.setdefault(box, self.rank(0, shard, tp))
        if not rows:  # nothing in it: one empty slice, so that the tensor is there
            rows[Box((0,) * len(shape), shape)] = 0
        n, ndim = len(rows), len(shape)
        return RankBoxes(
            np.array(list(rows.values()), np.int64),
            np.array([box.offsets for box in rows], np.int64).reshape(n, ndim),
            np.array([box.sizes for box in rows], np.int64).reshape(n, ndim),
        )

    def placements(self, cut: Cut) -> tuple[str, ...]:
        """Return the placement on each dimension of `dims`, in the texts of the manifest."""
        texts = []
        for name in self.dims:
            dim = {"replicate": None, "shard": cut.fsdp, "tp": cut.tp}[name]
            strided = name == "shard" and dim is not None and dim == cut.tp and self.tp > 1
            texts.append("R" if dim is None else f"SS({dim},{self.tp})" if strided else f"S({dim})")
        return tuple(texts)


def _sizes(text: str | Mapping[str, int] | None) -> dict[str, int]:
    if text is None:
        return {}
    if isinstance(text, str):
        pairs = [item.partition("=")[::2] for item in text.split(",") if item]
    else:
        pairs = [(name, str(size)) for name, size in text.items()]
    sizes: dict[str, int] = {}
    for given, size in pairs:
        name = _ALIASES.get(given.strip(), given.strip())
        if name not in _NAMES or name in sizes:
            raise UsageError(
                f"mesh {text!r}: {given!r} is no dimension, or is there twice. Known: {', '.join(_NAMES)}."
            )
        if not size.strip().isdigit() or int(size) < 1:
            raise UsageError(f"mesh {text!r}: the size of {given!r} is {size!r}, expected a number from 1 on.")
        sizes[name] = int(size)
    return sizes


def _within(part: Box, dim: int, parts: int, index: int) -> Box:
    inner = chunk_box(part.sizes, dim, parts, index)
    return Box(tuple(a + b for a, b in zip(part.offsets, inner.offsets, strict=True)), inner.sizes)


def cut_of_placements(names: tuple[str, ...], texts: tuple[str, ...]) -> Cut:
    """Return how a tensor with these placements on a mesh with these dimension names is cut.

    A dimension called "tp" (or a synonym) is tensor parallelism; any other that shards is FSDP's.
    """
    fsdp: int | None = None
    tp: int | None = None
    for name, text in zip(names, texts, strict=True):
        if not text.startswith(("S(", "SS(")):
            continue
        dim = int(text[text.index("(") + 1 : -1].split(",")[0])
        if name in _TP_NAMES:
            tp = dim
        else:
            fsdp = dim
    return Cut(fsdp, tp)
