"""Applies tensor-parallel plans, which map module globs to torch's styles or to transformers' style names."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ckptkit.errors import UsageError
from ckptkit.fsdp.units import tied_parameters

logger = logging.getLogger(__name__)
TPPlan = Mapping[str, "ParallelStyle | str"]
"""Maps module globs to torch's ParallelStyles, or to the names of such styles in transformers."""


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: TPPlan | None = None) -> None:
    """Split modules over the ranks of `mesh`, in place. Call this before fully_shard.

    The modules are those that match a glob of `plan` (default: the model's own plan).

    Raises:
        UsageError: There is no plan, a style is unknown, a glob matches no module, or a size does not divide evenly.
    """
    plan = plan if plan is not None else tensor_parallel_plan(model)
    styles = {glob: translate_style(glob, style) for glob, style in plan.items()}
    found: dict[str, ParallelStyle] = {}
    modules = {name: module for name, module in model.named_modules() if name}
    for glob, style in styles.items():
        matched = [name for name in modules if name.count(".") == glob.count(".") and fnmatch.fnmatchcase(name, glob)]
        if not matched:
            raise UsageError(
                f"The tensor-parallel plan names {glob!r}, which matches no module of {type(model).__name__}."
            )
        found.update(dict.fromkeys(matched, style))
    tied = {name.rpartition(".")[0] for group in tied_parameters(model) for name in group}
    for name in sorted(tied & set(found)):
        # Splitting would replace the parameter and so untie it. The result is the same without splitting.
        logger.info("%s has a tied weight: it is not split over the tensor-parallel ranks.", name)
        del found[name]
    for name, style in found.items():
        _check_divides(name, modules[name], style, mesh.size())
    parallelize_module(model, mesh, found)


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle | str]:
    """Return a transformers model's own plan, with globs relative to the root of `model`.

    Raises:
        UsageError: The model has no plan.
    """
    plan: dict[str, ParallelStyle | str] = {}
    config = getattr(model, "config", None)
    inner = getattr(model, "base_model_prefix", "")
    prefix = f"{inner}." if inner and isinstance(getattr(model, inner, None), nn.Module) else ""
    for glob, style in (getattr(config, "base_model_tp_plan", None) or {}).items():
        plan[prefix + glob] = style
    # Read the class attribute: the instance's property also contains the base model's entries.
    plan.update(getattr(type(model), "_tp_plan", None) or {})
    if not plan:
        raise UsageError(
            f"{type(model).__name__} has no tensor-parallel plan, but tp is greater than 1. "
            "Pass a plan: tp_plan={'layers.*.up': ColwiseParallel(), 'layers.*.down': RowwiseParallel()}."
        )
    return plan


def translate_style(glob: str, style: ParallelStyle | str) -> ParallelStyle:
    """Return torch's style for the name `style`. A ParallelStyle is returned unchanged. Errors name the `glob`.

    Raises:
        UsageError: torch has no equivalent style.
    """
    if isinstance(style, ParallelStyle):
        return style
    made: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
        "sequence_parallel": SequenceParallel(),
    }
    if style not in made:
        raise UsageError(
            f"The tensor-parallel plan gives {glob!r} the style {style!r}, which torch does not have. "
            f"Known: {', '.join(made)}. Leave the module out of tp_plan, or give it a ParallelStyle."
        )
    return made[style]


def _check_divides(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2 or not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    is_embedding = isinstance(module, nn.Embedding)
    dim = int(isinstance(style, ColwiseParallel)) if is_embedding else int(isinstance(style, RowwiseParallel))
    if weight.shape[dim] % size:
        raise UsageError(
            f"{name!r} splits dimension {dim} of its weight {list(weight.shape)} over tp={size} ranks, "
            f"but {weight.shape[dim]} is not a multiple of {size}. Choose a tp that divides it, "
            "or leave the module out of tp_plan."
        )
