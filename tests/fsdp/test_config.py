"""FSDPConfig: accepted and refused settings, and accelerate's environment variables in both directions."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptkit.fsdp
from ckptkit.errors import UsageError
from ckptkit.fsdp import FSDPConfig, config
from ckptkit.fsdp.config import ShardingStrategy, WrapPolicy
from tests.lazy import modules_after


def test_every_option_is_checked():
    assert {field.name for field in dataclasses.fields(FSDPConfig)} == config._CHECKS.keys()


def test_importing_the_package_and_its_config_imports_no_torch():
    assert "torch" not in modules_after("import ckptkit.fsdp, ckptkit.fsdp.config as c\nc.FSDPConfig()")


def test_every_module_imports_without_a_device_and_hides_no_public_name():
    for module in pkgutil.iter_modules(ckptkit.fsdp.__path__):
        importlib.import_module(f"ckptkit.fsdp.{module.name}")
    assert [name for name in ckptkit.fsdp.__all__ if inspect.ismodule(getattr(ckptkit.fsdp, name))] == []


def test_keys_and_strings_of_oumi_are_accepted():
    config = FSDPConfig.from_dict({
        "enable_fsdp": True, "sharding_strategy": "HYBRID_SHARD", "cpu_offload": True, "mixed_precision": "bf16",
        "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True, "state_dict_type": "FULL_STATE_DICT",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls": "LlamaDecoderLayer, QwenBlock",
        "min_num_params": 5, "sync_module_states": False, "use_orig_params": True,
    })  # fmt: skip
    found = config.sharding_strategy, config.offload, config.state_dict_type, config.transformer_layer_cls
    assert found == (ShardingStrategy.HYBRID_SHARD, "params", "FULL", ("LlamaDecoderLayer", "QwenBlock"))


def test_torch_enums_are_accepted():
    from torch.distributed.fsdp import BackwardPrefetch as TorchPrefetch
    from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
    from torch.distributed.fsdp import StateDictType

    config = FSDPConfig(
        sharding_strategy=TorchStrategy._HYBRID_SHARD_ZERO2,
        state_dict_type=StateDictType.LOCAL_STATE_DICT,
        backward_prefetch=TorchPrefetch.BACKWARD_PRE,
    )
    assert config.sharding_strategy is ShardingStrategy.HYBRID_SHARD_ZERO2
    assert config.state_dict_type == "LOCAL"


@pytest.mark.parametrize(("values", "message"), [
    ({"sharding_strategy": "ZERO3"}, "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_SHARD_ZERO2, NO_SHARD"),
    ({"mixed_precision": "fp8"}, "one of None, bf16, fp16"),
    ({"state_dict_type": "PARTIAL"}, "SHARDED_STATE_DICT"),
    ({"auto_wrap_policy": "MAGIC"}, "SIZE_BASED_WRAP"),
    ({"backward_prefetch": "LATER"}, "NO_PREFETCH"),
    ({"backward_prefetch": 0}, "backward_prefetch is 0"),
    ({"forward_prefetch": 0}, "forward_prefetch is 0"),
    ({"gradient_divide_factor": 0}, "gradient_divide_factor is 0"),
    ({"gradient_divide_factor": float("inf")}, "gradient_divide_factor is inf"),
    ({"precision": "double"}, "mixed, master"),
    ({"offload": "disk"}, "none, params, optimizer"),
    ({"cpu_offload": True, "offload": "optimizer"}, "Set only one"),
    ({"precision": "master"}, "mixed_precision='bf16'"),
    ({"sharding_strategy": "NO_SHARD", "shard": 2}, "shard is 2"),
    ({"sharding_strategy": "NO_SHARD", "cp": 2}, "cp=2 shards parameters .* NO_SHARD keeps"),
    ({"sharding_strategy": "SHARD_GRAD_OP", "replicate": 2}, "HYBRID_SHARD_ZERO2"),
    ({"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls": "X"}, "auto_wrap_policy is NO_WRAP"),
    ({"use_orig_params": False, "compile": True}, "use_orig_params=False conflicts with compile"),
    ({"tp": 0}, "tp is 0"),
    ({"tp": "auto"}, "a number of ranks, 1 or more\\."),
    ({"shard": True}, "or 'auto'"),
    ({"min_num_params": 0}, "min_num_params is 0"),
    ({"reshard_after_forward": 0}, "reshard_after_forward is 0"),
    ({"enable_fsdp": "false"}, "enable_fsdp is 'false'"),
    ({"cpu_offload": "false"}, "cpu_offload is 'false'"),
    ({"use_orig_params": "False"}, "True, False or None"),
    ({"compile": "false"}, "name of a backend"),
    ({"device": None}, "device is 'None'"),
    ({"exclude": [1]}, "list of strings"),
    ({"shards": 2}, "no field 'shards'"),
    ({"mixed_precision": "fp16", "initial_loss_scale": 0}, "from 1 to 16777216"),
    ({"mixed_precision": "fp16", "initial_loss_scale": 2.0**25}, "from 1 to 16777216"),
    ({"mixed_precision": "fp16", "loss_scale_hysteresis": 0}, "loss_scale_hysteresis is 0"),
    ({"mixed_precision": "bf16", "initial_loss_scale": 128.0}, "belong to mixed_precision='fp16'; it is 'bf16'"),
], ids=lambda value: str(value) if isinstance(value, dict) else "")  # fmt: skip
def test_impossible_settings_are_refused_at_construction(values, message):
    with pytest.raises(UsageError, match=message):
        FSDPConfig.from_dict(values)


@pytest.mark.parametrize(("setting", "message"), [
    ({"backward_prefetch": "BACKWARD_POST"}, "BACKWARD_POST does not exist in FSDP2"),
    ({"use_orig_params": False}, "always keeps the original parameters"),
], ids=str)  # fmt: skip
def test_a_setting_that_fsdp2_lacks_is_accepted_with_a_warning(setting, message):
    with pytest.warns(UserWarning, match=message):
        FSDPConfig(**setting)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is not valid YAML"), ("fsdp:\n", "fsdp: a mapping"), ("[1]", "found list"), ("fsdp: {1: 2}", "a mapping"),
])  # fmt: skip
def test_a_file_without_a_config_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError, match=f"run.yaml.*{message}"):
        FSDPConfig.from_yaml(tmp_path / "run.yaml")


def test_a_yaml_file_is_read_with_or_without_its_fsdp_section(tmp_path):
    (tmp_path / "a.yaml").write_text("tp: 2\nmixed_precision: bf16\n")
    (tmp_path / "b.yaml").write_text("model:\n  name: x\nfsdp:\n  tp: 2\n  mixed_precision: bf16\n")
    assert FSDPConfig.from_yaml(tmp_path / "a.yaml") == FSDPConfig.from_yaml(tmp_path / "b.yaml")


@pytest.mark.filterwarnings("ignore:backward_prefetch")
def test_full_settings_give_the_environment_variables_of_oumi():
    config = FSDPConfig(
        sharding_strategy="HYBRID_SHARD", offload="params", mixed_precision="bf16", backward_prefetch="BACKWARD_POST",
        forward_prefetch=True, auto_wrap_policy="TRANSFORMER_BASED_WRAP", sync_module_states=False,
        transformer_layer_cls="transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        min_num_params=100000000, activation_checkpointing=True,
    )  # fmt: skip
    expected = {  # what Oumi's own unit tests expect
        "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "FSDP_OFFLOAD_PARAMS": "true", "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_POST", "FSDP_FORWARD_PREFETCH": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_SYNC_MODULE_STATES": "false",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
    }  # fmt: skip
    assert config.to_accelerate_env(fsdp_version=1) == expected
    assert config.to_accelerate_env() == expected | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}


@given(
    strategy=st.sampled_from(ShardingStrategy),
    policy=st.sampled_from(["SIZE_BASED_WRAP", "NO_WRAP", "TRANSFORMER_BASED_WRAP"]),
    precision=st.sampled_from([None, "bf16", "fp16"]),
    kind=st.sampled_from(["FULL", "SHARDED", "LOCAL"]),
    flags=st.tuples(*[st.booleans()] * 4),
    version=st.sampled_from([1, 2]),
)
def test_environment_variables_round_trip(strategy, policy, precision, kind, flags, version):
    config = FSDPConfig(
        enable_fsdp=flags[0],
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        mixed_precision=precision,
        state_dict_type=kind,
        forward_prefetch=flags[1],
        sync_module_states=flags[2],
        activation_checkpointing=flags[3],
        reshard_after_forward=None if version == 1 else strategy.reshards_after_forward,
    )
    assert FSDPConfig.from_accelerate_env(config.to_accelerate_env(fsdp_version=version)) == config


def test_accelerate_reads_the_environment_variables_correctly(monkeypatch):
    accelerate = pytest.importorskip("accelerate.utils.dataclasses")
    config = FSDPConfig(
        sharding_strategy="SHARD_GRAD_OP", offload="params", auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=77
    )
    for name, value in config.to_accelerate_env().items():
        monkeypatch.setenv(name, value)
    plugin = accelerate.FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.min_num_params) == (2, False, 77)
    assert plugin.cpu_offload.pin_memory is not None and plugin.state_dict_type.name == "SHARDED_STATE_DICT"


def test_numbers_and_lower_case_of_accelerate_are_accepted_and_other_flags_refused():
    config = FSDPConfig.from_accelerate_env({"FSDP_SHARDING_STRATEGY": "2", "FSDP_AUTO_WRAP_POLICY": "no_wrap"})
    found = config.sharding_strategy, config.auto_wrap_policy, config.enable_fsdp
    assert found == (ShardingStrategy.SHARD_GRAD_OP, WrapPolicy.NO_WRAP, False)
    with pytest.raises(UsageError, match="ACCELERATE_USE_FSDP is 'maybe'"):
        FSDPConfig.from_accelerate_env({"ACCELERATE_USE_FSDP": "maybe"})
