"""Defines FSDPConfig: all settings for training with FSDP2, validated together.

FSDPConfig also accepts the field names and string values of Oumi's `FSDPParams`, and accelerate's environment
variables. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptkit.arguments import location, wrong
from ckptkit.errors import MissingExtraError, UsageError

Size = int | Literal["auto"]
MixedPrecision = Literal["bf16", "fp16"]
Precision = Literal["mixed", "master"]
Offload = Literal["none", "params", "optimizer"]


class ShardingStrategy(str, enum.Enum):
    """Selects how parameters are sharded over the data-parallel ranks. FSDP1 uses the same names."""

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
    """Selects how modules are chosen to become units. A unit's parameters are gathered and freed together."""

    # modules of the classes in `transformer_layer_cls`, by default those in the model's `_no_split_modules` and in
    # `units.DEFAULT_CLASSES`; if the model has no such modules, the same as BLOCKS
    AUTO = "AUTO"
    TRANSFORMER_BASED_WRAP = "TRANSFORMER_BASED_WRAP"  # like AUTO, but raises if the model has no such modules
    SIZE_BASED_WRAP = "SIZE_BASED_WRAP"  # modules that have at least `min_num_params` parameters of their own
    BLOCKS = "BLOCKS"  # every element of every outermost ModuleList
    NO_WRAP = "NO_WRAP"  # the whole model is one unit


class BackwardPrefetch(str, enum.Enum):
    """Selects when backward gathers the next unit."""

    BACKWARD_PRE = "BACKWARD_PRE"  # FSDP2's default: before the current unit computes
    BACKWARD_POST = "BACKWARD_POST"  # not in FSDP2: accepted with a warning, then treated as BACKWARD_PRE
    NO_PREFETCH = "NO_PREFETCH"  # only when it is needed: least memory, no overlap


@dataclass(frozen=True, slots=True)
class FSDPConfig:
    """Holds validated settings for FSDP2 training.

    String values are case-insensitive. Oumi's and torch's names for the same settings are accepted, too.

    Raises:
        UsageError: A value is unknown, or two settings conflict.
    """

    enable_fsdp: bool = True
    """Whether to wrap models. False returns models unchanged."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """What is sharded, and whether parameters are freed after forward.

    "FULL_SHARD" frees parameters after forward; "SHARD_GRAD_OP" keeps them until backward is done. "HYBRID_SHARD" and
    "HYBRID_SHARD_ZERO2" do the same, with several copies of the parameters (see `replicate`). "NO_SHARD" keeps the full
    model on every rank.
    """

    replicate: Size = "auto"
    """Number of copies of the parameters. Each copy has its own group of ranks.

    "auto" means 1 for FULL_SHARD and SHARD_GRAD_OP, and otherwise the world size divided by the other sizes. If `shard`
    is "auto", too, HYBRID_* strategies make one copy per node.
    """

    shard: Size = "auto"
    """Number of ranks that share one copy of the parameters.

    "auto" means 1 for NO_SHARD, and otherwise the world size divided by the other sizes. If `replicate` is "auto", too,
    HYBRID_* strategies shard over the ranks of one node, divided by tp x cp.
    """

    tp: int = 1
    """Number of tensor-parallel ranks, which form the innermost mesh dimension."""

    cp: int = 1
    """Number of context-parallel ranks.

    Parameters are also sharded over these ranks. The model must split the sequences.
    """

    reshard_after_forward: bool | int | None = None
    """How parameters are treated after forward. None leaves this to the sharding strategy.

    True frees the parameters, False keeps them, and a number reshards them over that many ranks.
    """

    keep_last_block: bool = False
    """True keeps the last block gathered after forward, because backward needs it first."""

    precision: Precision = "mixed"
    """The dtypes of parameters and compute.

    "mixed" stores fp32 parameters and computes in low precision. "master" stores low-precision parameters, with fp32
    masters in the optimizer.
    """

    mixed_precision: MixedPrecision | None = None
    """The compute dtype: "bf16" or "fp16" (which enables a gradient scaler). None uses the model's dtype."""

    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = "fp32"
    """The dtype in which gradients are reduced. None means the compute dtype.

    With "fp32", fp64 gradients are still reduced in fp64.
    """

    initial_loss_scale: float = 2.0**16
    """The initial loss scale for fp16, from 1 to 2**24."""

    loss_scale_hysteresis: int = 2
    """The number of fp16 overflows after which the loss scale is reduced. 1 reduces the scale at every overflow."""

    output_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The dtype to which the model's floating-point outputs are cast. None means no cast."""

    cast_forward_inputs: bool = True
    """Whether each unit's floating-point inputs are cast to the compute dtype."""

    gradient_divide_factor: float | None = None
    """The divisor of the gradients after they are summed over the data-parallel and context-parallel ranks.

    None means the number of these ranks. Use 1.0 if the loss is already divided by the number of tokens on all ranks.
    """

    force_sum_reduction_for_comms: bool = False
    """Whether gradients are reduced only by sums and divided separately, as NCCL's zero-copy transfers require."""

    offload: Offload = "none"
    """What to keep on the host.

    "params" keeps parameters and gradients on the host. "optimizer" keeps the optimizer's state on the host after a
    call of `maybe_offload_optimizer`.
    """

    backward_prefetch: BackwardPrefetch | int = BackwardPrefetch.BACKWARD_PRE
    """When backward gathers the next unit: "BACKWARD_PRE" (before the current unit computes) or "NO_PREFETCH" (when it
    is needed, which needs the least memory). A number prefetches that many units."""

    forward_prefetch: bool | int = False
    """True prefetches the next unit during forward. A number prefetches that many units."""

    state_dict_type: Literal["FULL", "SHARDED", "LOCAL"] = "SHARDED"
    """The state-dict type that `save_ckpt` writes."""

    auto_wrap_policy: WrapPolicy = WrapPolicy.AUTO
    """The way to choose the modules that become units. A unit's parameters are gathered and freed together.

    "AUTO" and "TRANSFORMER_BASED_WRAP" choose the modules of the classes in `transformer_layer_cls`, by default those
    in the model's `_no_split_modules` and in a list of known classes. If the model has no such modules, "AUTO" is the
    same as "BLOCKS", and "TRANSFORMER_BASED_WRAP" raises. "BLOCKS" chooses every element of every outermost ModuleList.
    "SIZE_BASED_WRAP" chooses modules that have at least `min_num_params` parameters of their own. With "NO_WRAP", the
    whole model is one unit.
    """

    min_num_params: int = 100_000
    """The minimum number of parameters in a unit, for "SIZE_BASED_WRAP"."""

    transformer_layer_cls: tuple[str, ...] = ()
    """The short or dotted names of classes to wrap, for "TRANSFORMER_BASED_WRAP" and "AUTO".

    A comma-separated string is split.
    """

    exclude: tuple[str, ...] = ()
    """Class names or FQN globs. Matching modules and their children never become units."""

    ignored_params: tuple[str, ...] = ()
    """FQN globs of parameters that FSDP ignores.

    Each rank keeps the full values of these parameters, in their original dtype. Their gradients are not reduced. To
    pass parameters instead of globs, use `prepare_model(ignored_params=)`.
    """

    mixed_modal: bool = False
    """True keeps vision towers in the root unit, so that each rank may run or skip each tower."""

    wrap_lm_head: bool = False
    """True makes the embedding and the output head separate units, or a single unit if they are tied."""

    forward_methods: tuple[str, ...] = ("generate",)
    """Methods of the model or of its units, besides `forward`, that need gathered parameters.

    Names of missing methods are ignored.
    """

    activation_checkpointing: bool = False
    """True recomputes each block's activations in backward."""

    compile: bool | str = False
    """True compiles each block's forward. A string names the backend for torch.compile."""

    sync_module_states: bool = True
    """True broadcasts rank 0's parameters and buffers before sharding.

    With False, you must give all ranks the same initial values (from the same seed or file), because data-parallel
    ranks have different seeds by default.
    """

    use_orig_params: bool | None = None
    """FSDP2 always keeps the original parameters, so False is accepted with a warning."""

    device: str = "auto"
    """The device to train on: "cpu", "cuda", ...

    "auto" means the accelerator that the model is on. If the model is on the CPU, "auto" means the machine's
    accelerator. If the machine has none, or the process group does not support it, "auto" means "cpu".
    """

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            # The class is frozen; only this line sets fields.
            object.__setattr__(self, name, check(name, getattr(self, name)))
        _check_combinations(self)
        if self.use_orig_params is False:
            warnings.warn(
                "use_orig_params=False has no effect: FSDP2 always keeps the original parameters.", stacklevel=3
            )
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            warnings.warn(
                "backward_prefetch BACKWARD_POST does not exist in FSDP2: it runs as BACKWARD_PRE.", stacklevel=3
            )

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
            cpu_offload = _flag("cpu_offload", left.pop("cpu_offload"))
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
        """Return the config from a YAML file: from its section `fsdp`, or from its top level if it has no such section.

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
        """Return the environment variables that configure accelerate's FSDP like this config.

        Args:
            fsdp_version: accelerate's FSDP version. 1 leaves out the variables that only version 2 reads.
        """
        policy = self.auto_wrap_policy
        if policy in (WrapPolicy.AUTO, WrapPolicy.BLOCKS):  # accelerate guesses the classes itself
            policy = WrapPolicy.TRANSFORMER_BASED_WRAP
        env: dict[str, Any] = {
            "ACCELERATE_DYNAMO_BACKEND": "NO",
            "ACCELERATE_DYNAMO_MODE": "default",
            "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
            "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
            "ACCELERATE_USE_FSDP": self.enable_fsdp,
            "FSDP_SHARDING_STRATEGY": self.sharding_strategy.value,
            "FSDP_OFFLOAD_PARAMS": self.offload == "params",
            # accelerate prefetches either one unit or none
            "FSDP_BACKWARD_PREFETCH": getattr(self.backward_prefetch, "value", "BACKWARD_PRE"),
            "FSDP_FORWARD_PREFETCH": bool(self.forward_prefetch),
            "FSDP_STATE_DICT_TYPE": self.state_dict_type + "_STATE_DICT",
            "FSDP_AUTO_WRAP_POLICY": policy.value,
            "FSDP_MIN_NUM_PARAMS": str(self.min_num_params),
            "FSDP_SYNC_MODULE_STATES": self.sync_module_states,
            "FSDP_USE_ORIG_PARAMS": self.use_orig_params is not False,
            "FSDP_CPU_RAM_EFFICIENT_LOADING": True,
            "FSDP_ACTIVATION_CHECKPOINTING": self.activation_checkpointing,
        }
        if self.mixed_precision is not None:
            env["ACCELERATE_MIXED_PRECISION"] = self.mixed_precision
        if self.transformer_layer_cls:
            # accelerate finds classes in the model by their short names
            classes = [name.rpartition(".")[2] for name in self.transformer_layer_cls]
            env["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(classes)
        if fsdp_version == 2:
            env |= {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": bool(self.reshard)}
        # accelerate's launcher writes booleans in lower case
        return {name: str(value).lower() if isinstance(value, bool) else value for name, value in env.items()}

    @classmethod
    def from_accelerate_env(cls, env: Mapping[str, str] | None = None) -> FSDPConfig:
        """Return the config that accelerate would read from `env` (default: this process's environment).

        Raises:
            UsageError: A variable has an invalid value, which accelerate would also refuse.
        """
        env = os.environ if env is None else env
        smallest = env.get("FSDP_MIN_NUM_PARAMS", "100000")
        if not smallest.isdigit():
            raise UsageError(
                f"FSDP_MIN_NUM_PARAMS is {smallest!r} in the environment; it must be a number of parameters."
            )
        precision = env.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        fields: dict[str, Any] = {
            "enable_fsdp": _env_flag(env, "ACCELERATE_USE_FSDP", "false"),
            "sharding_strategy": _numbered(env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD"), _STRATEGIES),
            "offload": "params" if _env_flag(env, "FSDP_OFFLOAD_PARAMS", "false") else "none",
            "forward_prefetch": _env_flag(env, "FSDP_FORWARD_PREFETCH", "false"),
            "auto_wrap_policy": env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP"),
            "min_num_params": max(1, int(smallest)),
            "transformer_layer_cls": env.get("FSDP_TRANSFORMER_CLS_TO_WRAP", ""),
            "sync_module_states": _env_flag(env, "FSDP_SYNC_MODULE_STATES", "true"),
            "activation_checkpointing": _env_flag(env, "FSDP_ACTIVATION_CHECKPOINTING", "false"),
            "state_dict_type": env.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
            "backward_prefetch": _numbered(env.get("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"), _PREFETCHES),
            "mixed_precision": None if precision == "no" else precision,
        }
        if not _env_flag(env, "FSDP_USE_ORIG_PARAMS", "true"):
            fields["use_orig_params"] = False
        if env.get("FSDP_VERSION") == "2":
            fields["reshard_after_forward"] = _env_flag(env, "FSDP_RESHARD_AFTER_FORWARD", "true")
        return cls(**fields)

    @property
    def reshard(self) -> bool | int:
        """How the parameters of all units except the root are treated after forward.

        True frees the parameters, False keeps them, and a number reshards them over that many ranks.
        """
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.sharding_strategy.reshards_after_forward

    @property
    def needs_grad_scaler(self) -> bool:
        """Whether training computes in fp16, so that gradients underflow without a loss scale."""
        return self.mixed_precision == "fp16"


# --- the checks of single options: each takes an option's name and value, and returns the value to keep

_Check = Callable[[str, Any], Any]


def _only(wanted: str, fits: Callable[[Any], bool]) -> _Check:
    """Return a check that accepts the values for which `fits` returns True."""

    def check(name: str, value: Any) -> Any:
        if not fits(value):
            raise wrong(name, value, wanted)
        return value

    return check


def _choice(table: Mapping[str, Any]) -> _Check:
    """Return a check that takes a key of `table` and returns the key's value.

    The check ignores upper and lower case. It also accepts torch's enum member or dtype of the same name.
    """
    values = {key.upper(): value for key, value in table.items()}

    def check(name: str, value: Any) -> Any:
        # torch's names: _HYBRID_SHARD_ZERO2, torch.bfloat16
        text = str(getattr(value, "name", value)).strip().upper().lstrip("_").removeprefix("TORCH.")
        if text not in values:
            shown = value if value is None or isinstance(value, (bool, int)) else str(value)
            raise wrong(name, shown, f"one of {', '.join(table)}")
        return values[text]

    return check


def _names(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise wrong(name, value, "a string or a list of strings")


def _backward_prefetch(name: str, value: Any) -> Any:
    return value if _is_count(value) else _prefetch_mode(name, value)


def _device(name: str, value: Any) -> str:
    if str(value) in ("", "None", "gpu"):
        raise wrong(name, str(value), "'auto', 'cpu', 'cuda' or the like")
    return str(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)  # the string "false" (from the environment or from quoted YAML) is truthy


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 1


_flag = _only("True or False", _is_bool)
_ranks = _only("a number of ranks, 1 or more", _is_count)
_ranks_or_auto = _only("a number of ranks, 1 or more, or 'auto'", lambda value: value == "auto" or _is_count(value))
_HALF = {"None": None, "bf16": "bf16", "fp16": "fp16", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_dtype = _choice({**_HALF, "fp32": "fp32", "float32": "fp32"})
_prefetch_mode = _choice({**BackwardPrefetch.__members__, "None": BackwardPrefetch.NO_PREFETCH})
_CHECKS: dict[str, _Check] = {
    "enable_fsdp": _flag,
    "sharding_strategy": _choice(ShardingStrategy.__members__),
    "replicate": _ranks_or_auto,
    "shard": _ranks_or_auto,
    "tp": _ranks,
    "cp": _ranks,
    "reshard_after_forward": _only(
        "True, False, a number of ranks (1 or more) or None",
        lambda value: value is None or _is_bool(value) or _is_count(value),
    ),
    "keep_last_block": _flag,
    "precision": _choice({"mixed": "mixed", "master": "master"}),
    "mixed_precision": _choice(_HALF),
    "reduce_dtype": _dtype,
    "initial_loss_scale": _only(
        f"a number from 1 to {2**24} (2**24)", lambda value: _is_number(value) and 1 <= value <= 2**24
    ),
    "loss_scale_hysteresis": _only("a number of overflows, 1 or more", _is_count),
    "output_dtype": _dtype,
    "cast_forward_inputs": _flag,
    "gradient_divide_factor": _only(
        "a finite number above 0, or None",
        lambda value: value is None or (_is_number(value) and 0 < value < math.inf),
    ),
    "force_sum_reduction_for_comms": _flag,
    "offload": _choice({"none": "none", "params": "params", "optimizer": "optimizer"}),
    "backward_prefetch": _backward_prefetch,
    "forward_prefetch": _only(
        "True, False or a number of units, 1 or more", lambda value: _is_bool(value) or _is_count(value)
    ),
    "state_dict_type": _choice(
        {kind + end: kind for kind in ("FULL", "SHARDED", "LOCAL") for end in ("", "_STATE_DICT")}
    ),
    "auto_wrap_policy": _choice(WrapPolicy.__members__),
    "min_num_params": _only("a number of parameters, 1 or more", _is_count),
    "transformer_layer_cls": _names,
    "exclude": _names,
    "ignored_params": _names,
    "mixed_modal": _flag,
    "wrap_lm_head": _flag,
    "forward_methods": _names,
    "activation_checkpointing": _flag,
    "compile": _only(
        "True, False or the name of a backend of torch.compile",
        lambda value: isinstance(value, (bool, str)) and value not in ("", "true", "false", "none"),
    ),
    "sync_module_states": _flag,
    "use_orig_params": _only("True, False or None", lambda value: value is None or _is_bool(value)),
    "device": _device,
}


def _check_combinations(config: FSDPConfig) -> None:
    strategy = config.sharding_strategy
    if not config.needs_grad_scaler and (config.initial_loss_scale, config.loss_scale_hysteresis) != (2**16, 2):
        raise UsageError(
            f"initial_loss_scale and loss_scale_hysteresis belong to mixed_precision='fp16'; it is "
            f"{config.mixed_precision!r}, which needs no loss scale."
        )
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
        raise UsageError(
            f"cp={config.cp} shards parameters over the context-parallel ranks, but sharding_strategy NO_SHARD keeps "
            "every parameter whole."
        )
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
        raise UsageError(
            "use_orig_params=False conflicts with compile=True: compiled blocks need the original parameters."
        )
    if config.offload == "params" and config.device not in ("auto", "cpu") and config.precision == "master":
        raise UsageError(
            "offload='params' runs the optimizer on the host, where precision='master' would keep two copies "
            "of each parameter. Try precision='mixed', or offload='optimizer'."
        )


# --- the environment variables of `accelerate launch`

# accelerate numbers these values from 1, in this order (accelerate.utils.constants).
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")


def _env_flag(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name, default).strip().lower()
    if text in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text in ("0", "false", "f", "no", "n", "off"):
        return False
    raise UsageError(f"{name} is {env[name]!r} in the environment; it must be true or false.")


def _numbered(text: str, names: tuple[str, ...]) -> str:
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    return text
