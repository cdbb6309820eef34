"""shard(): the sharded model, and refusals before anything changes."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ckptkit.errors import UsageError
from ckptkit.fsdp import blocks
from ckptkit.fsdp.config import FSDPConfig
from ckptkit.fsdp.strategy import FSDPStrategy
from ckptkit.fsdp.units import by_rule
from ckptkit.fsdp.wrap import NotShardableError, fsdp_units, shard, unwrap_model
from tests.fsdp import models


def _twice(records=None):
    model = models.untied()
    assert shard(model) is model
    logger = logging.getLogger("ckptkit.fsdp.wrap")
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    assert shard(model) is model
    logger.removeHandler(handler)
    assert seen == ["TinyLM is already sharded; shard() did not change it."]


def test_sharding_a_second_time_changes_nothing_and_warns(ranks):
    ranks.run(_twice, 2)


def _root():
    model = shard(models.untied(), FSDPConfig(auto_wrap_policy="BLOCKS"))
    assert isinstance(model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return fsdp_units(model)


def test_the_root_is_always_a_unit(ranks):
    assert ranks.run(_root, 2)[0] == ["", "layers.0", "layers.1", "layers.2"]


def _children_first():
    model = models.made(models.untied)
    fully_shard(model.layers[0])
    shard(model, FSDPConfig(sync_module_states=False))
    models.loss_of(model, models.batch(0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return fsdp_units(model)


def test_units_made_by_hand_before_are_kept(ranks):
    assert ranks.run(_children_first, 2)[0] == ["", "layers.0", "layers.1", "layers.2"]


def _refused():
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
    assert not any(isinstance(module, FSDPModule) for module in scalar.modules())


def test_modules_that_fsdp2_cannot_shard_are_refused_by_name(ranks):
    ranks.run(_refused, 2)


def _different_models():
    model = nn.Sequential(nn.Linear(4, 4 + dist.get_rank()), nn.Linear(4, 4))
    with pytest.raises(UsageError) as caught:
        shard(model)
    return str(caught.value)


def test_all_ranks_name_the_difference_between_their_models(ranks):
    for text in ranks.run(_different_models, 2):
        assert "rank 0 has '0.weight' [4, 4] float32, rank 1 has '0.weight' [5, 4] float32" in text


_UNUSUAL = {
    "flags": torch.bool,
    "codes": torch.uint16,
    "eighths": torch.float8_e4m3fn,
    "waves": torch.complex64,
    "none": torch.float32,
}


def _synchronised_buffers():
    model = models.made(models.untied)
    for name, dtype in _UNUSUAL.items():
        size = 0 if name == "none" else 3
        model.register_buffer(name, torch.full((size,), 1.0 - dist.get_rank()).to(dtype))
    model.register_buffer("mirrored", (torch.ones(2, dtype=torch.complex64) * (1j + dist.get_rank())).conj())
    shard(model)
    return {name: (buffer.dtype, buffer.to(torch.complex64).tolist()) for name, buffer in model.named_buffers()}


def test_buffers_of_every_dtype_are_synchronised(ranks):
    first, second = ranks.run(_synchronised_buffers, 2)
    assert first == second
    assert first == {
        **{name: (dtype, [] if name == "none" else [1] * 3) for name, dtype in _UNUSUAL.items()},
        "mirrored": (torch.complex64, [-1j, -1j]),
    }


def _synchronised(sync):
    model = models.made(models.untied, seed=dist.get_rank())
    model.register_buffer("offset", torch.full((3,), float(dist.get_rank())))
    shard(model, FSDPConfig(sync_module_states=sync))
    return models.weights(model), model.offset.clone()


def test_parameters_and_buffers_of_rank_0_are_broadcast(ranks):
    expected = models.made(models.untied).state_dict()
    for weights, offset in ranks.run(_synchronised, 2, True):
        assert torch.equal(offset, torch.zeros(3))
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_without_sync_module_states_each_rank_keeps_its_own_values(ranks):
    expected = [models.made(models.untied, seed=seed).state_dict()["lm_head.weight"] for seed in (0, 1)]
    weights, _ = ranks.run(_synchronised, 2, False)[0]
    rows = models.VOCAB // 2 + 1
    assert torch.equal(weights["lm_head.weight"], torch.cat([expected[0][:rows], expected[1][rows:]]))


def _warnings_of(seed_by_rank, config):
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("ckptkit.fsdp.wrap")
    logger.addHandler(handler)
    shard(models.made(models.untied, seed=dist.get_rank() * seed_by_rank), FSDPConfig.from_dict(config))
    logger.removeHandler(handler)
    return seen


def test_replicas_that_start_with_different_values_are_warned_about(ranks):
    config = {"sharding_strategy": "NO_SHARD", "sync_module_states": False}
    first, second = ranks.run(_warnings_of, 2, 1, config)
    assert len(first) == 1
    assert second == []
    assert "Ranks 0 and 1 hold different values of 'embed.weight'" in first[0]
    assert ranks.run(_warnings_of, 2, 0, config) == [[], []]
    assert ranks.run(_warnings_of, 2, 1, {"sharding_strategy": "NO_SHARD"}) == [[], []]


def _disabled():
    model = models.untied()
    assert shard(model, FSDPConfig(enable_fsdp=False)) is model
    return any(isinstance(module, FSDPModule) for module in model.modules())


def test_enable_fsdp_false_leaves_the_model_unchanged(ranks):
    assert ranks.run(_disabled, 2) == [False, False]


def _tied_after_steps(heads):
    strategy = FSDPStrategy(FSDPConfig(wrap_lm_head=heads))
    model = strategy.prepare_model(models.made(models.tied_llama))
    optimizer = strategy.create_optimizer(model)
    models.train_sharded(model, strategy, optimizer)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = models.weights(model)
    return torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("heads", [False, True])
def test_tied_weights_stay_tied(ranks, heads):
    assert ranks.run(_tied_after_steps, 2, heads) == [True, True]


def _second_way_in():
    plain = models.made(models.untied)
    model = shard(models.made(models.untied), FSDPConfig(forward_methods=("score", "not_there")))
    tokens = models.batch(0)
    return model.score(tokens).item() == pytest.approx(plain.score(tokens).item(), abs=1e-6)


def test_methods_other_than_forward_see_gathered_weights(ranks):
    assert ranks.run(_second_way_in, 2) == [True, True]


class _Encoder(models.Block):
    def encode(self, x):
        return self.norm(self.forward(x))


class _Encoded(torch.nn.Module):
    """Calls its blocks by a method other than forward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(_Encoder() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer.encode(x)
        return x


def _way_into_blocks():
    x = torch.ones(2, models.WIDTH)
    expected = models.made(_Encoded)(x)
    model = shard(models.made(_Encoded), FSDPConfig(forward_methods=("encode",)))
    found = model(x)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return torch.allclose(found, expected, atol=1e-6)


def test_methods_of_blocks_other_than_forward_see_gathered_weights(ranks):
    assert ranks.run(_way_into_blocks, 2) == [True, True]


def _names(config):
    plain = set(models.untied().state_dict())
    model = shard(models.untied(), FSDPConfig.from_dict(config))
    models.loss_of(model, models.batch(0)).backward()
    assert set(model.state_dict()) == plain
    assert {name for name, _ in model.named_parameters()} == plain
    grads = {name: models.whole(p.grad) for name, p in model.named_parameters()}
    model = shard(model)
    return grads


@pytest.mark.parametrize(
    "config",
    [
        {"activation_checkpointing": True},
        {"compile": "eager"},
        {"activation_checkpointing": True, "compile": "eager"},
    ],
    ids=["checkpointed", "compiled", "both"],
)
def test_sharding_adds_no_prefixes_and_every_parameter_gets_a_gradient(ranks, config):
    torch.manual_seed(0)
    for grads in ranks.run(_names, 2, config):
        assert all(torch.isfinite(grad).all() and grad.abs().sum() > 0 for grad in grads.values())


def _recomputed():
    model = models.untied()
    calls = []
    for index, layer in enumerate(model.layers):
        layer.up.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    shard(model, FSDPConfig(activation_checkpointing=True))
    models.loss_of(model, models.batch(0)).backward()
    return calls


def test_checkpointed_blocks_run_forward_again_in_backward(ranks):
    assert ranks.run(_recomputed, 2)[0] == [0, 1, 2, 2, 1, 0]


def _kept_gathered(keep):
    model = shard(models.untied(), FSDPConfig(keep_last_block=keep, auto_wrap_policy="BLOCKS"))
    model(models.batch(0))
    return [not isinstance(layer.up.weight, DTensor) for layer in model.layers]


def test_only_the_last_block_stays_gathered(ranks):
    assert ranks.run(_kept_gathered, 2, True)[0] == [False, False, True]
    assert ranks.run(_kept_gathered, 2, False)[0] == [False, False, False]


class MixedModal(nn.Module):
    """A vision tower that is not used in a batch without images."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(models.Block(), models.Block())
        self.text = models.untied()

    def forward(self, tokens: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        out = self.text(tokens)
        return out if image is None else out + self.visual(image).mean()


def _mixed_modal(by_hook):
    config = FSDPConfig(mixed_modal=True, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls="Block")
    if by_hook:
        blocks.hasattr = lambda *_: False  # like a torch without set_reduce_scatter_unused_params
    try:
        model = shard(models.made(MixedModal), config)
    finally:
        if by_hook:
            del blocks.hasattr
    plain = models.made(MixedModal)
    image = torch.randn(2, models.WIDTH, generator=torch.Generator().manual_seed(5))
    tokens = models.batch(0)
    loss = nn.functional.cross_entropy(
        model(tokens, image if dist.get_rank() == 0 else None).flatten(0, 1), tokens.flatten()
    )
    loss.backward()
    expected = [plain(tokens, image), plain(tokens)]
    sum(nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten()) / 2 for out in expected).backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(models.whole(a.grad), b.grad, atol=1e-6), name
    return fsdp_units(model)


@pytest.mark.parametrize("by_hook", [False, True])
def test_ranks_may_take_different_branches_through_a_vision_tower(ranks, by_hook):
    assert ranks.run(_mixed_modal, 2, by_hook)[0] == ["", "text.layers.0", "text.layers.1", "text.layers.2"]


def _empty_policy():
    model = shard(models.untied(), policy=by_rule(lambda name, module: isinstance(module, nn.LayerNorm)))
    return fsdp_units(model)


def test_a_callable_policy_decides(ranks):
    assert ranks.run(_empty_policy, 2)[0] == ["", "layers.0.norm", "layers.1.norm", "layers.2.norm", "norm"]


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


def test_a_submodule_called_module_is_not_a_wrapper():
    model = nn.Module()
    model.module, model.head = nn.Linear(2, 2), nn.Linear(2, 1)
    assert unwrap_model(model) is model


def _left_alone(config, by_name):
    torch.manual_seed(dist.get_rank())
    model = models.untied()
    model.scale = nn.Parameter(torch.tensor(1.0))  # a scalar, which FSDP2 cannot shard
    ids = [id(model.scale), id(model.layers[1].up.weight)]
    mine = model.layers[1].up.weight.detach().clone()
    chosen = {} if by_name else {"ignored_params": {model.scale, model.layers[1].up.weight}}
    names = {"ignored_params": ["scale", "*.1.up.weight"]} if by_name else {}
    shard(model, FSDPConfig.from_dict({**config, **names}), **chosen)
    plain = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    kept, down = model.layers[1].up.weight, models.whole(model.layers[1].down.weight)
    models.loss_of(model, models.batch(0)).backward()
    return {
        "plain": plain,
        "same": ids == [id(model.scale), id(kept)] and torch.equal(kept, mine),
        "gradient": kept.grad,
        "down": down,
    }


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("config", [{}, {"sharding_strategy": "HYBRID_SHARD", "shard": 1}], ids=str)
def test_ignored_parameters_are_left_as_they_are(ranks, config, by_name):
    results = ranks.run(_left_alone, 2, config, by_name)
    for result in results:
        assert result["plain"] == {"scale", "layers.1.up.weight"}
        assert result["same"]
        assert torch.equal(result["down"], results[0]["down"])  # the others are synchronized
    assert not torch.equal(results[0]["gradient"], results[1]["gradient"])  # the ranks differ, because nothing reduces


def _refused_options():
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


def _odd(parameter):
    return Shard(1) if parameter.shape[-1] == 11 else None


def test_invalid_ignored_parameters_and_placements_are_refused_by_name(ranks):
    ranks.run(_refused_options, 2)


def test_ignored_parameters_that_differ_or_train_are_warned_about(ranks):
    first, second = ranks.run(_warnings_of, 2, 1, {"ignored_params": "embed.*,lm_head.*"})
    assert len(first) == 2
    assert "different values of 'embed.weight' and 1 more parameters, and ignored_params keeps them" in first[0]
    assert "'embed.weight' and 1 more of ignored_params are trainable" in first[1]
    assert second == []


def _gathered_ahead(config):
    """Return which other blocks are gathered while the first computes, and while the last runs backward."""
    model = shard(models.untied(), FSDPConfig(auto_wrap_policy="BLOCKS", **config))
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in model.layers]
    found = {}

    def look(key):
        ahead = [group.is_unsharded or group._all_gather_result is not None for group in groups]
        found[key] = [index for index, is_ahead in enumerate(ahead) if is_ahead]

    def watch(module, args, out):
        look("forward") if module is model.layers[0].up else out.register_hook(lambda gradient: look("backward"))

    for module in (model.layers[0].up, model.layers[2].down):
        module.register_forward_hook(watch)
    models.loss_of(model, models.batch(0)).backward()
    return found


@pytest.mark.parametrize(
    ("config", "forward", "backward"),
    [
        ({}, [0], [1, 2]),
        ({"forward_prefetch": True}, [0, 1], [1, 2]),
        ({"forward_prefetch": 2}, [0, 1, 2], [1, 2]),
        ({"backward_prefetch": 1}, [0], [1, 2]),
        ({"backward_prefetch": 2}, [0], [0, 1, 2]),
        ({"backward_prefetch": "NO_PREFETCH"}, [0], [2]),
    ],
    ids=str,
)
def test_prefetch_gathers_the_requested_number_of_units_ahead(ranks, config, forward, backward):
    assert ranks.run(_gathered_ahead, 2, config)[0] == {"forward": forward, "backward": backward}
