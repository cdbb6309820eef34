"""Computes which box of a tensor each rank of a new mesh stores: FSDP2 sharding, tensor parallelism, replicas."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.arguments import check_int, wrong
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.errors import UsageError
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS

Int64 = npt.NDArray[np.int64]

_NAMES = ("replicate", "shard", "tp")
_ALIASES = {
    **dict.fromkeys(("replicate", "dp_replicate", "ddp", "hsdp_replicate", "inter", "replica"), "replicate"),
    **dict.fromkeys(("shard", "dp_shard", "fsdp", "dp", "dp_shard_cp", "hsdp_shard", "intra", "data"), "shard"),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "model", "mp"), "tp"),
}


@dataclass(frozen=True, slots=True)
class RankBoxes:
    """The rank that stores each box of a tensor.

    Boxes do not repeat. Only a tensor without elements has an empty box.

    Attributes:
        ranks: [n] the rank that stores each box.
        offsets, sizes: [n, ndim] the boxes, in elements.
    """

    ranks: Int64
    offsets: Int64
    sizes: Int64


@dataclass(frozen=True, slots=True)
class Cut:
    """The sharding of a tensor: the dimensions that FSDP and tensor parallelism split, or None.

    Attributes:
        also: Contains "shard" or "tp" if the tensor is a DTensor that is replicated over this mesh dimension. Such an
            entry changes no bytes, but a LOCAL checkpoint only loads into a job with the same placements.
    """

    fsdp: int | None = 0
    tp: int | None = None
    also: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return self.fsdp is None and self.tp is None

    def on(self, kind: str) -> bool:
        """Return whether the tensor is a DTensor over the mesh dimension `kind`: "replicate", "shard" or "tp".

        A DTensor over "shard" is also a DTensor over "replicate", as in HSDP.
        """
        kind = "tp" if kind == "tp" else "shard"
        return (self.tp if kind == "tp" else self.fsdp) is not None or kind in self.also


@dataclass(frozen=True, slots=True)
class TargetMesh:
    """The mesh of the new job: replicate x shard x tp. As in a DeviceMesh, the last dimension is innermost.

    Attributes:
        labels: The dimensions that the user named, as (kind, given name): ("shard", "fsdp"). A named dimension exists
            even if its size is 1.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str | Mapping[str, int] | None, *, world_size: int) -> TargetMesh:
        """Return the mesh that `text` describes ("replicate=2,shard=4,tp=2"). None shards over all ranks.

        A size that is omitted is 1. But if the size of "shard" is omitted, it is computed from `world_size`. Whatever
        the order in `text`, replicas are outermost and tensor parallelism is innermost, as FSDP2 requires.

        Raises:
            UsageError: A name is unknown, a size is not a positive number, or the product is not `world_size`.
        """
        check_int("world_size", world_size, least=1)
        sizes, labels = _sizes(text)
        if "shard" not in sizes:
            rest = sizes.get("replicate", 1) * sizes.get("tp", 1)
            if world_size % rest:
                raise UsageError(f"mesh {text}: {rest} ranks per shard do not divide the world size {world_size}.")
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
        """The dimensions of the new job's DeviceMesh.

        These are all dimensions that were named or are larger than 1. If there are none, "shard" is the only dimension.
        """
        named = dict(self.labels)
        return tuple(name for name in _NAMES if getattr(self, name) > 1 or name in named) or ("shard",)

    def describe(self, kinds: Sequence[str] | None = None) -> dict[str, Any]:
        """Return {"shape", "names", "ranks"} for the mesh, or for rank 0's submesh with only the dimensions `kinds`."""
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
        """Return which rank stores which box of a tensor. Each box is stored once, and empty boxes are omitted.

        Tensor parallelism splits the tensor first, and then FSDP2 splits each tensor-parallel shard. Both split like
        torch.chunk. A tensor without elements gets one empty box, so that the checkpoint contains the tensor.

        Args:
            turn: Index of the replica that stores the tensor, modulo the number of replicas. If the index is 0 for all
                tensors, each rank of the first replica finds its whole state in its own file.
        """
        return _boxes(self, tuple(shape), cut.fsdp, cut.tp, turn % self.replicas(cut))

    def replicas(self, cut: Cut) -> int:
        """Return how many ranks hold each element."""
        return self.replicate * (self.shard if cut.fsdp is None else 1) * (self.tp if cut.tp is None else 1)

    def placement(self, cut: Cut) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the mesh dimensions of a DTensor with the sharding `cut`, and the placement on each dimension.

        Placements are in the manifest's notation. Returns None for a plain tensor. A parameter that tensor parallelism
        does not distribute has no placement on the tp dimension.
        """
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
    """Narrow each box (one per row) along `dim` to one of `parts` chunks. `index` says to which one.

    A chunk has ceil(n / parts) elements. The last chunks may be shorter or empty.
    """
    total = sizes[:, dim].copy()
    length = -(-total // parts)
    first = np.minimum(index * length, total)
    offsets[:, dim] += first
    sizes[:, dim] = np.minimum(length, total - first)


def _sizes(text: str | Mapping[str, int] | None) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    if text is None:
        return {}, ()
    if not isinstance(text, (str, Mapping)):
        raise wrong("mesh", text, "sizes by name, such as 'replicate=2,shard=4' or {'shard': 4, 'tp': 2}")
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
            raise UsageError(f"mesh {text!r}: {given!r} is unknown or given twice. Known: {', '.join(_NAMES)}.")
        if not size.strip().isdecimal() or int(size) < 1:
            raise UsageError(f"mesh {text!r}: the size of {given!r} is {size!r}, expected an integer of at least 1.")
        sizes[name] = int(size)
        labels[name] = label
    return sizes, tuple(labels.items())


def cut_of_placements(names: Sequence[str], texts: Sequence[str]) -> Cut:
    """Return the sharding (`Cut`) of a tensor with the placements `texts` on the mesh dimensions `names`.

    A dimension named "tp" or a synonym means tensor parallelism, and "shard" or a synonym means FSDP. For all other
    names ("dim0"), the order decides, because FSDP2 keeps tensor parallelism innermost. The first shard and all strided
    shards belong to FSDP, and the second shard belongs to tensor parallelism.
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


# --- the dimension along which tensor parallelism splits each parameter


_COLUMN, _ROW = 0, 1
# This follows transformers' plans for these families. The q, k, v, gate and up projections are split by outputs, the o
# and down projections by inputs, and the LM head by vocabulary. Embeddings and norms are not split.
_LLAMA: dict[str, int | None] = {
    **{f"*.self_attn.{name}_proj.{kind}": _COLUMN for name in "qkv" for kind in ("weight", "bias")},
    "*.self_attn.o_proj.weight": _ROW,
    **{f"*.mlp.{name}_proj.weight": _COLUMN for name in ("gate", "up")},
    "*.mlp.down_proj.weight": _ROW,
    "lm_head.weight": _COLUMN,
}
_FAMILY = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo", "olmo2", "smollm3", "cohere"))


@dataclass(frozen=True, slots=True)
class TPPlan:
    """The dimension along which tensor parallelism splits each parameter.

    Attributes:
        rules: Maps a glob of parameter names to the dimension to split. None means that these parameters are not split.
            The last matching glob applies.
        origin: The source of the plan, for messages.
    """

    rules: Mapping[str, int | None]
    origin: str = "tp_plan"

    @classmethod
    def of(cls, given: str | Mapping[str, int | None]) -> TPPlan:
        """Return the plan that `given` contains: the path of a JSON file, or a mapping.

        Raises:
            UsageError: `given` does not map globs to dimensions, or the file cannot be read.
        """
        origin = given if isinstance(given, str) else "tp_plan"
        rules: Any = given
        if isinstance(given, str):
            try:
                rules = json.loads(Path(given).read_text("utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise UsageError(f"--tp-plan {origin}: not readable as JSON: {error}.") from error
        good = isinstance(rules, Mapping) and all(
            isinstance(glob, str) and (dim is None or (type(dim) is int and 0 <= dim < 8))
            for glob, dim in rules.items()
        )
        if not good or not rules:
            raise UsageError(
                f"{origin}: expected globs of parameter names, each with the dimension to split, for example "
                '{"*.q_proj.weight": 0, "*.o_proj.weight": 1}; null leaves a parameter whole.'
            )
        return cls(dict(rules), origin)

    @classmethod
    def of_config(cls, config: Mapping[str, Any] | None, names: Iterable[str]) -> TPPlan | None:
        """Return the plan for the model family in a transformers config.

        Returns None if the family is unknown, or if the parameters do not have this family's names.
        """
        if config is None or str(config.get("model_type")) not in _FAMILY:
            return None
        plan = cls(_LLAMA, f"the plan of {config['model_type']}")
        return plan if any(name.endswith(".self_attn.q_proj.weight") for name in names) else None

    def without(self, names: Iterable[str]) -> TPPlan:
        """Return a plan that does not split the parameters `names`. Used for tied weights: a split would untie them."""
        return TPPlan({**self.rules, **dict.fromkeys(names)}, self.origin)

    def dim(self, fqn: str, shape: tuple[int, ...]) -> int | None:
        """Return the dimension along which a parameter is split. Returns None if the parameter is not split.

        Raises:
            UsageError: The parameter has no such dimension.
        """
        found = None
        for glob, dim in self.rules.items():
            if fnmatch.fnmatchcase(fqn, glob):
                found = dim
        if found is not None and found >= len(shape):
            raise UsageError(f"{self.origin} splits {fqn!r} along dimension {found}, but its shape is {list(shape)}.")
        return found

    def check_used(self, names: Iterable[str]) -> None:
        """Raise UsageError if any glob in the user's plan matches no parameter, because that is probably a typo."""
        known = list(names)
        idle = [glob for glob in self.rules if not any(fnmatch.fnmatchcase(name, glob) for name in known)]
        if idle:
            raise UsageError(
                f"{self.origin}: {', '.join(map(repr, idle[:4]))} matches no parameter. The source contains "
                f"{known[0]!r} and {len(known) - 1} more."
            )


# --- each source tensor's sharding on the new mesh: as recorded, or by FSDP2's rule and a plan


_WHOLE = Cut(None)


class Cuts:
    """The sharding that each tensor of a catalog gets on a new mesh.

    If the source recorded placements, sharded tensors stay sharded along the same dimension. If the source recorded no
    placements, parameters are split along dimension 0, as in FSDP2. An optimizer state that has its parameter's shape
    is split like the parameter. All other optimizer states are on every rank, as in a training job.

    Args:
        tp_plan: The dimensions that tensor parallelism splits. None uses the source's placements or config.json.

    Raises:
        UsageError: The mesh has a tp dimension, and neither `tp_plan` nor the source says which tensors to split. Also
            raised if `tp_plan` is given although the mesh has no tp dimension.
    """

    def __init__(self, catalog: Catalog, mesh: TargetMesh, *, tp_plan: TPPlan | None = None) -> None:
        self._mesh = mesh
        extra = catalog.info.extra
        self._meshes: Any = extra.get(MESHES)
        self._placements: Any = extra.get(PLACEMENTS)
        weights = {name: entry for name, entry in catalog.tensors.items() if entry.role is Role.MODEL}
        self._shared = any(len(entry.slices) > 1 for entry in weights.values())
        cuts = {name: self._own(entry) for name, entry in weights.items()}
        self.notes: list[str] = []
        if not any(cut.fsdp is not None for cut in cuts.values()):
            # The source was not sharded, but in the new job FSDP2 shards all float parameters.
            cuts = {
                name: replace(cut, fsdp=0, also=tuple(kind for kind in cut.also if kind != "shard"))
                if weights[name].shape and dtype_of(weights[name].dtype).kind == "float"
                else cut
                for name, cut in cuts.items()
            }
        if mesh.tp > 1:
            cuts = self._split(catalog, weights, cuts, tp_plan)
        elif tp_plan is not None:
            raise UsageError(f"{tp_plan.origin} is given, but the mesh has no tp dimension.")
        self._cuts = cuts
        self._by_fqn = {weights[name].fqn: (weights[name].shape, cut) for name, cut in cuts.items()}

    def of(self, entry: TensorEntry) -> Cut:
        """Return the sharding of a tensor in the catalog on the new mesh."""
        known = self._cuts.get(entry.name)
        if known is not None:
            return known
        if entry.role in (Role.OPTIMIZER, Role.MASTER) and entry.fqn in self._by_fqn:
            shape, cut = self._by_fqn[entry.fqn]
            return cut if shape == entry.shape and entry.shape else _WHOLE
        own = self._own(entry)
        if entry.role is Role.OTHER and self._placements is None and len(entry.slices) <= 1:
            return _WHOLE
        return own

    def _own(self, entry: TensorEntry) -> Cut:
        """Return the sharding that the source recorded for a tensor.

        If the source recorded no shardings, returns FSDP2's sharding along dimension 0 for floats, and no sharding for
        other tensors. If other weights of the source have several slices, a tensor with a single slice is considered a
        buffer, and is not sharded. This does not apply to a tensor with one row, because FSDP2 stores it as one slice
        even if it is sharded.
        """
        if not entry.shape:
            return _WHOLE
        if self._placements is not None and self._meshes is not None:
            placed = self._placements.get(entry.name)
            if placed is None:
                return _WHOLE
            return cut_of_placements(tuple(self._meshes[placed[0]]["names"]), tuple(placed[1]))
        if dtype_of(entry.dtype).kind != "float" and entry.dtype != "uint8":  # uint8 may be quantized weights
            return _WHOLE
        whole = self._shared and len(entry.slices) <= 1 and entry.shape[0] > 1
        return _WHOLE if whole else Cut(0)

    def _split(
        self, catalog: Catalog, weights: Mapping[str, TensorEntry], cuts: dict[str, Cut], plan: TPPlan | None
    ) -> dict[str, Cut]:
        names = [entry.fqn for entry in weights.values()]
        if plan is not None:
            plan.check_used(names)
        elif any(cut.on("tp") for cut in cuts.values()):
            return cuts  # the source's placements already include tensor parallelism
        else:
            config = catalog.info.extra.get("config")
            plan = TPPlan.of_config(config if isinstance(config, Mapping) else None, names)
            if plan is None:
                raise UsageError(
                    f"the mesh has tp={self._mesh.tp}, but the source is not tensor parallel and its names do not "
                    "show what to split. Give --tp-plan FILE, a JSON object of globs and dimensions: "
                    '{"*.q_proj.weight": 0, "*.o_proj.weight": 1}.'
                )
            if isinstance(config, Mapping) and config.get("tie_word_embeddings"):
                plan = plan.without(["lm_head.weight"])
            count = sum(plan.dim(entry.fqn, entry.shape) is not None for entry in weights.values())
            self.notes.append(
                f"tensor parallelism splits {count} parameters according to {plan.origin}; to change this, "
                "pass --tp-plan"
            )
        dims = {name: plan.dim(entry.fqn, entry.shape) for name, entry in weights.items()}
        modules = {weights[name].fqn.rpartition(".")[0] for name, dim in dims.items() if dim is not None}
        # torch's parallel styles distribute all parameters of a module. So if a module's weight is split by rows, the
        # bias is a DTensor that is replicated over tp, not a plain tensor.
        for name, cut in cuts.items():
            replicated = dims[name] is None and weights[name].fqn.rpartition(".")[0] in modules
            kept = tuple(kind for kind in cut.also if kind != "tp") + ("tp",) * replicated
            cuts[name] = replace(cut, tp=dims[name], also=kept)
        return cuts
