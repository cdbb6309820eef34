"""`--overwrite` replaces one recognized checkpoint or export, and nothing else."""

import itertools
import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import convert, reshard, verify
from ckptkit.errors import CheckpointExistsError, UsageError
from tests.offline.folders import UNEVEN, ZOO, tree

SOURCE = UNEVEN / "ckpt"
LLAMA = "hf_ref_llama_untied"
TARGETS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf"},
    "hf in shards with sums": {"to": "hf", "max_shard_size": "1kB", "sha256": True},
    "dcp": {"to": "dcp", "world_size": 2},
    "torch": {"to": "torch"},
    "local": {"to": "local", "world_size": 2},
    "reshard": {"world_size": 2},
    "reshard local": {"world_size": 2, "type": "local"},
}


def write(dst: Path | str, options: dict[str, Any], source: Path = SOURCE) -> None:
    (convert if "to" in options else reshard)(str(source), str(dst), **options)


def model_of(case: str) -> Path:
    """Return the folder of a model in the zoo."""
    return next(path.parent for path in (ZOO / case).rglob("config.json"))


def add(folder: Path, name: str) -> str:
    """Write a file of the user; return the name that a refusal gives it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"mine")
    return name.partition("/")[0]


def replace(dst: Path | str, options: dict[str, Any], source: Path = SOURCE) -> None:
    write(dst, {**options, "overwrite": True}, source)


def refused(dst: Path, name: str) -> None:
    """Assert that nothing replaces `dst`, and that the message names this file."""
    before = tree(dst)
    for target in ("hf", "torch", "dcp", "reshard"):
        with pytest.raises(CheckpointExistsError, match=rf"(?s)(?=.*is not overwritten).*{re.escape(name)}"):
            replace(dst, TARGETS[target])
    assert tree(dst) == before
    assert [name for name in os.listdir(dst.parent) if name.startswith(".")] == []


@pytest.mark.parametrize("new", TARGETS)
@pytest.mark.parametrize("old", TARGETS)
def test_every_command_may_replace_the_result_of_another(tmp_path, old, new):
    write(tmp_path / "out", TARGETS[old])
    replace(tmp_path / "out", TARGETS[new])
    write(tmp_path / "new" / "out", TARGETS[new])
    assert tree(tmp_path / "out").keys() == tree(tmp_path / "new" / "out").keys()
    assert not verify(str(tmp_path / "out")).problems and os.listdir(tmp_path).count("out") == 1


def test_a_model_saved_by_transformers_with_its_tokenizer_is_replaced(tmp_path):
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "in")
    model.save_pretrained(tmp_path / "out", max_shard_size="1KB")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "training_args.bin").write_bytes(b"PK\x03\x04")
    for name in ("special_tokens_map.json", "chat_template.jinja"):
        add(tmp_path / "out", name)
    replace(tmp_path / "out", {"to": "hf"}, tmp_path / "in")
    assert tree(tmp_path / "out").keys() == {"README.md", "config.json", "generation_config.json", "model.safetensors"}


def test_an_export_with_the_files_of_a_base_is_replaced(tmp_path):
    source, base, options = model_of(LLAMA), tmp_path / "base", {"to": "hf", "base": str(tmp_path / "base")}
    shutil.copytree(source, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_x.X"}}))
    for name in ("modeling_x.py", "tokenizer.json", "merges.txt", "LICENSE", "additional_chat_templates/tools.jinja"):
        add(base, name)
    (base / "generation_config.json").write_text("{}")
    write(tmp_path / "out", options, source)
    before = tree(tmp_path / "out")
    assert "modeling_x.py" in before and "additional_chat_templates/tools.jinja" in before
    replace(tmp_path / "out", options, source)
    assert tree(tmp_path / "out") == before


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
TWO_ADAPTERS = (*ADAPTER, *(f"other/{name}" for name in (*ADAPTER, "scores.json")))


def _with_an_edited_card(out: Path) -> None:
    write(out, {"to": "hf"})
    replace(out, {"to": "hf"})  # the card itself is no obstacle
    (out / "README.md").write_text((out / "README.md").read_text().replace("# ", "# My model: ", 1))


@pytest.mark.parametrize(("made", "said"), [
    (lambda out: [add(out, name) for name in ("thesis.pdf", "notes.txt", "photo.jpg", "zebra.doc")],
     "notes.txt, photo.jpg, thesis.pdf, ..."),
    *((lambda out, at=at: write(out.joinpath(*at, "step_00000007"), {"world_size": 1}), top)
      for at, top in (("", "step_00000007/"), ("a", "a/"), ("ab", "a/"))),
    (lambda out: [shutil.copytree(model_of(LLAMA), out / name) for name in ("", "checkpoint-500")], "checkpoint-500/"),
    (_with_an_edited_card, "README.md"),
    (lambda out: add(out, "LICENSE"), ""),  # no checkpoint
    (lambda out: (write(out, {"to": "hf"}), (out / "config.json").symlink_to(out.parent)), "config.json"),
    (lambda out: [add(out, name) for name in TWO_ADAPTERS], "other/scores.json"),
])  # fmt: skip
def test_a_directory_with_files_of_the_user_is_refused_by_name(tmp_path, made, said):
    made(tmp_path / "out")
    refused(tmp_path / "out", said)


RESEMBLING = ("train-00000-of-00010.bin", "model.backup.safetensors", "pytorch_model.old.bin", "b/adapter_model.bin")


@pytest.mark.parametrize(("target", "name"), [
    *itertools.product(("hf", "dcp", "torch", "local", "reshard"),
                       ("results.json", "eval/results.json", ".git/HEAD", "notes.md")),
    ("reshard", "model.safetensors"),  # the commit record does not name it
    *(("hf", name) for name in RESEMBLING),  # weights
])  # fmt: skip
def test_a_foreign_file_in_an_export_is_refused_by_name(tmp_path, target, name):
    write(tmp_path / "out", TARGETS[target])
    refused(tmp_path / "out", add(tmp_path / "out", name))


@pytest.mark.parametrize("written", [
    lambda place: zipfile.ZipFile(place, "w").close(), lambda place: place.write_bytes(pickle.dumps({"mine": 1})),
    lambda place: place.write_bytes(b"a firmware image, or whatever ends in .pt"),
], ids=["zip", "pickle", "firmware"])  # fmt: skip
@pytest.mark.parametrize("to", ["torch", "hf"])
def test_a_single_file_that_torch_did_not_write_is_refused(tmp_path, written, to):
    dst = tmp_path / "out.pt"
    written(dst)
    before = dst.read_bytes()
    with pytest.raises(CheckpointExistsError, match=r"not a file that torch\.save"):
        replace(dst, {"to": to})
    assert dst.read_bytes() == before


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("to", ["torch", "hf"])
def test_a_single_torch_file_is_replaced(tmp_path, zipped, to):
    torch.save({"w": torch.zeros(3)}, tmp_path / "out.pt", _use_new_zipfile_serialization=zipped)
    replace(tmp_path / "out.pt", {"to": to})
    assert (tmp_path / "out.pt").is_dir() == (to == "hf") and os.listdir(tmp_path) == ["out.pt"]


@pytest.mark.parametrize("way", ["run/ckpt", "run/ckpt/", "run", "link/ckpt"])
def test_a_destination_that_is_or_holds_the_source_is_refused(tmp_path, way):
    shutil.copytree(SOURCE, tmp_path / "run" / "ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = tree(tmp_path / "run")
    for options in ({"to": "hf"}, {"world_size": 2}):
        with pytest.raises(UsageError, match=r"(is the source|contains the source).*Give another DST"):
            replace(f"{tmp_path}/{way}", options, tmp_path / "run" / "ckpt")
    assert tree(tmp_path / "run") == before
