"""Defines FSDPConfig: all settings for training with FSDP2, validated together.

Also accepts the field names and string values of Oumi's `FSDPParams`, and accelerate's environment variables. Does not
import torch.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ckptkit.arguments import location, wrong
from ckptkit.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    pass


Size = int | Literal["auto"]
MixedPrecision = Literal["bf16", "fp16"]
Precision = Literal["mixed", "master"]
Offload = Literal["none", "params", "optimizer"]


class ShardingStrategy(str, enum.Enum):
    """How parameters are sharded over the data-parallel ranks. The names are FSDP1's."""

    FULL_SHARD = "FULL_SHARD"  # 1-D mesh; parameters are freed after forward (ZeRO-3)
    SHARD_GRAD_OP = "SHARD_GRAD_OP"  # 1-D mesh; parameters stay until backward is done (ZeRO-2)
    HYBRID_SHARD = "HYBRID_SHARD"  # mesh replicate x shard; parameters are freed after forward
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"  # mesh replicate x shard; parameters stay until backward is done
    NO_SHARD = "NO_SHARD"  # every rank keeps the full model, as with DDP

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are freed between forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

    @property
    def is_hybrid(self) -> bool:
        """Whether the shard groups are replicated."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


class WrapPolicy(str, enum.Enum):
    """How modules are chosen to become units. A unit's parameters are gathered and freed together."""

    AUTO = "AUTO"  # the block classes named by the model, otherwise the elements of its ModuleLists
    TRANSFORMER_BASED_WRAP = "TRANSFORMER_BASED_WRAP"  # modules of the classes in `transformer_layer_cls`
    SIZE_BASED_WRAP = "SIZE_BASED_WRAP"  # modules that have at least `min_num_params` parameters of their own
    BLOCKS = "BLOCKS"  # every element of every outermost ModuleList
    NO_WRAP = "NO_WRAP"  # the whole model is one unit


class BackwardPrefetch(str, enum.Enum):
    """When backward gathers the next unit."""

    BACKWARD_PRE = "BACKWARD_PRE"  # FSDP2's default: before the current unit computes
    BACKWARD_POST = "BACKWARD_POST"  # not in FSDP2: accepted with a warning, then treated as BACKWARD_PRE
    NO_PREFETCH = "NO_PREFETCH"  # only when it is needed: least memory, no overlap


_STATE_DICT_TYPES = {
    "FULL": "FULL",
    "FULL_STATE_DICT": "FULL",
    "SHARDED": "SHARDED",
    "SHARDED_STATE_DICT": "SHARDED",
    "LOCAL": "LOCAL",
    "LOCAL_STATE_DICT": "LOCAL",
}
_DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
}
_FLAGS = (
    "enable_fsdp",
    "keep_last_block",
    "cast_forward_inputs",
    "force_sum_reduction_for_comms",
    "mixed_modal",
    "wrap_lm_head",
    "activation_checkpointing",
    "sync_module_states",
)
_E = TypeVar("_E", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class FSDPConfig:
    """Validated settings for training with FSDP2. Strings are case-insensitive; aliases of Oumi and torch work too.

    Raises:
        UsageError: A value is unknown, or two settings conflict.
    """

    enable_fsdp: bool = True
    """False leaves models unwrapped."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """What to shard, and whether to free parameters after forward."""

    replicate: Size = "auto"
    """Number of copies of each shard group.

    "auto": the number of nodes for HYBRID_*, all ranks for NO_SHARD, else 1.
    """

    shard: Size = "auto"
    """Number of ranks that share one copy of the parameters. "auto": the world size divided by the other sizes."""

    tp: int = 1
    """Number of tensor-parallel ranks; the innermost mesh dimension."""

    cp: int = 1
    """Number of context-parallel ranks. Parameters are sharded over them too; the model must split the sequences."""

    reshard_after_forward: bool | int | None = None
    """What to do with parameters after forward; None leaves this to the sharding strategy.

    True frees them, False keeps them, a number reshards them to that many ranks.
    """

    keep_last_block: bool = False
    """True keeps the last block gathered after forward, because backward needs it first."""

    precision: Precision = "mixed"
    """"mixed": fp32 storage, low-precision compute. "master": low-precision storage, fp32 masters in the optimizer."""

    mixed_precision: MixedPrecision | None = None
    """The compute dtype: "bf16" or "fp16" (which enables a gradient scaler); None uses the model's dtype."""

    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = "fp32"
    """The dtype in which gradients are reduced; None: the compute dtype.

    With "fp32", fp64 gradients are still reduced in fp64.
    """

    initial_loss_scale: float = 2.0**16
    """The initial loss scale for fp16, from 1 to 2**24."""

    loss_scale_hysteresis: int = 2
    """The number of fp16 overflows after which the loss scale backs off; 1 backs off at every overflow."""

    output_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The dtype of the model's floating-point outputs; None: as computed."""

    cast_forward_inputs: bool = True
    """True casts each unit's floating-point inputs to the compute dtype; False leaves them unchanged."""

    gradient_divide_factor: float | None = None
    """The divisor of the sum of the gradients. None: the number of data-parallel and context-parallel ranks.

    The sum is over these ranks. Use 1.0 if the loss is already divided by the number of tokens on all ranks.
    """

    force_sum_reduction_for_comms: bool = False
    """True reduces gradients only by sums and divides them separately, as NCCL's zero-copy transfers require."""

    offload: Offload = "none"
    """What to keep on the host.

    "params": parameters and gradients. "optimizer": the optimizer's state, once `maybe_offload_optimizer` has moved it.
    """

    backward_prefetch: BackwardPrefetch | int = BackwardPrefetch.BACKWARD_PRE
    """The time at which backward gathers the next unit. A number explicitly prefetches that many units."""

    forward_prefetch: bool | int = False
    """True prefetches the next unit during forward; a number prefetches that many units."""

    state_dict_type: Literal["FULL", "SHARDED", "LOCAL"] = "SHARDED"
    """The state-dict type that `save_ckpt` writes."""

    auto_wrap_policy: WrapPolicy = WrapPolicy.AUTO
    """Which modules become units."""

    min_num_params: int = 100_000
    """SIZE_BASED_WRAP: the minimum number of parameters in a unit."""

    transformer_layer_cls: tuple[str, ...] = ()
    """TRANSFORMER_BASED_WRAP: class names, short or dotted. A comma-separated string is split."""

    exclude: tuple[str, ...] = ()
    """Class names or FQN globs. Matching modules and their children never become units."""

    ignored_params: tuple[str, ...] = ()
    """FQN globs of parameters that FSDP ignores.

    Each rank keeps their full values, in their own dtype, and their gradients are not reduced. To pass the parameters
    themselves, use `prepare_model(ignored_params=)`.
    """

    mixed_modal: bool = False
    """True keeps vision towers in the root unit, so that ranks may run different branches of them."""

    wrap_lm_head: bool = False
    """True makes units of the embedding and the output head (a single unit if they are tied)."""

    forward_methods: tuple[str, ...] = ("generate",)
    """Methods besides `forward` that need gathered parameters.

    They belong to the model or to a unit. Names of methods that don't exist are ignored.
    """

    activation_checkpointing: bool = False
    """True recomputes each block's activations in backward."""

    compile: bool | str = False
    """True compiles each block's forward; a string names the backend for torch.compile."""

    sync_module_states: bool = True
    """True broadcasts rank 0's parameters and buffers before sharding.

    With False, give all ranks the same initial values (from one seed or file): by default, data-parallel ranks have
    different seeds.
    """

    use_orig_params: bool | None = None
    """FSDP2 always keeps the original parameters, so False is accepted with a warning."""

    device: str = "auto"
    """The device to train on: "cpu", "cuda", ...

    "auto" means the accelerator that the model is on. If it is on none, "auto" means the machine's accelerator if the
    process group supports it, otherwise "cpu".
    """

    def __post_init__(self) -> None:
        _coerce(self)
        _check_flags(self)
        _check_sizes(self)
        _check_loss_scale(self)
        _check_combinations(self)
        _warn(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FSDPConfig:
        """Return a config with the fields in a mapping. Also accepts Oumi's keys (`cpu_offload`).

        Raises:
            UsageError: A key is unknown, or a value is invalid.
        """
        if not isinstance(values, Mapping):
            raise wrong("values", values, "a dict of FSDPConfig's fields")
        left = dict(values)
        if "cpu_offload" in left:
            cpu_offload = left.pop("cpu_offload")
            if not isinstance(cpu_offload, bool):
                raise UsageError(f"cpu_offload is {cpu_offload!r}; it must be True or False.")
            if cpu_offload and left.get("offload", "params") != "params":
                raise UsageError(
                    f"cpu_offload=True means offload='params', but offload is {left['offload']!r}. Set only one."
                )
            if cpu_offload:
                left["offload"] = "params"
        names = [item.name for item in dataclasses.fields(cls)]
        unknown = sorted(set(left) - set(names))
        if unknown:
            raise UsageError(
                f"FSDPConfig has no field {', '.join(map(repr, unknown))}. Its fields: {', '.join(names)}."
            )
        return cls(**left)

    @classmethod
    def from_yaml(cls, path: str | Path) -> FSDPConfig:
        """Return the config in a YAML file. It is in the file's `fsdp` section or, if there is none, at the top level.

        Raises:
            UsageError: The file is not YAML or not a mapping of fields, or a value is invalid.
        """
        try:
            import yaml
        except ImportError as error:
            raise MissingExtraError("Reading a YAML file needs PyYAML. Try: python -m pip install pyyaml") from error
        try:
            values = yaml.safe_load(Path(location("path", path)).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        where = f"{path}"
        if isinstance(values, dict) and "fsdp" in values:
            values, where = values["fsdp"], f"{path}, fsdp"
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise UsageError(f"{where}: a mapping of FSDPConfig fields is expected, found {type(values).__name__}.")
        return cls.from_dict(values)

    def to_accelerate_env(self, *, fsdp_version: Literal[1, 2] = 2) -> dict[str, str]:
        """Return the environment variables that configure accelerate's FSDP like this config."""

        return to_env(self, fsdp_version)

    @classmethod
    def from_accelerate_env(cls, env: Mapping[str, str] | None = None) -> FSDPConfig:
        """Return the config that accelerate would read from `env` (default: this process's environment)."""

        return cls.from_dict(from_env(os.environ if env is None else env))

    @property
    def reshard(self) -> bool | int:
        """What happens to the parameters after forward, in all units except the root.

        True frees them, False keeps them, a number reshards them to that many ranks.
        """
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.sharding_strategy.reshards_after_forward

    @property
    def needs_grad_scaler(self) -> bool:
        """Whether gradients are fp16 and so can underflow."""
        return self.mixed_precision == "fp16"


def _coerce(config: FSDPConfig) -> None:
    put = object.__setattr__  # the class is frozen; this is the only place that sets fields
    put(config, "sharding_strategy", _enum(ShardingStrategy, config.sharding_strategy, "sharding_strategy"))
    put(config, "auto_wrap_policy", _enum(WrapPolicy, config.auto_wrap_policy, "auto_wrap_policy"))
    if not isinstance(config.backward_prefetch, int):
        put(config, "backward_prefetch", _enum(BackwardPrefetch, config.backward_prefetch, "backward_prefetch"))
    put(config, "transformer_layer_cls", _names(config.transformer_layer_cls, "transformer_layer_cls"))
    put(config, "exclude", _names(config.exclude, "exclude"))
    put(config, "ignored_params", _names(config.ignored_params, "ignored_params"))
    put(config, "forward_methods", _names(config.forward_methods, "forward_methods"))
    kind = getattr(config.state_dict_type, "name", config.state_dict_type)
    found = _STATE_DICT_TYPES.get(str(kind).upper())
    if found is None:
        raise UsageError(f"state_dict_type is {kind!r}; it must be one of {', '.join(_STATE_DICT_TYPES)}.")
    put(config, "state_dict_type", found)
    put(config, "mixed_precision", _dtype(config.mixed_precision, "mixed_precision", get_args(MixedPrecision)))
    put(config, "reduce_dtype", _dtype(config.reduce_dtype, "reduce_dtype", ("fp32", "bf16", "fp16")))
    put(config, "output_dtype", _dtype(config.output_dtype, "output_dtype", ("fp32", "bf16", "fp16")))
    put(config, "device", str(config.device))
    for name, allowed in (("precision", get_args(Precision)), ("offload", get_args(Offload))):
        value = str(getattr(config, name)).lower()
        if value not in allowed:
            raise UsageError(f"{name} is {getattr(config, name)!r}; it must be one of {', '.join(allowed)}.")
        put(config, name, value)


def _check_flags(config: FSDPConfig) -> None:
    # Check the type, because the string "false" (from the environment or from quoted YAML) is truthy.
    for name in _FLAGS:
        if not isinstance(getattr(config, name), bool):
            raise UsageError(f"{name} is {getattr(config, name)!r}; it must be True or False.")
    if not isinstance(config.use_orig_params, (bool, type(None))):
        raise UsageError(f"use_orig_params is {config.use_orig_params!r}; it must be True, False or None.")
    backend = config.compile
    if not isinstance(backend, (bool, str)) or backend == "" or str(backend) in ("true", "false", "none"):
        raise UsageError(f"compile is {backend!r}; it must be True, False or the name of a backend of torch.compile.")
    if config.device in ("", "None", "gpu"):
        raise UsageError(f"device is {config.device!r}; it must be 'auto', 'cpu', 'cuda' or the like.")


def _check_sizes(config: FSDPConfig) -> None:
    for name in ("replicate", "shard", "tp", "cp"):
        value = getattr(config, name)
        auto = " or 'auto'" if name in ("replicate", "shard") else ""
        if value == "auto" and auto:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be a number of ranks, 1 or more{auto}.")
    smallest = config.min_num_params
    if not isinstance(smallest, int) or isinstance(smallest, bool) or smallest < 1:
        raise UsageError(f"min_num_params is {config.min_num_params!r}; it must be a number of parameters, 1 or more.")
    backward, forward = config.backward_prefetch, config.forward_prefetch
    if isinstance(backward, int) and (isinstance(backward, bool) or backward < 1):
        raise UsageError(
            f"backward_prefetch is {backward!r}; it must be a number of units, 1 or more, or one of "
            f"{', '.join(BackwardPrefetch.__members__)}."
        )
    if not isinstance(forward, int) or (forward < 1 and forward is not False):
        raise UsageError(f"forward_prefetch is {forward!r}; it must be True, False or a number of units, 1 or more.")
    factor = config.gradient_divide_factor
    if factor is not None and (
        isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf
    ):
        raise UsageError(f"gradient_divide_factor is {factor!r}; it must be a finite number above 0, or None.")
    reshard = config.reshard_after_forward
    if reshard is not None and (not isinstance(reshard, int) or (reshard < 1 and reshard is not False)):
        raise UsageError(
            f"reshard_after_forward is {reshard!r}; it must be True, False, a number of ranks (1 or more) or None."
        )


def _check_loss_scale(config: FSDPConfig) -> None:
    scale, hysteresis = config.initial_loss_scale, config.loss_scale_hysteresis
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 1 <= scale <= 2**24:
        raise UsageError(f"initial_loss_scale is {scale!r}; it must be a number from 1 to {2**24} (2**24).")
    if not isinstance(hysteresis, int) or isinstance(hysteresis, bool) or hysteresis < 1:
        raise UsageError(f"loss_scale_hysteresis is {hysteresis!r}; it must be a number of overflows, 1 or more.")
    if not config.needs_grad_scaler and (scale, hysteresis) != (2**16, 2):
        raise UsageError(
            f"initial_loss_scale and loss_scale_hysteresis belong to mixed_precision='fp16'; it is "
            f"{config.mixed_precision!r}, which needs no loss scale."
        )


def _check_combinations(config: FSDPConfig) -> None:
    strategy = config.sharding_strategy
    if config.precision == "master" and config.mixed_precision is None:
        raise UsageError(
            "precision='master' keeps parameters in a low precision, but mixed_precision is None. "
            "Try mixed_precision='bf16', or precision='mixed'."
        )
    if strategy is ShardingStrategy.NO_SHARD and config.shard not in (1, "auto"):
        raise UsageError(f"sharding_strategy NO_SHARD keeps every parameter whole, but shard is {config.shard}.")
    if strategy is ShardingStrategy.NO_SHARD and config.reshard_after_forward not in (None, True, False):
        raise UsageError("sharding_strategy NO_SHARD has nothing to reshard, but reshard_after_forward is a number.")
    if strategy is ShardingStrategy.NO_SHARD and config.cp > 1:
        raise UsageError(f"cp={config.cp} shards parameters over the context-parallel ranks, which NO_SHARD excludes.")
    one_copy = strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    if one_copy and config.replicate not in (1, "auto"):
        hybrid = "HYBRID_SHARD" if strategy.reshards_after_forward else "HYBRID_SHARD_ZERO2"
        raise UsageError(
            f"sharding_strategy {strategy.value} keeps one copy, but replicate is {config.replicate}. "
            f"Try sharding_strategy='{hybrid}'."
        )
    if config.transformer_layer_cls and config.auto_wrap_policy not in (
        WrapPolicy.TRANSFORMER_BASED_WRAP,
        WrapPolicy.AUTO,
    ):
        raise UsageError(
            f"transformer_layer_cls is given, but auto_wrap_policy is {config.auto_wrap_policy.value}. "
            "Try auto_wrap_policy='TRANSFORMER_BASED_WRAP'."
        )
    if config.use_orig_params is False and config.compile:
        raise UsageError("use_orig_params=False excludes compile=True: compiled blocks need the original parameters.")
    if config.offload == "params" and config.device not in ("auto", "cpu") and config.precision == "master":
        raise UsageError(
            "offload='params' runs the optimizer on the host, where precision='master' would keep two copies "
            "of each parameter. Try precision='mixed', or offload='optimizer'."
        )


def _warn(config: FSDPConfig) -> None:
    if config.use_orig_params is False:
        warnings.warn("use_orig_params=False has no effect: FSDP2 always keeps the original parameters.", stacklevel=4)
    if config.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        warnings.warn(
            "backward_prefetch BACKWARD_POST does not exist in FSDP2: it runs as BACKWARD_PRE.",
            stacklevel=4,
        )


def _enum(kind: type[_E], value: object, name: str) -> _E:
    text = str(getattr(value, "name", value)).strip().upper().lstrip("_")  # torch's name is _HYBRID_SHARD_ZERO2
    if text == "NONE" and kind is BackwardPrefetch:
        text = "NO_PREFETCH"
    if text not in kind.__members__:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(kind.__members__)}.")
    return kind[text]


def _dtype(value: object, name: str, allowed: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    found = _DTYPES.get(str(value).lower().removeprefix("torch."))
    if found not in allowed:
        raise UsageError(f"{name} is {value!r}; it must be None or one of {', '.join(allowed)}.")
    return found


def _names(value: object, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise UsageError(f"{name} is {value!r}; it must be a string or a list of strings.")


# --- conversion to and from the environment variables of `accelerate launch`; imports neither torch nor accelerate


# accelerate numbers these values from 1, in this order (accelerate.utils.constants).
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_WRAPS = {"AUTO": "TRANSFORMER_BASED_WRAP", "BLOCKS": "TRANSFORMER_BASED_WRAP"}  # accelerate guesses the classes itself
_TRUE, _FALSE = {"1", "true", "t", "yes", "y", "on"}, {"0", "false", "f", "no", "n", "off"}


def to_env(config: FSDPConfig, fsdp_version: int) -> dict[str, str]:
    """Return accelerate's variables for `config`. Booleans are lower case, as accelerate's launcher writes them."""
    policy = config.auto_wrap_policy.value
    env = {
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_USE_FSDP": _bool(config.enable_fsdp),
        "FSDP_SHARDING_STRATEGY": config.sharding_strategy.value,
        "FSDP_OFFLOAD_PARAMS": _bool(config.offload == "params"),
        # accelerate prefetches either one unit or none
        "FSDP_BACKWARD_PREFETCH": getattr(config.backward_prefetch, "value", "BACKWARD_PRE"),
        "FSDP_FORWARD_PREFETCH": _bool(bool(config.forward_prefetch)),
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
        # accelerate finds classes in the model by their short names
        env["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(name.rpartition(".")[2] for name in config.transformer_layer_cls)
    if fsdp_version == 2:
        env["FSDP_VERSION"] = "2"
        env["FSDP_RESHARD_AFTER_FORWARD"] = _bool(bool(config.reshard))
    return env


def from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the FSDPConfig fields set by `env`, with accelerate's defaults for all others.

    Raises:
        UsageError: A variable has a value that accelerate would refuse, too.
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
