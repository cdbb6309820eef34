"""Merging adapters gives the bits of PEFT's merge_and_unload."""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import convert, reshard
from ckptkit.catalog.box import Box
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, UnsupportedFormatError, UsageError
from ckptkit.formats.sources import SourceReader
from ckptkit.keymaps.keymap import NameMap
from ckptkit.keymaps.patterns import NamePattern
from ckptkit.keymaps.rules import Concat, Split, Transpose
from ckptkit.offline.copying.gather import Gatherer
from ckptkit.offline.copying.plan import ComputedTensor, Placement, Plan
from ckptkit.offline.copying.runs import prepare
from ckptkit.offline.export.adapter_merge import adapter_changes
from ckptkit.offline.export.adapters import split_adapter
from tests.lazy import LazyModule
from tests.offline.exports import Planned, Result, assert_same, converted, planned, read_model, stored, write_model
from tests.offline.folders import refused

torch = pytest.importorskip("torch")
peft, lora_config = LazyModule("peft"), LazyModule("peft.tuners.lora.config")
nn = torch.nn


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence PEFT, which warns of most of the configs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Experts(nn.Module):  # type: ignore[misc,name-defined]
    """Parameters of three experts: [experts, out, in], or [experts, in, out]."""

    def __init__(self, *, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        up, down = ((8, 20), (10, 8)) if is_transposed else ((20, 8), (8, 10))
        self.gate_up = nn.Parameter(torch.randn(3, *up))
        self.down = nn.Parameter(torch.randn(3, *down))
        self.shift = nn.Parameter(torch.randn(3, 8))


def model() -> Any:
    from transformers.pytorch_utils import Conv1D

    return nn.ModuleDict({
        "q": nn.Linear(40, 24), "k": nn.Linear(40, 8), "square": nn.Linear(24, 24), "embed": nn.Embedding(33, 16),
        "c_attn": Conv1D(48, 16), "c_proj": Conv1D(16, 16), "attention": nn.MultiheadAttention(16, 2),
        "conv1": nn.Conv1d(6, 10, 3), "conv2": nn.Conv2d(6, 10, 3), "flat": nn.Conv2d(6, 10, 1),
        "conv3": nn.Conv3d(4, 6, 2), "grouped": nn.Conv2d(6, 10, 3, groups=2), "flat3": nn.Conv3d(4, 6, 1),
        "experts": Experts(), "transposed": Experts(is_transposed=True), "plain": nn.Linear(40, 24, bias=False),
    })  # fmt: skip


def adapted_by(config: Mapping[str, Any], base: Any, *, dtype: str | None = None) -> Any:
    """Return a PEFT model whose adapter is not at its initial values."""
    made = {key: getattr(lora_config, v)() if str(v).endswith("Config") else v for key, v in config.items()}
    with quiet():
        adapted = peft.get_peft_model(base, peft.LoraConfig(**made), autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name or "trainable_tokens" in name:
            random = torch.randn(parameter.shape)
            random = random.abs() + 0.5 if "magnitude" in name else random
            parameter.data = random.to(getattr(torch, dtype) if dtype else parameter.dtype)
    return adapted


def of(case: str | None = None, **settings: Any) -> dict[str, Any]:
    """Return the config of a case, or of other settings."""
    return {"r": 4, "lora_alpha": 6, **(CASES[case] if case else {}), **settings}


def trained(config: Mapping[str, Any], folder: Path, *, dtype: str, adapter_dtype: str | None = None) -> Any:
    """Write the state of a trained adapter with its base."""
    torch.manual_seed(1)
    adapted = adapted_by(config, model().to(getattr(torch, dtype)), dtype=adapter_dtype)
    write_model(folder, adapted.state_dict())
    return adapted


def expected(adapted: Any) -> dict[str, Any]:
    with quiet():
        return dict(adapted.merge_and_unload().state_dict())


def merged(folder: Path, config: Mapping[str, Any], **options: Any) -> Planned:
    return planned(folder, adapter_config=config, merge_adapter=True, **options)


LINEAR = ["q", "k", "square", "plain"]
CASES: dict[str, dict[str, Any]] = {
    "linear and embedding": {"target_modules": [*LINEAR, "embed"]},
    "rslora and patterns": {
        "target_modules": [*LINEAR, "embed"], "use_rslora": True,
        "rank_pattern": {"k": 2, "embed": 3}, "alpha_pattern": {"q": 9},
    },
    "dora": {"target_modules": [*LINEAR, "embed"], "use_dora": True},
    "conv": {"target_modules": ["conv1", "conv2", "flat", "conv3"]},
    "conv dora": {"target_modules": ["conv1", "conv2", "flat", "conv3"], "use_dora": True},
    "conv bias": {"target_modules": ["conv1", "conv2", "flat", "conv3"], "lora_bias": True},
    "fan in": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "linear bias": {"target_modules": ["q", "k", "square"], "lora_bias": True},
    "fan in dora": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    "fan in unsaid": {"target_modules": ["c_attn", "c_proj"]},
    "attention": {"target_modules": ["attention"], "rank_pattern": {"attention": 3}},
    "experts": {
        "target_modules": [], "target_parameters": ["experts.gate_up", "experts.down", "experts.shift"],
        "rank_pattern": {"experts.down": 2}, "alpha_pattern": {"experts.gate_up": 5},
    },
    "experts transposed": {"target_modules": ["k"], "target_parameters": ["transposed.gate_up", "transposed.down"]},
    "weight as parameter": {"target_modules": [], "target_parameters": ["q.weight"]},
    "modules to save": {"target_modules": ["q"], "modules_to_save": ["k", "embed"]},
    "biases trained": {"target_modules": ["q"], "bias": "all"},
    "tokens": {"target_modules": ["q"], "trainable_token_indices": {"embed": [7, 2, 30]}},
    "blocks of A": {"target_modules": ["q", "k"], "use_bdlora": {"target_modules_bd_a": ["q", "k"], "nblocks": 2}},
    "blocks of B": {"target_modules": ["q", "k"], "use_bdlora": {"target_modules_bd_b": ["q", "k"], "nblocks": 2}},
    "kasa": {"target_modules": LINEAR, "kasa_config": "KasaConfig"},
    "monteclora": {"target_modules": LINEAR, "monteclora_config": "MontecloraConfig"},
    "velora": {"target_modules": LINEAR, "velora_config": "VeloraConfig"},
    "mica": {"target_modules": [*LINEAR, "embed"], "init_lora_weights": "mica"},
}  # fmt: skip


MIXED = (
    "rslora and patterns", "dora", "conv", "conv dora", "fan in dora", "attention", "experts", "tokens", "kasa", "mica",
)  # fmt: skip


@pytest.mark.parametrize(("case", "dtype", "adapter_dtype"), [
    ("linear and embedding", "float64", None),
    *((case, dtype, None) for dtype in ("float32", "bfloat16", "float16") for case in CASES),
    *((case, "bfloat16", "float32") for case in MIXED),
])  # fmt: skip
def test_a_merged_adapter_has_the_bits_of_pefts_merge(tmp_path, case, dtype, adapter_dtype):
    adapted = trained(of(case), tmp_path, dtype=dtype, adapter_dtype=adapter_dtype)
    assert_same(merged(tmp_path, of(case)).tensors, expected(adapted))


def apart(folder: Path, case: str) -> tuple[Any, Path, Path]:
    """Write PEFT's files of an adapter and its base; return the model and both folders."""
    adapted = trained(of(case), folder, dtype="bfloat16")
    with quiet():
        adapted.save_pretrained(str(folder / "adapter"))
    torch.manual_seed(1)
    write_model(folder / "base", model().to(torch.bfloat16).state_dict())
    return adapted, folder / "adapter", folder / "base"


def merge_into(base: Path | str, adapter: Path, **options: Any) -> Result:
    """Merge an adapter into its base, next to the adapter; return the report and the tensors."""
    return converted(adapter, adapter.parent / "out", merge_adapter=True, base=str(base), **options)


@pytest.mark.parametrize("case", [case for case in CASES if case != "kasa"])
def test_an_adapter_is_merged_into_a_base_at_another_url(tmp_path, case):
    adapted, adapter, base = apart(tmp_path, case)
    found = merge_into(base, adapter, verify=True)
    assert "base weights: base" in found.report.notes
    assert_same(found.tensors, expected(adapted))


def test_an_adapter_file_may_contain_the_base_weight_of_its_embedding(tmp_path):
    adapted, adapter, base = apart(tmp_path, "linear and embedding")  # saved if the embedding is called embed_tokens
    name = "base_model.model.embed.base_layer.weight"
    write_model(adapter, {**read_model(adapter), name: adapted.state_dict()[name]})
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    assert_same(merge_into(base, adapter, verify=True).tensors, expected(adapted))


def test_the_base_may_have_another_format_and_storage(tmp_path):
    adapted, adapter, base = apart(tmp_path, "modules to save")
    remote, local = "memory://adapters/base/step_00000007", tmp_path / "step_00000007"
    convert(str(base), remote, to="local", world_size=3)
    reshard(remote, str(local), world_size=2)
    for place in (remote, local):
        assert_same(merge_into(place, adapter, overwrite=True).tensors, expected(adapted))


@pytest.mark.parametrize(("case", "setting"), [("kasa", {}), ("dora", {"init_lora_weights": "pissa_niter_4"})])
def test_a_base_that_may_not_match_the_adapter_is_refused(tmp_path, case, setting):
    _, adapter, base = apart(tmp_path, case)
    config = {**json.loads((adapter / "adapter_config.json").read_text()), **setting}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormatError, match="PEFT changed the base weights before training"):
        merge_into(base, adapter)


def test_a_base_without_the_adapted_weights_is_refused(tmp_path):
    _, adapter, base = apart(tmp_path, "dora")
    weights = base / "model.safetensors"
    (base / "config.json").write_text("{}")
    for change, error, said in (
        (weights.unlink, CheckpointMismatchError, "Give --base a directory or checkpoint with the base"),
        (lambda: write_model(base, {"other": torch.ones(2)}), CheckpointMismatchError, "base weight is not in"),
        (lambda: weights.write_bytes(b"damaged!"), CorruptCheckpointError, "model.safetensors"),
    ):
        change()
        refused(error, said, convert, adapter, tmp_path / "out", merge_adapter=True, base=str(base))


@pytest.mark.parametrize("case", ["linear and embedding", "rslora and patterns", "fan in", "attention", "experts",
                                  "blocks of A", "experts transposed", "tokens", "linear bias", "kasa"])  # fmt: skip
def test_rows_merged_separately_equal_a_merge_of_the_whole_tensor(tmp_path, case):
    trained(of(case), tmp_path, dtype="bfloat16")
    plan = merged(tmp_path, of(case))
    computed = [tensor for tensor in plan.export.tensors if isinstance(tensor, ComputedTensor)]
    assert computed
    for tensor in computed:
        rows, step = tensor.shape[0], 1 if tensor.shape[0] < 4 else 8
        pieces = [plan.computed(tensor.cut(at, min(rows, at + step))) for at in range(0, rows, step)]
        found, whole = (t.view(torch.int16).int() for t in (torch.cat(pieces), plan.computed(tensor)))
        # The product is rounded to 16 bits, which hides most differences between kernels except the last bit.
        difference = (found - whole).abs()
        assert difference.max() <= 1 and not difference[whole == 0].any(), tensor.name


def test_key_maps_are_applied_to_merged_tensors(tmp_path):
    config = of(target_modules=["q", "k", "square"], use_dora=True)
    adapted = trained(config, tmp_path, dtype="bfloat16")
    rules = (
        Split(NamePattern("q.weight"), ("upper.weight", "lower.weight"), dim=0, sizes=(8, 16)),
        Concat((NamePattern("k.weight"), NamePattern("plain.weight")), "joined.weight", dim=0),
        Transpose(NamePattern("square.weight"), (1, 0)),
    )
    found = merged(tmp_path, config, key_map=NameMap("mine", rules)).tensors
    whole = expected(adapted)
    assert torch.equal(torch.cat([found["upper.weight"], found["lower.weight"]]), whole["q.weight"])
    assert torch.equal(found["joined.weight"], torch.cat([whole["k.weight"], whole["plain.weight"]]))
    assert torch.equal(found["square.weight"], whole["square.weight"].T)


def tiny(kind: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    torch.manual_seed(3)
    name, more = {
        "moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
        "gpt_oss": ("GptOss", {"intermediate_size": 32, "num_local_experts": 4}),
        "llama": ("Llama", {"tie_word_embeddings": True}),
    }[kind]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def run_of(kind: str, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a base, a DCP of a model trained on it, and the bits that PEFT's merge and save_pretrained write."""
    import torch.distributed.checkpoint as dcp

    base = tiny(kind)
    base.save_pretrained(folder / "base")
    adapted = adapted_by(config, base)
    with quiet():
        dcp.save({"model": dict(adapted.state_dict())}, checkpoint_id=folder / "run")
        adapted.merge_and_unload().save_pretrained(folder / "merged")
    return read_model(folder / "merged")


def of_run(folder: Path, config: Mapping[str, Any], out: str = "out", **options: Any) -> Result:
    options = {"base": str(folder / "base"), "merge_adapter": True, "adapter_config": config, **options}
    return converted(folder / "run", folder / out, **options)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(("kind", "case"), [
    ("moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ("moe", {"target_modules": [], "target_parameters": EXPERTS[1:], "rank_pattern": {"experts.down_proj": 2}}),
    ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
    ("llama", {"target_modules": "all-linear", "use_dora": True}),
    ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 90]}),
    ("llama", {"target_modules": ["lm_head"]}),
    ("llama", {"target_modules": ["lm_head", "embed_tokens"]}),
    ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    ("llama", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
], ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value)  # fmt: skip
def test_a_merge_of_a_trained_model_equals_what_peft_saves(tmp_path, kind, case):
    pytest.importorskip("transformers")
    wanted = run_of(kind, tmp_path, of(**case))
    found = of_run(tmp_path, of(**case), verify=True)
    leftovers = found.report.plan.leftovers
    assert all("tied" in reason or "merged" in reason for _, reason in leftovers), leftovers
    assert_same(found.tensors, wanted)


def test_an_adapter_of_a_tied_head_is_noted_and_untie_separates_it(tmp_path):
    config = of(target_modules=["lm_head"])
    together = run_of("llama", tmp_path, config)["model.embed_tokens.weight"]
    assert any("also changes model.embed_tokens.weight" in note for note in of_run(tmp_path, config).report.notes)
    found = of_run(tmp_path, config, "apart", untie=True).tensors
    assert torch.equal(found["lm_head.weight"], together)
    before = read_model(tmp_path / "base")["model.embed_tokens.weight"]
    assert torch.equal(found["model.embed_tokens.weight"], before)


def test_dora_and_convolutions_are_not_merged_by_rows_and_an_error_says_how_much_memory_they_need(tmp_path):
    config = of(target_modules=["embed", "conv2", "q"], use_dora=True)
    trained(config, tmp_path / "run", dtype="bfloat16")
    export, store, catalog = merged(tmp_path / "run", config)
    computed = {tensor.name: tensor for tensor in export.tensors if isinstance(tensor, ComputedTensor)}
    by_rows = {name: tensor.cut is not None for name, tensor in computed.items()}
    assert by_rows == {"embed.weight": False, "conv2.weight": False, "q.weight": True}  # norms of columns; kernels
    embed = computed["embed.weight"]
    work = prepare(Plan(catalog, (), (Placement.whole(embed, 0, 0),)), check=False, by_boxes=True)
    gatherer = Gatherer(SourceReader(store, work.origins), work.maps, max_bytes=4 << 10)
    with pytest.raises(UsageError, match=r"'embed.weight' \(DoRA of .* at once, .* Pass a larger --max-memory"):
        gatherer.make_box(embed, Box.whole(embed.shape), np.empty(embed.numel * 2, np.uint8))


def changes_of(config: Mapping[str, Any], model_type: str | None = None, **shapes: tuple[int, ...]) -> None:
    split = split_adapter(stored(**shapes))
    assert split is not None
    adapter_changes(split, {"r": 2, "lora_alpha": 1, **config}, model_type=model_type)


LINEAR_Q = {"q__base_layer__weight": (6, 4), "q__lora_A__default__weight": (2, 4), "q__lora_B__default__weight": (6, 2)}


@pytest.mark.parametrize(("module", "settings", "said"), [
    ("grouped", {}, "grouped convolution"), ("flat3", {}, "flat kernel"),
    ("plain", {"lora_bias": True}, "a bias for 'plain', whose base layer has none"),
])  # fmt: skip
def test_what_peft_cannot_merge_is_refused_too(tmp_path, module, settings, said):
    config = of(target_modules=[module], **settings)
    adapted = trained(config, tmp_path, dtype="float32")
    with pytest.raises(UnsupportedFormatError, match=said):
        merged(tmp_path, config)
    with pytest.raises((NotImplementedError, RuntimeError)):
        expected(adapted)


TOKENS = {"e__token_adapter__base_layer__weight": (9, 4), "e__token_adapter__trainable_tokens_delta__default": (2, 4)}
MISMATCH = CheckpointMismatchError


@pytest.mark.parametrize(("config", "more", "error", "said"), [
    *(({flag: [1]}, {}, UnsupportedFormatError, rf"{flag} cannot be merged, not even by PEFT.*Export the adapter")
      for flag in ("alora_invocation_tokens", "arrow_config", "layer_replication", "megatron_config")),
    *(({"target_parameters": targets}, {}, CorruptCheckpointError, "target_parameters is")  # not a list of names
      for targets in (5, "experts.up", [5], {"a": 1})),
    ({"use_dora": True}, {}, MISMATCH, "'q' has no DoRA magnitude"),
    ({}, {"q__lora_magnitude_vector__default__weight": (6,)}, MISMATCH, r"has a DoRA magnitude, .* use_dora=False"),
    ({}, TOKENS, MISMATCH, "do not list the rows of 'e'"),
    ({"trainable_token_indices": [1, 2, 3]}, TOKENS, MISMATCH,
     r"select 3 rows of 'e' \[9, 4\], but the trained rows in the checkpoint are \[2, 4\]"),
    ({}, {"q__base_layer__weight": (6, 5)}, MISMATCH, r"not match the weight \(W \[6, 5\], A \[2, 4\], B \[6, 2\]\)"),
])  # fmt: skip
def test_a_config_that_peft_cannot_merge_or_that_contradicts_the_tensors_is_refused(config, more, error, said):
    with pytest.raises(error, match=said):
        changes_of(config, **{**LINEAR_Q, **more})


def test_experts_are_merged_only_if_the_owner_of_each_factor_is_certain():
    square = {"base_layer__up": (3, 4, 4), "lora_A__weight": (6, 4), "lora_B__weight": (4, 6)}
    square = {f"experts__{name}": shape for name, shape in square.items()}
    one, both = {"target_parameters": ["experts.up"]}, {"target_parameters": ["experts.up", "experts.gate"]}
    with pytest.raises(UnsupportedFormatError, match=r"their order\. The base model's config.json may decide it: pass"):
        changes_of(one, **square)
    changes_of(one, "qwen3_moe", **square)
    changes_of(one, "gpt_oss", **square)
    two = {
        "experts__base_layer__base_layer__up": (3, 6, 4), "experts__base_layer__base_layer__gate": (3, 6, 4),
        "experts__lora_A__weight": (6, 4), "experts__lora_B__weight": (6, 6),
        "experts__base_layer__lora_A__weight": (6, 4), "experts__base_layer__lora_B__weight": (6, 6),
    }  # fmt: skip
    with pytest.raises(UnsupportedFormatError, match=r"which factors belong to .* of experts\.up, experts\.gate"):
        changes_of(both, "qwen3_moe", **two)
    with pytest.raises(CheckpointMismatchError, match=r"2 parameter adapters, but the .* targets 1 parameters"):
        changes_of(one, "qwen3_moe", **two)
