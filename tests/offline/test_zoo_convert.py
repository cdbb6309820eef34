"""`ckptkit convert` on every valid source of the zoo: the expected weights, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ckptkit.cli.main import cli

ZOO = Path(__file__).parents[1] / "zoo"
CASES = {case["name"]: case for case in json.loads((ZOO / "MANIFEST.json").read_text()) if case["outcome"] == "ok"}
LAYOUT = ZOO / "fsdp1_local_state_dict_nomesh_w2" / "flat_param_layout_NOT_ON_DISK_NORMALLY.json"
OPTIONS = {
    "dcp_dtypes_w2": ["--exclude", "c64"],  # safetensors has no complex64
    "fsdp1_local_state_dict_nomesh_w2": ["--layout", str(LAYOUT)],
    "torchtitan_llama3_names_w2": ["--to", "torch"],  # keeps its own names: the default is Hugging Face's
    "peft_lora_dcp_full_w2": ["--to", "torch"],  # everything: the default exports only the adapter
}
PEFT = ZOO / "peft_lora_dcp_full_w2"


def converted(source: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    """Run the command and return the tensors that it wrote."""
    result = CliRunner().invoke(cli, ["convert", str(source), str(out), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    if (out / "pytorch_model.bin").exists():
        return torch.load(out / "pytorch_model.bin", weights_only=True)
    return {key: value for path in sorted(out.glob("*.safetensors")) for key, value in load_file(path).items()}


def assert_bits(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        raw = [value.contiguous().reshape(-1).view(torch.uint8) for value in (got[name], tensor)]
        assert torch.equal(*raw), name


def input_of(name: str) -> Path:
    return ZOO / name / CASES[name]["input"]


def says_tied(*folders: Path) -> bool:
    """Return whether a config of the source, or of the result, ties the head to the embedding."""
    found = [path for folder in folders if folder.is_dir() for path in folder.rglob("config.json")]
    return any(json.loads(path.read_text()).get("tie_word_embeddings") for path in found)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["expected"]])
def test_each_source_of_the_zoo_converts_to_its_expected_result(name, tmp_path):
    got = converted(input_of(name), tmp_path / "out", *OPTIONS.get(name, []))
    expected = load_file(ZOO / name / "EXPECTED.safetensors")
    if "lm_head.weight" in expected and "lm_head.weight" not in got and says_tied(ZOO / name, tmp_path / "out"):
        expected.pop("lm_head.weight")  # it equals the embedding, which is present
    assert_bits(got, expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] == "hf"])
def test_a_hugging_face_model_is_copied_unchanged(name, tmp_path):
    expected = {k: v for path in sorted(input_of(name).glob("*.safetensors")) for k, v in load_file(path).items()}
    assert_bits(converted(input_of(name), tmp_path / "out"), expected)


def test_transformers_loads_a_converted_torchtitan_checkpoint(tmp_path):
    case = ZOO / "torchtitan_llama3_names_w2"
    got = converted(input_of(case.name), tmp_path / "out", "--base", str(case / "EXPECTED_hf"))
    assert_bits(got, load_file(case / "EXPECTED_hf" / "model.safetensors"))


def test_masters_are_exported_on_request(tmp_path):
    got = converted(input_of("lightrft_mp_optim_w2"), tmp_path / "out", "--weights", "master")
    case = ZOO / "lightrft_mp_optim_w2"
    # Tensors without a master (integers, frozen weights) are exported from the weight itself.
    assert_bits(got, load_file(case / "EXPECTED.safetensors") | load_file(case / "EXPECTED_fp32_master.safetensors"))


def test_adapters_are_exported_as_an_adapter(tmp_path):
    got = converted(PEFT / "ckpt", tmp_path / "out")
    assert_bits(got, load_file(PEFT / "EXPECTED_adapter" / "adapter_model.safetensors"))


def test_adapters_are_merged_on_request(tmp_path):
    got = converted(PEFT / "ckpt", tmp_path / "out", "--merge-adapter")
    assert_bits(got, load_file(PEFT / "EXPECTED_merged.safetensors"))


def test_flat_parameters_without_a_layout_are_refused_with_advice(tmp_path):
    arguments = ["convert", str(input_of("fsdp1_local_state_dict_nomesh_w2")), str(tmp_path / "out")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1 and "Give --layout FILE" in result.output
    assert list(tmp_path.iterdir()) == []
