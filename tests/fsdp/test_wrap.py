"""shard(): the sharded model, and refusals before anything changes."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ckptkit.errors import UsageError
from ckptkit.fsdp import FSDPConfig, shard, unwrap_model, wrap
from ckptkit.fsdp.wrap import NotShardableError
from tests.fsdp import models
from tests.ranks import logged, on_ranks


def warnings_of(model, config=None):
    """Shard a model; return what was logged."""
    with logged(logging.NOTSET, name="ckptkit.fsdp.wrap") as seen:
        assert shard(model, FSDPConfig.from_dict(config or {})) is model
    return seen


def units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@on_ranks(2)
def test_sharding_a_second_time_changes_nothing_and_warns():
    model = models.untied()
    assert warnings_of(model) == []
    assert warnings_of(model) == ["TinyLM is already sharded; shard() did not change it."]


@pytest.mark.parametrize("by_hand", [True, False])
@on_ranks(2)
def test_units_made_by_hand_before_are_kept(by_hand):
    model = models.made(models.untied)
    if by_hand:
        fully_shard(model.layers[0])
    shard(model, FSDPConfig(auto_wrap_policy="BLOCKS", sync_module_states=False))
    models.loss_of(model, models.batch(0)).backward()
    assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
    assert units(model) == ["", "layers.0", "layers.1", "layers.2"]


@on_ranks(2)
def test_modules_that_fsdp2_cannot_shard_are_refused_by_name():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1] = FullyShardedDataParallel(inner[1], device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match=r"'1' is an FSDP1 FullyShardedDataParallel"):
        shard(inner)
    with pytest.raises(NotShardableError, match="found dict"):
        shard({})
    scalar = models.untied()
    scalar.layers[1].gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UsageError, match=r"'layers\.1\.gain' is a scalar.*shape \[1\]"):
        shard(scalar)
    assert units(scalar) == []
    integers = nn.Linear(4, 4)
    integers.table = nn.Parameter(torch.arange(4), requires_grad=False)
    with pytest.raises(UsageError, match="'table' has dtype int64"):
        shard(integers)


@on_ranks(2)
def test_all_ranks_name_the_difference_between_their_models():
    model = nn.Sequential(nn.Linear(4, 4 + dist.get_rank()), nn.Linear(4, 4))
    with pytest.raises(UsageError) as caught:
        shard(model)
    assert "rank 0 has '0.weight' [4, 4] float32, rank 1 has '0.weight' [5, 4] float32" in str(caught.value)


@on_ranks(2)
def test_buffers_of_every_dtype_are_synchronised():
    def filled(value):
        dtypes = (torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64)
        buffers = {str(dtype): torch.full((3,), float(value)).to(dtype) for dtype in dtypes}
        mirrored = (torch.ones(2, dtype=torch.complex64) * (1j + value)).conj()
        return {**buffers, "empty": torch.zeros(0), "mirrored": mirrored}

    model = models.untied()
    for name, buffer in filled(1 - dist.get_rank()).items():
        model.register_buffer(name.replace(".", "_"), buffer)
    shard(model)
    for buffer, expected in zip(model.buffers(), filled(1).values(), strict=True):
        assert buffer.dtype == expected.dtype
        assert buffer.to(torch.complex64).tolist() == expected.to(torch.complex64).tolist()


def synchronised(sync):
    model = models.made(models.untied, seed=dist.get_rank())
    model.register_buffer("offset", torch.full((3,), float(dist.get_rank())))
    shard(model, FSDPConfig(sync_module_states=sync))
    return models.weights(model)


@on_ranks(2)
def test_parameters_and_buffers_of_rank_0_are_broadcast_unless_sync_module_states_is_false():
    first, second = (models.made(models.untied, seed=seed).state_dict() for seed in (0, 1))
    models.assert_equal(synchronised(True), {**first, "offset": torch.zeros(3)})
    rows = models.VOCAB // 2 + 1
    own = torch.cat([first["lm_head.weight"][:rows], second["lm_head.weight"][rows:]])
    assert torch.equal(synchronised(False)["lm_head.weight"], own)


def from_own_seed(config):
    return warnings_of(models.made(models.untied, seed=dist.get_rank()), config)


@on_ranks(2)
def test_only_replicas_that_start_with_different_values_are_warned_about():
    synchronised = {"sharding_strategy": "NO_SHARD"}
    config = {**synchronised, "sync_module_states": False}
    said = from_own_seed(config)
    assert len(said) == 1 - dist.get_rank()
    assert all("Ranks 0 and 1 hold different values of 'embed.weight'" in line for line in said)
    assert from_own_seed(synchronised) == warnings_of(models.made(models.untied), config) == []


@on_ranks(2)
def test_enable_fsdp_false_leaves_the_model_unchanged():
    model = models.untied()
    assert shard(model, FSDPConfig(enable_fsdp=False)) is model
    assert units(model) == []


class _Encoder(models.Block):
    def encode(self, x):
        return self.norm(self.forward(x))


class _Encoded(torch.nn.Module):
    """Computes in methods other than forward, as its blocks do."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(_Encoder() for _ in range(2))
        self.out = nn.Linear(models.WIDTH, 3)

    def score(self, x):
        for layer in self.layers:
            x = layer.encode(x)
        return self.out(x)


@on_ranks(2)
def test_methods_other_than_forward_see_gathered_weights():
    x = torch.ones(2, models.WIDTH)
    expected = models.made(_Encoded).score(x)
    model = shard(models.made(_Encoded), FSDPConfig(forward_methods=("score", "encode", "not_there")))
    found = model.score(x)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("config", [
    {"activation_checkpointing": True}, {"compile": "eager"}, {"activation_checkpointing": True, "compile": "eager"},
], ids=["checkpointed", "compiled", "both"])  # fmt: skip
@on_ranks(2)
def test_sharding_adds_no_prefixes_and_every_parameter_gets_a_gradient(config):
    plain = set(models.untied().state_dict())
    model = shard(models.made(models.untied), FSDPConfig.from_dict(config))
    models.loss_of(model, models.batch(0)).backward()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()} == plain
    gradients = [models.whole(parameter.grad) for parameter in model.parameters()]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@on_ranks(2)
def test_checkpointed_blocks_run_forward_again_in_backward():
    model, calls = models.untied(), []
    for index, layer in enumerate(model.layers):
        layer.up.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    shard(model, FSDPConfig(activation_checkpointing=True))
    models.loss_of(model, models.batch(0)).backward()
    assert calls == [0, 1, 2, 2, 1, 0]


@on_ranks(2)
def test_only_the_last_block_stays_gathered_and_only_on_request():
    for keep in (True, False):
        model = shard(models.untied(), FSDPConfig(keep_last_block=keep, auto_wrap_policy="BLOCKS"))
        model(models.batch(0))
        assert [not isinstance(layer.up.weight, DTensor) for layer in model.layers] == [False, False, keep]


class MixedModal(nn.Module):
    """A vision tower that is not used in a batch without images."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(models.Block(), models.Block())
        self.text = models.untied()

    def forward(self, tokens: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        out = self.text(tokens)
        return out if image is None else out + self.visual(image).mean()


@pytest.mark.parametrize("by_hook", [False, True])
@on_ranks(2)
def test_ranks_may_take_different_branches_through_a_vision_tower(by_hook):
    config = FSDPConfig(mixed_modal=True, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls="Block")
    if by_hook:
        wrap.hasattr = lambda *_: False  # like a torch without set_reduce_scatter_unused_params
    try:
        model = shard(models.made(MixedModal), config)
    finally:
        if by_hook:
            del wrap.hasattr
    plain = models.made(MixedModal)
    image = torch.randn(2, models.WIDTH, generator=torch.Generator().manual_seed(5))
    tokens = models.batch(0)
    out = model(tokens, image if dist.get_rank() == 0 else None)
    nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()
    expected = [plain(tokens, image), plain(tokens)]
    sum(nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten()) / 2 for out in expected).backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(models.whole(a.grad), b.grad, atol=1e-6), name
    assert units(model) == ["", "text.layers.0", "text.layers.1", "text.layers.2"]


@on_ranks(2)
def test_a_callable_policy_may_choose_units_inside_units():
    model = shard(models.untied(), policy=lambda model: ["layers.0", "layers.0.up"])
    models.loss_of(model, models.batch(0)).backward()
    assert units(model) == ["", "layers.0", "layers.0.up"]


def test_unwrap_returns_the_innermost_module():
    inner = models.untied()

    class DDP(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = DDP(torch.compile(checkpoint_wrapper(inner), backend="eager"))
    assert unwrap_model(wrapped) is inner
    assert unwrap_model(inner) is inner
    inner.module = nn.Linear(2, 2)  # a submodule of this name does not make a wrapper
    assert unwrap_model(inner) is inner


def _left_alone(config, by_name):
    torch.manual_seed(dist.get_rank())
    model = models.untied()
    model.scale = nn.Parameter(torch.tensor(1.0))  # a scalar, which FSDP2 cannot shard
    kept = model.layers[1].up.weight
    mine = kept.detach().clone()
    if by_name:
        shard(model, FSDPConfig.from_dict({**config, "ignored_params": ["scale", "*.1.up.weight"]}))
    else:
        shard(model, FSDPConfig.from_dict(config), ignored_params={model.scale, kept})
    plain = {name: parameter for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    assert plain.keys() == {"scale", "layers.1.up.weight"}
    assert model.layers[1].up.weight is kept
    assert torch.equal(kept, mine)
    down = models.whole(model.layers[1].down.weight)
    models.loss_of(model, models.batch(0)).backward()
    return kept.grad, down


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("config", [{}, {"sharding_strategy": "HYBRID_SHARD", "shard": 1}], ids=str)
def test_ignored_parameters_are_left_as_they_are(ranks, config, by_name):
    (gradient, down), (other_gradient, other_down) = ranks.run(_left_alone, 2, config, by_name)
    assert torch.equal(down, other_down)  # the others are synchronized
    assert not torch.equal(gradient, other_gradient)  # nothing reduces these


def _odd(parameter):
    return Shard(1) if parameter.shape[-1] == 11 else None


@on_ranks(2)
def test_invalid_ignored_parameters_and_placements_are_refused_by_name():
    model = models.untied()
    calls = [
        ("'nothing.*', which matches no parameter", {"config": FSDPConfig(ignored_params="nothing.*")}),
        ("ignored_params is .*expected a set of the model's parameters", {"ignored_params": model.lm_head.weight}),
        ("ignored_params is 'embed', expected", {"ignored_params": "embed"}),
        ("an item of ignored_params is 'embed', expected a parameter", {"ignored_params": ["embed"]}),
        ("a parameter of shape .* that TinyLM does not have", {"ignored_params": {nn.Parameter(torch.ones(2))}}),
        ("shard_placement_fn is 1, expected a function", {"shard_placement_fn": 1}),
        ("returned 1 for 'embed.weight', expected", {"shard_placement_fn": lambda parameter: 1}),
        (r"returned S.*2.* for 'embed.weight', which has shape \[19, 12\]", {"shard_placement_fn": lambda p: Shard(2)}),
        (r"'lm_head.weight' of shape \[19, 11\]: .*11 is not divisible by 2", {"shard_placement_fn": _odd}),
    ]
    model.lm_head = nn.Linear(11, models.VOCAB, bias=False)
    for message, options in calls:
        with pytest.raises(UsageError, match=message):
            shard(model, **options)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_ignored_parameters_that_differ_or_train_are_warned_about():
    said = from_own_seed({"ignored_params": "embed.*,lm_head.*"})
    if dist.get_rank() > 0:
        assert said == []
    else:
        differ, train = said
        assert "different values of 'embed.weight' and 1 more parameters, and ignored_params keeps them" in differ
        assert "trainable parameters (embed.weight and 1 more)" in train


@pytest.mark.parametrize(("config", "forward", "backward"), [
    ({}, [0], [1, 2]),
    ({"forward_prefetch": True}, [0, 1], [1, 2]),
    ({"forward_prefetch": 2}, [0, 1, 2], [1, 2]),
    ({"backward_prefetch": 1}, [0], [1, 2]),
    ({"backward_prefetch": 2}, [0], [0, 1, 2]),
    ({"backward_prefetch": "NO_PREFETCH"}, [0], [2]),
], ids=str)  # fmt: skip
@on_ranks(2)
def test_prefetch_gathers_the_requested_number_of_units_ahead(config, forward, backward):
    model = shard(models.untied(), FSDPConfig(auto_wrap_policy="BLOCKS", **config))
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in model.layers]
    found = {}

    def look(key):
        ahead = [group.is_unsharded or group._all_gather_result is not None for group in groups]
        found[key] = [index for index, is_ahead in enumerate(ahead) if is_ahead]

    def watch(module, args, out):
        out.register_hook(lambda gradient: look("backward"))

    model.layers[0].up.register_forward_hook(lambda *_: look("forward"))
    model.layers[2].down.register_forward_hook(watch)
    models.loss_of(model, models.batch(0)).backward()
    assert found == {"forward": forward, "backward": backward}
