"""How each tensor of a source will be cut over the ranks of the new job: as it was, or as FSDP2 and a plan say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.errors import UsageError
from ckptkit.formats.manifest import MESHES, PLACEMENTS
from ckptkit.offline.target_mesh import Cut, TargetMesh, cut_of_placements
from ckptkit.offline.tp_plan import TPPlan

__all__ = ["Cuts"]

_WHOLE = Cut(None)


class Cuts:
    """The cut of every tensor of a catalog on a mesh.

    Where the source recorded placements, what was sharded stays so, along the same dimension. Else parameters are cut
    along dimension 0, as FSDP2 does. Optimizer state goes with its parameter where it has its shape, and is whole on
    every rank where not, as a training job holds it.

    Args:
        tp_plan: What tensor parallelism cuts; None takes it from the source's placements, or from a config beside it.

    Raises:
        UsageError: The mesh has a tp dimension, and nothing tells what it cuts.
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
            # A run of one rank, or without FSDP: what trains will be sharded by the new one.
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
        """Return the cut of one of the catalog's tensors."""
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
        """The cut that was recorded, or FSDP2's; a tensor that lay in one piece while others did not stays whole: a
        buffer. (One row is one piece in any case.)"""
        if not entry.shape:
            return _WHOLE
        if self._placements is not None and self._meshes is not None:
            placed = self._placements.get(entry.name)
            if placed is None:
                return _WHOLE
            return cut_of_placements(tuple(self._meshes[placed[0]]["names"]), tuple(placed[1]))
        if dtype_of(entry.dtype).kind != "float" and entry.dtype != "uint8":  # quantized weights are uint8
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
            return cuts  # the source was tensor parallel itself
        else:
            config = catalog.info.extra.get("config")
            plan = TPPlan.of_config(config if isinstance(config, Mapping) else None, names)
            if plan is None:
                raise UsageError(
                    f"the mesh has tp={self._mesh.tp}, but the source was not tensor parallel and its names don't tell "
                    "what to cut. Give --tp-plan FILE, JSON of globs and dimensions: "
                    '{"*.q_proj.weight": 0, "*.o_proj.weight": 1}.'
                )
            if isinstance(config, Mapping) and config.get("tie_word_embeddings"):
                plan = plan.without(["lm_head.weight"])
            count = sum(plan.dim(entry.fqn, entry.shape) is not None for entry in weights.values())
            self.notes.append(f"tensor parallelism cuts {count} parameters by {plan.origin}; --tp-plan gives another")
        dims = {name: plan.dim(entry.fqn, entry.shape) for name, entry in weights.items()}
        modules = {weights[name].fqn.rpartition(".")[0] for name, dim in dims.items() if dim is not None}
        return {
            name: replace(cut, tp=dims[name], also=_also(cut, dims[name], weights[name].fqn, modules))
            for name, cut in cuts.items()
        }


def _also(cut: Cut, dim: int | None, fqn: str, modules: set[str]) -> tuple[str, ...]:
    """What else the parameter is a DTensor over: torch's styles take all parameters of a module, so that the bias
    beside a weight that is cut by rows is a replica over tp, not a plain tensor."""
    kept = tuple(kind for kind in cut.also if kind != "tp")
    return (*kept, "tp") if dim is None and fqn.rpartition(".")[0] in modules else kept
