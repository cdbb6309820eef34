"""Configs and other small files beside the weights survive every command, also with several models or adapters."""

import json
import uuid
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from ckptkit import TrainState, convert, reshard, verify
from tests.checkpoint.states import save

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:torch.distributed is disabled")


def model(*, layers=1, rank=0):
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=1, vocab_size=8
    )
    made = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(made, peft.LoraConfig(r=rank, task_type="CAUSAL_LM")) if rank else made


def saved(url, models, state_dict_type="sharded"):
    return save(url, TrainState(model=models, rng=False), state_dict_type=state_dict_type) + "/latest"


def passed_on(source, folder, *forms):
    """Return the URL of a checkpoint after a conversion to each of these formats, or after a reshard."""
    for form in forms:
        if form == "resharded":
            source = reshard(source, str(folder / form), world_size=2).dst
        elif form != "saved":
            source = convert(source, str(folder / form), to=form, include=["*"]).dst
    return source


@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
@pytest.mark.parametrize("form", ["saved", "resharded", "dcp"])
@pytest.mark.parametrize("where", ["disk", "memory"])  # an object store has the data of a step in a folder
def test_an_export_of_one_of_several_models_has_this_model_s_config(tmp_path, state_dict_type, form, where):
    root = str(tmp_path / "run") if where == "disk" else f"memory://{uuid.uuid4().hex}"
    source = saved(root, {"actor": model(layers=1), "critic": model(layers=2)}, state_dict_type)
    source = passed_on(source, tmp_path, form)
    for name, layers in {"actor": 1, "critic": 2}.items():
        out = tmp_path / name
        convert(source, str(out), strip_prefix=name)
        assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == layers
        assert (out / "generation_config.json").exists()
        assert transformers.AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == layers
    convert(source, str(tmp_path / "all"), include=["*"])
    assert not (tmp_path / "all" / "config.json").exists()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("forms", ["saved", "dcp", "local", "resharded", "dcp resharded"])
def test_each_of_several_adapters_has_its_own_config(tmp_path, forms, several):
    both = model(rank=2)
    both.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=64, task_type="CAUSAL_LM"))
    source = saved(str(tmp_path / "run"), {"actor": both, "critic": model()} if several else both)
    source = passed_on(source, tmp_path, *forms.split())
    for name, other, alpha in (("default", "other", 8), ("other", "default", 64)):
        convert(source, str(tmp_path / name), strip_prefix="actor" if several else None, exclude=[f"*.{other}.*"])
        assert peft.LoraConfig.from_pretrained(tmp_path / name).lora_alpha == alpha


@pytest.mark.parametrize("to", ["dcp", "torch", "local", "resharded"])
def test_files_beside_plain_dcp_are_kept(tmp_path, to):
    adapter = model(rank=2)
    dcp.save({"model": adapter.state_dict()}, checkpoint_id=tmp_path / "dcp")
    adapter.base_model.model.config.save_pretrained(tmp_path / "dcp")
    adapter.peft_config["default"].save_pretrained(tmp_path / "dcp")
    out = passed_on(str(tmp_path / "dcp"), tmp_path / "out", to)
    for name, key in {"config.json": "num_hidden_layers", "adapter_config.json": "r"}.items():
        before, after = (json.loads(Path(at, name).read_text())[key] for at in (tmp_path / "dcp", out))
        assert before == after, name
    assert verify(out).ok
    convert(out, str(tmp_path / "exported"))
    assert peft.LoraConfig.from_pretrained(tmp_path / "exported").r == 2


def test_a_single_torch_file_has_no_files_beside_it(tmp_path):
    model().save_pretrained(tmp_path / "hf")
    convert(str(tmp_path / "hf"), str(tmp_path / "out" / "model.bin"), to="torch")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.bin"]


@pytest.mark.parametrize("to", ["dcp", "local", "resharded"])
def test_a_model_whose_name_looks_like_a_side_file_keeps_its_folder(tmp_path, to):
    source = saved(str(tmp_path / "run"), {"tokenizer": model(layers=2), "dit": model(layers=1)})
    configs = Path(passed_on(source, tmp_path / "out", to)).rglob("config.json")
    found = {path.parent.name: json.loads(path.read_text())["num_hidden_layers"] for path in configs}
    assert found == {"tokenizer": 2, "dit": 1}


def test_the_chat_templates_of_one_of_several_models_survive_a_reshard(tmp_path):
    models = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("actor", "critic")})
    dcp.save({"model": models.state_dict()}, checkpoint_id=tmp_path / "dcp")
    inner = "additional_chat_templates/rag.jinja"
    (tmp_path / "dcp/actor/additional_chat_templates").mkdir(parents=True)
    (tmp_path / "dcp/actor" / inner).write_text("{{ messages }}")
    reshard(str(tmp_path / "dcp"), str(tmp_path / "resharded"), world_size=2)
    convert(str(tmp_path / "resharded"), str(tmp_path / "out"), strip_prefix="actor")
    assert (tmp_path / "out" / inner).read_text() == "{{ messages }}"


@pytest.mark.parametrize("to", ["dcp", "torch", "local"])
def test_the_adapter_config_of_the_parent_directory_is_not_copied_for_a_model_without_adapters(tmp_path, to):
    dcp.save({"model": torch.nn.Linear(4, 4).state_dict()}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    convert(str(tmp_path / "dcp"), str(tmp_path / "out"), to=to)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
