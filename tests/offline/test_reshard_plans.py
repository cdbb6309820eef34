"""Reshards planned without data: very large world sizes, with proved coverage."""

from collections.abc import Iterator

import numpy as np
import pytest

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role, SliceArray, TensorEntry
from ckptkit.offline.copying.coverage import check_plan
from ckptkit.offline.copying.plan import Plan
from ckptkit.offline.resharding.mesh import TargetMesh
from ckptkit.offline.resharding.plan import Identity, plan_reshard
from ckptkit.offline.resharding.seal import Seal, planned_catalog
from ckptkit.storage import Store, open_store

HIDDEN, INNER, HEADS, WORDS = 8192, 28672, 1024, 128256


def shapes(layers: int = 80) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a llama of 70 billion parameters."""
    yield "model.embed_tokens.weight", (WORDS, HIDDEN)
    for i in range(layers):
        for name, shape in (
            ("self_attn.q_proj", (HIDDEN, HIDDEN)), ("self_attn.k_proj", (HEADS, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, HIDDEN)), ("mlp.up_proj", (INNER, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, INNER)), ("input_layernorm", (HIDDEN,)),
        ):  # fmt: skip
            yield f"model.layers.{i}.{name}.weight", shape
    yield "lm_head.weight", (WORDS, HIDDEN)


def whole(names: Iterator[tuple[str, tuple[int, ...]]]) -> Catalog:
    """Return a source in one piece: bf16 weights, one fp32 moment, and a step."""
    tensors: dict[str, TensorEntry] = {}
    at = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], role: Role, fqn: str, state: str) -> None:
        nonlocal at
        nbytes = int(np.prod(shape)) * (2 if dtype == "bfloat16" else 4)
        offsets, sizes = np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64).reshape(1, len(shape))
        zero = np.zeros(1, np.int32)
        slices = SliceArray(["weights"], zero, np.array([at]), np.array([nbytes]), offsets, sizes, ranks=zero)
        tensors[name] = TensorEntry(name, dtype, shape, slices, role, fqn, state)
        at += nbytes

    for fqn, shape in names:
        add(f"model.{fqn}", "bfloat16", shape, Role.MODEL, fqn, "")
        add(f"optimizer.state.{fqn}.exp_avg", "float32", shape, Role.OPTIMIZER, fqn, "exp_avg")
        add(f"optimizer.state.{fqn}.step", "float32", (), Role.OPTIMIZER, fqn, "step")
    return Catalog(tensors, {}, CatalogInfo("ckptkit-sharded", step=1, extra={"config": {"model_type": "llama"}}))


@pytest.fixture
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("empty")))


def planned(store: Store, catalog: Catalog, mesh: TargetMesh, kind: str = "sharded") -> tuple[Plan, Seal]:
    plan, sealing = plan_reshard(store, catalog, mesh, type=kind, identity=Identity(1, None, {"sequence": 1}))
    check_plan(plan)
    return plan, sealing


def test_seventy_billion_parameters_go_to_256_ranks_and_on_to_24(nothing):
    catalog = whole(shapes())
    total = sum(entry.nbytes for entry in catalog.tensors.values())
    for mesh in (TargetMesh(1, 256, 1), TargetMesh(1, 24, 1)):
        plan, sealing = planned(nothing, catalog, mesh)
        assert sum(int(p.nbytes().sum()) for p in plan.placements) == total
        catalog = planned_catalog(plan, sealing)
        assert catalog.info.world_size == mesh.size


def test_a_plan_for_three_dimensions_puts_each_slice_with_its_rank(nothing):
    mesh = TargetMesh(2, 8, 4)
    plan, sealing = planned(nothing, whole(shapes(layers=2)), mesh)
    entry = planned_catalog(plan, sealing).tensors["model.model.layers.1.mlp.down_proj.weight"]
    assert len(entry.slices) == 32  # replicas are stored once
    part = next(s for s in entry.slices if s.rank == 13)  # shard 3, tp 1
    assert (part.path, part.box.offsets, part.box.sizes) == ("__13_0.distcp", (3072, 7168), (1024, 7168))


def test_local_files_divide_the_replicas(nothing):
    mesh = TargetMesh(4, 2, 1)
    plan, sealing = planned(nothing, whole(shapes(layers=4)), mesh, "local")
    nbytes = [file.nbytes for file in plan.files if file.path.startswith("local_")]
    assert len(nbytes) == 8 and min(nbytes) > 0
    holders = {s.rank for e in planned_catalog(plan, sealing).tensors.values() for s in e.slices}
    assert holders == set(range(8))
