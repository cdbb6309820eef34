"""Separates LoRA adapters from base weights, and exports them in PEFT's format."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, UnsupportedFormatError, UsageError
from ckptkit.keymaps.patterns import compile_regex, fullmatch

_ROOT = "base_model.model."
_WRAPPED = re.compile(r"(?:.+?\.)?base_model\.model\.")  # may follow the name of a trainer's attribute
# base_model.model.<module>.lora_A.<adapter>.weight, but without <adapter> in adapter files.
_LORA = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
_BASE_LAYER = re.compile(r"(?:\.token_adapter)?(?:\.base_layer)+\.")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_ORIGINAL = re.compile(r"(?P<module>.+)\.original_module\.(?P<rest>.+)")
# Trained rows of an embedding (trainable_token_indices), and the additional tensors of KaSA, MonteCLoRA and VeLoRA.
_OTHER = re.compile(
    r"(?P<module>.+)\.(?P<kind>trainable_tokens_delta|lora_diag|lora_velora_embed|lora_monteclora_sampler)"
    r"(?:\.(?P<adapter>(?!std_prior$|expert_weights(?:_prior)?$|gaussian_var_prior$)[^.]+))?(?:\.(?P<rest>[^.]+))?"
)
_REPO = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "orthogonal")


@dataclass(slots=True)
class LoraPair:
    """The two LoRA factors of one module.

    Attributes:
        key: The module's stored name, without the prefix "base_model.model.". The name contains `base_layer` if
            adapters are nested.
        module: The module's name in the base model.
        factors: The two factors, under the keys "A" and "B".
    """

    key: str
    module: str
    factors: dict[str, Target] = field(default_factory=dict)
    embedding: bool = False

    @property
    def a(self) -> Target:
        return self.factors["A"]

    @property
    def b(self) -> Target:
        return self.factors["B"]

    @property
    def patterned(self) -> str:
        """The module name to match against rank and alpha patterns.

        For the `out_proj` of an nn.MultiheadAttention, this is the name of the attention module.
        """
        return self.module.rpartition(".")[0] if self.key.endswith(".base_layer.out_proj") else self.module


@dataclass(frozen=True, slots=True)
class AdapterSplit:
    """The tensors of a PEFT checkpoint, separated into adapter and base model.

    Attributes:
        base: The base model's tensors, by their names in the base model.
        pairs: The LoRA factors, by module.
        others: Other adapter tensors (DoRA magnitudes, LoRA biases, trained tokens), by their names in an adapter file.
        saved: Tensors of fully trained modules (modules_to_save), by their names in an adapter file.
        plain: The same tensors as in `base`, by their names in an adapter file.
        names: The adapters' names, usually just "default".
        dropped: Unused source tensors, each with the reason.
    """

    base: dict[str, Target]
    pairs: dict[str, LoraPair]
    others: dict[str, Target] = field(default_factory=dict)
    saved: dict[str, Target] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)
    plain: dict[str, Target] = field(default_factory=dict)


def without_base(names: Iterable[str]) -> bool:
    """Return whether `names` are those of a LoRA adapter and lack the base weights of an adapted module.

    This is the case in PEFT's own adapter files: they have base weights only for embeddings and fully trained modules.
    """
    adapted: set[str] = set()
    others: set[str] = set()
    for name in names:
        plain = _WRAPPED.sub("", name, count=1)
        if match := _LORA.fullmatch(plain):
            adapted.add(base_name(f"{match['module']}."))
        elif not _OTHER.fullmatch(plain) and not plain.endswith(".bias"):  # biases may be trained with the adapter
            others.add(base_name(name).rpartition(".")[0] + ".")
    return bool(adapted - others)


def base_name(name: str) -> str:
    """Return the base model's name for a PEFT model's tensor."""
    return _BASE_LAYER.sub(".", _WRAPPED.sub("", name, count=1) if _WRAPPED.match(name) else name)


def split_adapter(targets: Mapping[str, Target]) -> AdapterSplit | None:
    """Split a checkpoint into adapter and base tensors. Return None if it contains no adapter.

    Raises:
        CheckpointMismatchError: A factor lacks its counterpart, or names collide.
        UnsupportedFormatError: There are several adapters.
    """
    if not any(".lora_" in name and _LORA.fullmatch(name) for name in targets):
        return None
    split = AdapterSplit({}, {})
    adapters: dict[str, None] = {}
    plains = {name: _WRAPPED.sub("", name, count=1) if _WRAPPED.match(name) else name for name in targets}
    saved = {m["module"] for plain in plains.values() if (m := _SAVED.fullmatch(plain))}
    for name, target in targets.items():
        plain = plains[name]
        if match := _LORA.fullmatch(plain):
            adapters.setdefault(match["adapter"] or "default")
            _add_factor(split, match, target)
        elif match := _SAVED.fullmatch(plain):
            adapters.setdefault(match["adapter"])
            split.saved[f"{match['module']}.{match['rest']}"] = target
        elif match := _OTHER.fullmatch(plain):
            adapters.setdefault(match["adapter"] or "default")
            rest = f".{match['rest']}" if match["rest"] else ""
            split.others[f"{match['module']}.{match['kind']}{rest}"] = target
        elif (match := _ORIGINAL.fullmatch(plain)) and match["module"] in saved:
            split.dropped.update(dict.fromkeys(target.sources, "the original of a module that was trained in full"))
        else:
            _add_base(split, _BASE_LAYER.sub(".", plain), target)
            split.plain[plain] = target
    _name_modules(split)
    if len(adapters) > 1:
        raise UnsupportedFormatError(
            f"the checkpoint contains several adapters: {', '.join(adapters)}. Choose one by excluding "
            "the others: --exclude '*.NAME.*'."
        )
    alone = [pair.module for pair in split.pairs.values() if len(pair.factors) < 2]
    if alone:
        raise CheckpointMismatchError(f"lora_A or lora_B is missing for: {', '.join(alone)}.")
    return replace(split, names=tuple(adapters))


def refuse_other_kinds(targets: Mapping[str, Target]) -> None:
    """Raise if the tensors include a PEFT adapter other than LoRA, because no loader would accept their export.

    Raises:
        UnsupportedFormatError: There is such an adapter. The message names the module.
    """
    wrapped = [name for name in targets if _WRAPPED.match(name)]
    for name in wrapped:
        module, found, _ = name.partition(".base_layer.")
        if found:
            own = [other.removeprefix(module + ".") for other in wrapped if other.startswith(module + ".")]
            kind = next((part for part in own if not part.startswith("base_layer.")), "base_layer")
            raise UnsupportedFormatError(
                f"the checkpoint has a PEFT adapter other than LoRA: {module!r} has {kind!r}. Save it with PEFT's "
                "save_pretrained. For the base model alone: --key-map peft --exclude "
                f"'*.{kind.partition('.')[0]}*'."
            )


def adapter_config(given: Mapping[str, Any] | None, split: AdapterSplit, *, base: str | None) -> dict[str, Any]:
    """Return the given adapter_config.json, after comparing it with the tensors. Values are never guessed.

    Raises:
        UsageError: There is no config, or its lora_alpha is missing or not positive.
        UnsupportedFormatError: The config is of another kind of adapter.
        CheckpointMismatchError: The LoRA rank in the config differs from the LoRA rank of the tensors.
    """
    ranks = sorted({_rank(pair) for pair in split.pairs.values()})
    modules = sorted({pair.module.rpartition(".")[2] for pair in split.pairs.values()})
    if not given:
        raise UsageError(
            f"the checkpoint contains a LoRA adapter (rank {', '.join(map(str, ranks))}, on "
            f"{', '.join(modules)}), but not its alpha. Pass PEFT's adapter_config.json with "
            "--adapter-config FILE, or in the directory of --base."
        )
    if not isinstance(given.get("lora_alpha"), (int, float)) or isinstance(given.get("lora_alpha"), bool):
        raise UsageError(
            "the adapter config has no lora_alpha, and ckptkit does not guess it. Add the value used in training."
        )
    if given["lora_alpha"] <= 0:
        raise UsageError(
            f"the adapter config has lora_alpha {given['lora_alpha']}, which some tools write if the value is "
            "unknown. Set the value used in training."
        )
    if given.get("peft_type", "LORA") != "LORA":
        raise UnsupportedFormatError(f"the adapter is of type {given['peft_type']!r}; only LORA is supported.")
    made = {"peft_type": "LORA", **given}
    if len(ranks) == 1 and "r" not in made:
        made["r"] = ranks[0]  # taken from the tensors
    for pair in split.pairs.values():
        said = _by_pattern(made.get("rank_pattern"), pair.patterned, made.get("r"))
        if said != _rank(pair) and not _is_stacked(made, pair):
            raise CheckpointMismatchError(
                f"the adapter config has rank {said} for {pair.module!r}, but its tensors have rank {_rank(pair)}."
            )
    made.setdefault("target_modules", modules)
    if isinstance(made["target_modules"], (set, tuple)):
        made["target_modules"] = sorted(made["target_modules"])
    if base and not repo_of(made):
        made["base_model_name_or_path"] = base
    made["inference_mode"] = True
    return made


def repo_of(config: Mapping[str, Any]) -> str | None:
    """Return the Hub repo of the base model in an adapter config. Returns None if the config has a local path."""
    named = str(config.get("base_model_name_or_path") or "")
    return named if _REPO.fullmatch(named) and not os.path.lexists(named) else None


def named_base(given: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return a note if the exported adapter config names a base model that other machines cannot load."""
    before, now = given.get("base_model_name_or_path"), config.get("base_model_name_or_path")
    if before and before != now:
        return [f"the adapter config names {now} as the base model instead of {before}"]
    if repo_of(config):
        return []
    what = f"{now}, a path on the machine that trained it," if now else "nothing"
    return [f"the adapter config names {what} as the base model; --base ORG/NAME names a repo instead"]


def export_adapter(
    split: AdapterSplit, config: Mapping[str, Any], *, alone: bool = False
) -> tuple[dict[str, Target], tuple[str, ...]]:
    """Return two values: the tensors of adapter_model.safetensors, keyed by PEFT's names, and notes for the user.

    Args:
        alone: Whether the checkpoint contains the adapter without the base weights of the adapted modules. If so, all
            other tensors belong to the adapter, because PEFT stores fully trained modules, embeddings and biases under
            the base model's names.
    """
    made: dict[str, Target] = {}
    for pair in split.pairs.values():
        for letter, target in (("A", pair.a), ("B", pair.b)):
            name = f"lora_embedding_{letter}" if pair.embedding else f"lora_{letter}.weight"
            made[f"{_ROOT}{pair.key}.{name}"] = target
    others = {name: target for name, target in split.others.items() if not _is_tied_token_adapter(name, split, config)}
    made.update({_ROOT + name: target for name, target in (*others.items(), *split.saved.items())})
    biases = _trained_biases(split, config)
    made.update({_ROOT + name: target for name, target in (split.plain if alone else biases).items()})
    changed = changes_base(config)
    notes: tuple[str, ...] = ()
    if changed:
        notes = (f"{changed} changed the base weights before training: the adapter only fits the changed weights",)
    return {name: replace(target, name=name) for name, target in made.items()}, notes


def changes_base(config: Mapping[str, Any]) -> str:
    """Return the setting that makes PEFT change base weights when it creates an adapter, or ""."""
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        return f"init_lora_weights={start!r}"
    return "kasa_config" if config.get("kasa_config") else ""


def _is_tied_token_adapter(name: str, split: AdapterSplit, config: Mapping[str, Any]) -> bool:
    """Return whether PEFT would not store this tensor: the copy of the embedding's trained rows for a tied head.

    PEFT does not store the copy if the config's trainable_token_indices are a plain list, without names of modules.
    """
    indices = config.get("trainable_token_indices")
    head = name.endswith("lm_head.token_adapter.trainable_tokens_delta")
    return (
        head
        and isinstance(indices, list)
        and sum(other.endswith(".trainable_tokens_delta") for other in split.others) > 1
    )


def _trained_biases(split: AdapterSplit, config: Mapping[str, Any]) -> dict[str, Target]:
    """Return the base model's biases that belong to the adapter: all biases, or the biases of adapted modules.

    Raises:
        UnsupportedFormatError: PEFT does not know the config's `bias`.
    """
    kind = config.get("bias", "none")
    if kind not in ("none", "all", "lora_only"):
        raise UnsupportedFormatError(
            f"adapters with bias={kind!r} cannot be exported; PEFT supports none, all and lora_only."
        )
    if kind == "none":
        return {}
    modules = tuple(f"{pair.key}.base_layer.bias" for pair in split.pairs.values())
    biases = {name: target for name, target in split.plain.items() if name.endswith(".bias")}
    return {name: target for name, target in biases.items() if kind == "all" or name in modules}


def target_parameters(config: Mapping[str, Any]) -> list[str]:
    """Return the config's target_parameters. Raises CorruptCheckpointError if they are not a list of names."""
    given = config.get("target_parameters") or []
    if not isinstance(given, (list, tuple, set)) or not all(isinstance(key, str) for key in given):
        raise CorruptCheckpointError(
            f"adapter_config.json: target_parameters is {given!r:.80}, expected a list of names."
        )
    return sorted(given)


def is_of_parameter(config: Mapping[str, Any], module: str) -> bool:
    """Return whether the config's target_parameters include any parameter of `module`."""
    owners = [key.rpartition(".")[0] for key in target_parameters(config)]
    return any(not owner or module == owner or module.endswith(f".{owner}") for owner in owners)


def scaling(config: Mapping[str, Any], module: str) -> float:
    """Return the scale of B @ A: alpha / r, or alpha / sqrt(r) with rslora. Patterns may override alpha and r.

    Raises:
        CorruptCheckpointError: alpha or r is not a finite number, or r is not positive.
    """
    rank = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in (rank, alpha)) or rank <= 0:
        raise CorruptCheckpointError(
            f"adapter_config.json: {module!r} has rank {rank!r:.40} and lora_alpha {alpha!r:.40}, expected numbers."
        )
    return float(alpha / math.sqrt(rank)) if config.get("use_rslora") else float(alpha / rank)


def _add_factor(split: AdapterSplit, match: re.Match[str], target: Target) -> None:
    module, kind = match["module"], match["kind"]
    if kind == "lora_magnitude_vector":
        split.others[f"{module}.lora_magnitude_vector"] = target
    elif match["leaf"] == "bias":
        split.others[f"{module}.{kind}.bias"] = target
    else:
        pair = split.pairs.setdefault(module, LoraPair(module, module))
        pair.embedding = kind.startswith("lora_embedding")
        pair.factors[kind[-1]] = target


def _name_modules(split: AdapterSplit) -> None:
    """Set `module` of each pair to the module's name in the base model.

    If several parameters of a module have adapters (target_parameters), the adapters are nested. Their pairs keep the
    stored names, because the module's name would be the same for all of them.
    """
    plain = [module.replace(".base_layer", "") for module in split.pairs]
    for module, name in zip(list(split.pairs), plain, strict=True):
        pair = split.pairs.pop(module)
        pair.module = name if plain.count(name) == 1 else module
        split.pairs[pair.module] = pair


def _add_base(split: AdapterSplit, name: str, target: Target) -> None:
    if name in split.base:
        raise CheckpointMismatchError(f"two tensors have the base model's name {name!r}; one is {target.sources[0]!r}.")
    split.base[name] = replace(target, name=name)


def _rank(pair: LoraPair) -> int:
    return pair.a.shape[0] if pair.a.shape else 0


def _is_stacked(config: Mapping[str, Any], pair: LoraPair) -> bool:
    """Return whether a LoRA pair may adapt a parameter that stacks several experts.

    In such a pair, the factors of all experts are concatenated along the LoRA rank. The pair's LoRA rank is therefore a
    multiple of a rank in the config, and the config's target_parameters include a parameter of the pair's module.
    """
    if not is_of_parameter(config, pair.key.replace(".base_layer", "")):
        return False
    patterns = config.get("rank_pattern")
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    return any(isinstance(rank, int) and rank > 0 and not _rank(pair) % rank for rank in ranks)


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the module's name or a dotted suffix of this name.

    PEFT matches in the same way.
    """
    if isinstance(patterns, Mapping):
        for key, value in patterns.items():
            compile_regex(str(key))  # an unbalanced ")" would close the group below, so check the pattern alone first
            if fullmatch(compile_regex(rf"(.*\.)?({key})"), module):
                return value
    return default
