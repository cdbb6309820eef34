"""FSDPConfig as the environment variables of `accelerate launch`, and back. Imports no torch, no accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.errors import UsageError

if TYPE_CHECKING:
    from ckptkit.fsdp.config import FSDPConfig

__all__ = ["to_env", "from_env"]

# accelerate numbers these from 1, in this order (accelerate.utils.constants).
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_WRAPS = {"AUTO": "TRANSFORMER_BASED_WRAP", "BLOCKS": "TRANSFORMER_BASED_WRAP"}  # accelerate's own guess of classes
_TRUE, _FALSE = {"1", "true", "t", "yes", "y", "on"}, {"0", "false", "f", "no", "n", "off"}


def to_env(config: FSDPConfig, fsdp_version: int) -> dict[str, str]:
    """Return the variables for `config`. Booleans are lower case, as accelerate's launcher writes them."""
    policy = config.auto_wrap_policy.value
    env = {
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_USE_FSDP": _bool(config.enable_fsdp),
        "FSDP_SHARDING_STRATEGY": config.sharding_strategy.value,
        "FSDP_OFFLOAD_PARAMS": _bool(config.offload == "params"),
        "FSDP_BACKWARD_PREFETCH": config.backward_prefetch.value,
        "FSDP_FORWARD_PREFETCH": _bool(config.forward_prefetch),
        "FSDP_STATE_DICT_TYPE": config.state_dict_type + "_STATE_DICT",
        "FSDP_AUTO_WRAP_POLICY": _WRAPS.get(policy, policy),
        "FSDP_MIN_NUM_PARAMS": str(config.min_num_params),
        "FSDP_SYNC_MODULE_STATES": _bool(config.sync_module_states),
        "FSDP_USE_ORIG_PARAMS": _bool(config.use_orig_params is not False),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": _bool(config.activation_checkpointing),
    }
    if config.mixed_precision is not None:
        env["ACCELERATE_MIXED_PRECISION"] = config.mixed_precision
    if config.transformer_layer_cls:
        # accelerate looks classes up by their short names in the model
        env["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(name.rpartition(".")[2] for name in config.transformer_layer_cls)
    if fsdp_version == 2:
        env["FSDP_VERSION"] = "2"
        env["FSDP_RESHARD_AFTER_FORWARD"] = _bool(bool(config.reshard))
    return env


def from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the FSDPConfig fields that `env` sets, with accelerate's defaults for what it leaves out.

    Raises:
        UsageError: A variable holds a value that accelerate would refuse too.
    """
    fields: dict[str, Any] = {
        "enable_fsdp": _flag(env, "ACCELERATE_USE_FSDP", "false"),
        "sharding_strategy": _numbered(env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD"), _STRATEGIES),
        "offload": "params" if _flag(env, "FSDP_OFFLOAD_PARAMS", "false") else "none",
        "forward_prefetch": _flag(env, "FSDP_FORWARD_PREFETCH", "false"),
        "auto_wrap_policy": env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP"),
        "min_num_params": _positive(env.get("FSDP_MIN_NUM_PARAMS", "100000")),
        "transformer_layer_cls": env.get("FSDP_TRANSFORMER_CLS_TO_WRAP", ""),
        "sync_module_states": _flag(env, "FSDP_SYNC_MODULE_STATES", "true"),
        "activation_checkpointing": _flag(env, "FSDP_ACTIVATION_CHECKPOINTING", "false"),
        "state_dict_type": env.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
        "backward_prefetch": _numbered(env.get("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"), _PREFETCHES),
    }
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    fields["mixed_precision"] = None if precision == "no" else precision
    if "FSDP_USE_ORIG_PARAMS" in env and not _flag(env, "FSDP_USE_ORIG_PARAMS", "true"):
        fields["use_orig_params"] = False
    if env.get("FSDP_VERSION") == "2":
        fields["reshard_after_forward"] = _flag(env, "FSDP_RESHARD_AFTER_FORWARD", "true")
    return fields


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _flag(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name, default).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise UsageError(f"{name} is {env[name]!r} in the environment; it must be true or false.")


def _numbered(text: str, names: tuple[str, ...]) -> str:
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    return text


def _positive(text: str) -> int:
    if not text.isdigit():
        raise UsageError(f"FSDP_MIN_NUM_PARAMS is {text!r} in the environment; it must be a number of parameters.")
    return max(1, int(text))
