"""Saved under FSDP x TP x EP x PP, loaded under any other mesh: weights and moments are bit-equal."""

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptkit import CheckpointManager, Shard, TrainState, convert, open_checkpoint, reshard
from ckptkit.errors import UsageError
from ckptkit.fsdp import MasterWeightOptimizer
from tests.checkpoint import states
from tests.checkpoint.hidden import Scaled
from tests.checkpoint.states import check_misfit, check_refused, module_of, on_all, optimized, refusal
from tests.dtensors import local
from tests.ranks import on_ranks, run_ranks

warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
LAYERS, EXPERTS = 4, 4
MOMENTS = ("exp_avg", "exp_avg_sq")

MESHES: dict[str, tuple[int, ...]] = {  # name -> sizes of (pp, dp, ep, tp)
    "one": (1, 1, 1, 1),
    "ep2": (1, 1, 2, 1),
    "ep4": (1, 1, 4, 1),
    "fsdp2": (1, 2, 1, 1),
    "fsdp2 ep2": (1, 2, 2, 1),
    "fsdp2 tp2": (1, 2, 1, 2),
    "pp2": (2, 1, 1, 1),
    "pp2 ep2": (2, 1, 2, 1),
    "pp2 fsdp2": (2, 2, 1, 1),
    "fsdp2 ep2 tp2": (1, 2, 2, 2),
    "pp2 fsdp2 ep2": (2, 2, 2, 1),
    "pp2 ep2 tp2": (2, 1, 2, 2),
    "pp2 fsdp2=ep2 tp2": (2, 2, 1, 2),  # the ranks that share a layer's shards have different experts
}


def size_of(name: str) -> int:
    pp, dp, ep, tp = MESHES[name]
    return pp * dp * ep * tp


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.experts = module_of({"w1": torch.zeros(experts, 6, 5), "w2": torch.zeros(experts, 5, 6)})


class Stage(nn.Module):
    """The layers of one pipeline stage, under their names in the model."""

    def __init__(self, layers: range, experts: int) -> None:
        super().__init__()
        if 0 in layers:
            self.embed = nn.Linear(3, 6)
        self.layers = nn.ModuleDict({str(i): Block(experts) for i in layers})
        if LAYERS - 1 in layers:
            self.head = nn.Linear(6, 3)


def whole_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the whole tensor of a name, equal on every mesh."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    return torch.randn(shape, generator=generator)


def part(whole: torch.Tensor, like: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the values of a live tensor; an expert-parallel rank has its chunk of the whole."""
    mine = whole.chunk(size)[rank] if size > 1 else whole
    if not isinstance(like, DTensor):
        return mine
    from ckptkit.checkpoint.state.local_part import part_view

    found = torch.empty_like(like.to_local(), dtype=whole.dtype)
    for piece in part_view("", like).parts:
        at = tuple(slice(o, o + s) for o, s in zip(piece.local_offsets, piece.box.sizes, strict=True))
        of = tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))
        found[at] = mine[of]
    return found


def model_on(name: str, interleaved: bool = False, low: bool = False) -> tuple[TrainState, Any]:
    """Return a model without values on a mesh, as a TrainState, and its expert-parallel mesh. Collective.

    With `low`, the model is bf16, and its optimizer has fp32 masters.
    """
    pp, dp, ep, tp = MESHES[name]
    mesh = init_device_mesh("cpu", (pp, dp, ep, tp), mesh_dim_names=("pp", "dp", "ep", "tp"))
    rank, experts = mesh.get_local_rank("pp"), mesh["dp" if "=" in name else "ep"]
    if interleaved:  # stages 0 and 2 on the first rank, 1 and 3 on the second
        ranges = [range(i, i + 1) for i in range(rank, LAYERS, pp)]
    else:
        ranges = [range(rank * LAYERS // pp, (rank + 1) * LAYERS // pp)]
    dtype = torch.bfloat16 if low else torch.float32
    stages = [Stage(layers, EXPERTS // experts.size()).to(dtype) for layers in ranges]
    for stage in stages:
        apart = {p for name, p in stage.named_parameters() if experts.size() > ep and ".experts." in name}
        for block in stage.layers.values():
            if tp > 1:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if dp > 1:
                fully_shard(block, mesh=mesh["dp"], ignored_params=apart)
        if dp > 1:
            fully_shard(stage, mesh=mesh["dp"], ignored_params=apart)
    optimizer: Any = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.1)
    optimizer = MasterWeightOptimizer(optimizer) if low else optimizer
    layout = {"*.experts.*": Shard(0, mesh=experts)} if experts.size() > 1 else {}
    model = stages if len(stages) > 1 else stages[0]
    return TrainState(model=model, optimizer=optimizer, layout=layout, rng=False), experts


def filled(mesh: str, seed: int, interleaved: bool = False, low: bool = False) -> TrainState:
    """Return a model on a mesh, with this rank's parts of the weights and moments of a seed. Collective."""
    state, experts = model_on(mesh, interleaved, low)
    fill(state, experts, seed)
    return state


@torch.no_grad()
def fill(state: TrainState, experts: Any, seed: int) -> None:
    """Set the weights, moments and masters of `model_on` in place."""
    with_masters = isinstance(state.optimizer, MasterWeightOptimizer)
    for name, parameter in state.parts("model")[""].named_parameters():
        kept = state.optimizer.state[parameter]
        for key in MOMENTS + ("master",) * with_masters:
            kept.setdefault(key, torch.zeros_like(parameter, dtype=torch.float32))
        kept["step"] = torch.tensor(float(seed))
        count = experts.size() if ".experts." in name else 1
        shape = (parameter.shape[0] * count, *parameter.shape[1:])
        for key, target in {"": parameter, **kept}.items():
            if key != "step":
                whole = whole_value(f"{name}.{key}" if key in MOMENTS else name, shape, seed)
                local(target).copy_(part(whole, parameter, experts.get_local_rank(), count))


PAIRS = [  # the first pair runs by day; test_mesh_chains.py has random pairs of at most four ranks
    ("pp2 ep2", "fsdp2 ep2"), ("fsdp2 ep2 tp2", "pp2 fsdp2 ep2"), ("pp2 fsdp2 ep2", "fsdp2 ep2 tp2"),
    ("pp2 ep2 tp2", "one"), ("one", "pp2 ep2 tp2"), ("pp2 fsdp2 ep2", "ep4"), ("fsdp2 tp2", "fsdp2 ep2 tp2"),
    ("pp2 ep2 tp2", "pp2 fsdp2 ep2"), ("pp2 fsdp2=ep2 tp2", "one"), ("one", "pp2 fsdp2=ep2 tp2"),
    ("pp2 fsdp2=ep2 tp2", "fsdp2 ep2 tp2"), ("pp2 fsdp2 ep2", "pp2 fsdp2=ep2 tp2"),
]  # fmt: skip


def save(url: str, mesh: str, kind: str = "sharded", interleaved: bool = False) -> None:
    states.save(url, filled(mesh, 1, interleaved), state_dict_type=kind)


def load(url: str, mesh: str, interleaved: bool = False) -> None:
    state = filled(mesh, 2, interleaved)
    report = states.load(url, state)
    assert not (report.missing or report.unexpected)
    assert states.bits(state) == states.bits(filled(mesh, 1, interleaved))


def on(ranks: Any, mesh: str, fn: Any, *args: Any) -> list[Any]:
    """Run a function on the ranks of a mesh; more than four are not kept."""
    size = size_of(mesh)
    return (ranks.run if size <= 4 else run_ranks)(fn, size, *args)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_mesh_loads_what_any_other_saved(ranks, tmp_path, source, target):
    """One of the two has several stages on each rank."""
    full = PAIRS.index((source, target)) % 3 == 2
    on(ranks, source, save, str(tmp_path), source, "full" if full else "sharded", full)
    on(ranks, target, load, str(tmp_path), target, not full)


@on_ranks(2)
def test_a_deferred_optimizer_has_the_declared_layout(tmp_path):
    save(str(tmp_path), "ep2")
    state = filled("ep2", 2)
    with CheckpointManager(tmp_path) as manager:
        report = manager.load(state, optimizer="deferred")
        report.deferred.apply()
    assert states.bits(state) == states.bits(filled("ep2", 1))


@pytest.mark.parametrize("mesh", ["ep2", "pp2 fsdp2 ep2", "fsdp2 ep2 tp2"])  # the first runs by day
def test_plain_torch_and_exports_see_whole_tensors(ranks, tmp_path, mesh):
    on(ranks, mesh, save, str(tmp_path / "run"), mesh)
    url = str(tmp_path / "run" / "step_00000001")
    convert(url, str(tmp_path / "hf"))
    for name, shape in {"layers.3.experts.w2": (4, 5, 6), "layers.1.up.weight": (8, 6)}.items():
        weight, moment = whole_value(name, shape, 1), whole_value(f"{name}.exp_avg", shape, 1)
        target = {"model": {name: torch.zeros(shape)}, "optimizer": {"state": {name: {"exp_avg": torch.zeros(shape)}}}}
        dcp.load(target, checkpoint_id=url)
        assert torch.equal(target["model"][name], weight)
        assert torch.equal(target["optimizer"]["state"][name]["exp_avg"], moment)
        assert torch.equal(open_checkpoint(url)[f"optimizer.state.{name}.exp_avg"].to_torch(), moment)
        assert torch.equal(open_checkpoint(str(tmp_path / "hf"))[name].to_torch(), weight)


def experts_of(count: int, value: float = 0.0) -> nn.Module:
    return module_of({"experts": torch.full((count, 2), value)})


def ep_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))


def declared(model: nn.Module, **moments: torch.Tensor) -> TrainState:
    """Return the state of experts that are declared as shards over two ranks, with these optimizer states."""
    state = optimized(model, momentum=0.9)
    if moments:
        state.optimizer.state[model.experts] = moments
    state.layout = {"*": Shard(0, mesh=ep_mesh())}
    return state


@on_ranks(2)
def test_shards_that_do_not_match_their_layout_are_refused_by_name(tmp_path):
    """Five experts over two ranks, three and two."""
    rank, mesh = dist.get_rank(), ep_mesh()

    def part(count: int, layout: Any) -> TrainState:
        return TrainState(model=experts_of(count, rank + 1.0), layout={"*": layout}, rng=False)

    check_refused(tmp_path, part(3 - rank, Shard(0, mesh=mesh)), "experts")
    said = r"model\.experts: .* a tensor of shape \[2, 2\], but its layout expects a part of shape \[3, 2\]"
    check_refused(tmp_path, part(2 + rank, Shard(0, mesh=mesh, size=5)), said)
    check_refused(tmp_path, part(2, Shard(2, mesh=mesh)), "has no dimension 2")
    with CheckpointManager(tmp_path) as manager:  # the key was a tensor of each rank in an earlier save
        manager.save(0, part(2, "per_rank"))
        manager.save(1, part(3 - rank, Shard(0, mesh=mesh, size=5)))
    assert open_checkpoint(f"{tmp_path}/step_00000001")["model.experts"][:, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]


@on_ranks(2)
def test_a_tensor_declared_over_a_mesh_that_already_shards_it_is_refused_by_name(tmp_path):
    model = experts_of(2)
    model.experts = nn.Parameter(distribute_tensor(torch.zeros(4, 2), ep_mesh(), [DTensorShard(0)]))
    said = r"model\.experts is sharded or declared over the meshes \('ep',\), \('ep',\), which cannot be joined"
    check_refused(tmp_path, declared(model), rf"{said}(?s:.*)A dimension may occur only once")


@on_ranks(4)
def test_ranks_that_disagree_about_the_same_part_are_refused_by_name(tmp_path, kind):
    """Ranks 0 and 2 are declared to have the same experts, and ranks 1 and 3."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    differ = "differ between ranks that have the same part"
    for number, layout in enumerate((Shard(0, mesh=mesh["ep"]), Shard(0, mesh=mesh["ep"], replicas=mesh["dp"]))):

        def state(value: int, moment: int, layout: Shard = layout) -> TrainState:
            made = optimized(experts_of(2, float(value)))
            made.optimizer.state[made.model.experts]["momentum_buffer"] = torch.full((2, 2), float(moment))
            made.layout = {"*": layout}
            return made

        states.save(tmp_path / f"{number}", state(rank % 2, rank % 2), state_dict_type=kind)
        for value, moment, name in ((rank, 0, "model.experts"), (0, rank, "optimizer.state.experts.momentum_buffer")):
            check_refused(tmp_path / name, state(value, moment), f"{name} {differ}", state_dict_type=kind)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_a_glob_that_matches_no_tensor_is_refused(tmp_path, kind, world_size):
    """Each rank has its own stage; declare the experts of one of them, or of none."""

    def state(value: float, **layout: str) -> TrainState:
        model = {f"stage{dist.get_rank()}": experts_of(2, value)}
        return TrainState(model=model, layout=layout, rng=False)

    said = r"no tensor of the model on any rank matches 'experts'\. Globs match whole names"
    neither, one = {"*.experts": "per_rank", "experts": "per_rank"}, {"stage0.experts": "per_rank"}
    check_refused(tmp_path, state(1.0, **neither), said, error=UsageError, state_dict_type=kind)
    states.save(tmp_path, state(1.0, **one), state_dict_type=kind)
    check_misfit(tmp_path, state(0.0, **neither), said, error=UsageError)
    states.load(tmp_path, state(0.0, **one))


@on_ranks(2)
def test_states_of_another_shape_than_their_declared_parameter_are_refused(tmp_path):
    check_refused(tmp_path, declared(experts_of(2), row=torch.zeros(2)), r"state 'row' of 'experts' has shape \[2\]")


@on_ranks(2)
def test_moments_that_a_rank_lacks_are_refused_by_name(tmp_path, kind):
    """An optimizer that has never updated a rank's experts has no state for them."""
    moments = {"momentum_buffer": torch.ones(2, 2)} if dist.get_rank() == 0 else {}
    said = r"optimizer\.state\.experts\.momentum_buffer.*4 of 8 elements.*optimizer states of the same parameters\?"
    check_refused(tmp_path, declared(experts_of(2), **moments), f"(?s){said}", state_dict_type=kind)


@on_ranks(2, 1)
def test_experts_of_one_element_have_global_moments(tmp_path, kind):
    """A state with the parameter's shape is a part of a global state, even if it is a single number."""
    if dist.get_world_size() == 2:
        state = declared(module_of({"experts": torch.zeros(1)}))
        state.model.experts.grad = torch.ones(1) + dist.get_rank()
        state.optimizer.step()
        states.save(tmp_path, state, state_dict_type=kind)
        state.optimizer.state.clear()
        expected = [1.0 + dist.get_rank()]
    else:
        if kind == "local":
            source, tmp_path = tmp_path, tmp_path / "resharded"
            reshard(f"{source}/step_00000001", f"{tmp_path}/step_00000001", world_size=1)
        state = optimized(module_of({"experts": torch.zeros(2)}), momentum=0.9)
        expected = [1.0, 2.0]
    states.load_all(tmp_path, state)
    assert state.optimizer.state[state.model.experts]["momentum_buffer"].tolist() == expected


def with_quantized(config: str, value: float, *, glob: str = "", rows: int = 4) -> TrainState:
    """Return a model with a quantized weight, which with a glob is this rank's part of a global weight."""
    import torchao.quantization as torchao

    model = nn.Sequential(nn.Linear(64, rows, bias=False, dtype=torch.bfloat16))
    nn.init.constant_(model[0].weight, value)
    torchao.quantize_(model, getattr(torchao, config)())
    layout = {glob: Shard(0, mesh=ep_mesh())} if glob else {}
    return TrainState(model=model, layout=layout, rng=False)


@pytest.mark.parametrize("glob", ["*", "0.weight"])
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
@on_ranks(2)
def test_declared_quantized_weights_are_parts_of_a_whole(tmp_path, kind, config, glob):
    source = with_quantized(config, 1.0 + dist.get_rank(), glob=glob)
    live = with_quantized(config, 9.0, glob=glob)
    states.check_round_trip(tmp_path, source, live, kind)
    if kind != "local":
        whole = with_quantized(config, 9.0, rows=8)
        states.load_all(tmp_path, whole)
        expected = torch.tensor([1.0] * 4 + [2.0] * 4).bfloat16()[:, None].expand(8, 64)
        assert torch.allclose(whole.model[0].weight.dequantize(), expected, rtol=1e-2)  # quantization rounds


@on_ranks(2)
def test_declared_weights_whose_scale_has_no_place_in_the_global_weight_are_refused(tmp_path, kind):
    odd = Scaled(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5))
    model = nn.ParameterDict({"odd": nn.Parameter(odd, requires_grad=False)})
    state = TrainState(model=model, layout={"odd": Shard(0, mesh=ep_mesh())})
    said = r"model\.odd is sharded, and its local part is a tests\.checkpoint\.hidden\.Scaled, whose scale \[\]"
    said += r"(?s:.*)Declare it 'per_rank', or train with unquantized weights\."
    check_refused(tmp_path, state, said, state_dict_type=kind)


@on_ranks(1, 2)
def test_a_replicated_scalar_parameter_has_replicated_moments(tmp_path, kind):
    size = dist.get_world_size()

    def stepped(steps: int) -> TrainState:
        value = torch.tensor(2.0)
        if size == 2:
            value = distribute_tensor(value, init_device_mesh("cpu", (2,)), [Replicate()])
        state = optimized(nn.ParameterDict({"scale": value}), torch.optim.AdamW, foreach=False)
        for _ in range(steps):
            state.model["scale"].grad = torch.full_like(state.model["scale"], 0.3)
            state.optimizer.step()
        return state

    states.save(tmp_path / str(size), stepped(2), state_dict_type=kind)
    for saved_on in (1, 2) if kind != "local" else (size,):
        if saved_on <= size:
            states.load_all(tmp_path / str(saved_on), live := stepped(0))
            assert states.bits(live) == states.bits(stepped(2))


def with_local_states(name: str, weight: DTensor, saved: bool) -> TrainState:
    """Return a weight whose optimizer keeps a factor and a number that it computed from this rank's shard."""
    state, mine = optimized(nn.ParameterDict({name: nn.Parameter(weight)})), weight.to_local()
    state.optimizer.state[state.model[name]] = {"factor": mine.sum(1) + saved, "total": float(mine.sum())}
    return state


def with_factors(ranks_of_mesh: list[Any], placements: list[Any], saved: bool) -> TrainState:
    mesh = DeviceMesh("cpu", ranks_of_mesh, mesh_dim_names=("a", "b")[: torch.tensor(ranks_of_mesh).dim()])
    weight = distribute_tensor(torch.arange(32.0).view(8, 4) * saved, mesh, placements, src_data_rank=None)
    return with_local_states("w", weight, saved)


ORDERS: dict[str, tuple[list[Any], list[Any]]] = {
    "in order": ([0, 1, 2, 3], [DTensorShard(0)]),
    "in another order": ([3, 1, 0, 2], [DTensorShard(0)]),
    "with a dimension of one rank": ([[0, 1, 2, 3]], [Replicate(), DTensorShard(0)]),
    "2-D": ([[0, 1], [2, 3]], [DTensorShard(0), DTensorShard(1)]),
    "2-D, transposed": ([[0, 2], [1, 3]], [DTensorShard(0), DTensorShard(1)]),
}


@on_ranks(4)
def test_states_of_own_shards_load_only_if_each_rank_has_the_same_one(tmp_path, kind):
    for saved, order in ORDERS.items():
        states.save(tmp_path / saved, with_factors(*order, True), state_dict_type=kind)
    same = {"in order", "with a dimension of one rank"}
    for saved in ORDERS:
        for name, order in ORDERS.items():
            live = with_factors(*order, False)
            said = on_all(refusal(lambda live=live, saved=saved: states.load_all(tmp_path / saved, live)))
            assert (said == "") == (saved == name or {saved, name} == same), (saved, name)
            if not said:
                assert states.bits(live) == states.bits(with_factors(*order, True)), (saved, name)
            if (saved, name) == ("in order", "in another order"):
                assert "w.factor, w.total" in said and "here, on 4 ranks: S(0) on [4], in a different order" in said


@on_ranks(4)
def test_states_of_a_ranks_own_shard_do_not_load_if_stages_are_on_other_ranks(tmp_path, kind):
    """Two stages, each on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def stage(swapped: bool, saved: bool) -> TrainState:
        name = f"stage{mesh.get_local_rank('pp') ^ swapped}"
        whole = whole_value(name, (8, 4), 1) * saved
        return with_local_states(name, distribute_tensor(whole, mesh["dp"], [DTensorShard(0)]), saved)

    states.check_round_trip(tmp_path, stage(False, True), stage(False, False), kind)
    check_misfit(tmp_path, stage(True, False), r"(?s)factor.*here, on 4 ranks: S\(0\) on \[2\], in a different order")


@pytest.mark.parametrize("kind", ["sharded", "full"])
@on_ranks(1, 2)
def test_the_names_of_a_tied_weight_load_into_stages_on_different_ranks(tmp_path, kind):
    names = ["embed.weight", "head.weight"]

    def tied(value: float, names: list[str]) -> TrainState:
        """Return a weight with these names, and a state with its masters."""
        model: Any = module_of({name: torch.full((8, 4), value) for name in names}, dtype=torch.bfloat16)
        if len(names) == 2:
            model.head.weight = model.embed.weight
        optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=value))
        return TrainState(model=model, optimizer=optimizer, rng=False)

    source = tied(0.3, names)
    theirs = source.model.embed.weight
    theirs.grad = torch.ones_like(theirs)
    source.optimizer.step()
    if dist.get_world_size() == 1:
        states.save(tmp_path, source, state_dict_type=kind)
        return
    live = tied(0.7, [names[dist.get_rank()]])
    states.load_all(tmp_path, live)
    states.check_resumed(live, TrainState(model=nn.ParameterList([theirs]), optimizer=source.optimizer))
    assert live.optimizer.param_groups[0]["lr"] == 0.3


@on_ranks(2)
def test_an_error_names_tensors_that_no_rank_has(tmp_path):
    save(str(tmp_path), "pp2")
    state, _ = model_on("pp2")
    if dist.get_rank() == 1:
        del state.model.layers["3"]
    state.optimizer = None
    said = on_all(refusal(lambda: states.load(tmp_path, state)))
    assert said.startswith("CheckpointMismatchError") and "6 unexpected" in said
    assert "layers.3.experts.w1" in said and "layers.2" not in said
