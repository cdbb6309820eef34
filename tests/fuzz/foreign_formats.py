"""Fuzzers of other systems' files: safetensors with the official parser as a reference, indexes, configs, rank files,
key maps and layouts."""

import io
import json
import random
import shutil
from pathlib import Path

import safetensors
import torch

from ckptkit import convert, reshard
from ckptkit.formats.detect import open_source
from ckptkit.formats.hf.header import read_header
from ckptkit.formats.options import ReadOptions
from ckptkit.keymaps.file import parse_key_map
from ckptkit.offline.inspect import summarise
from ckptkit.storage.local import LocalStore
from tests.catalog.materialize import whole_target
from tests.fuzz.mutations import json_text, mutate, mutate_tree, mutate_zip
from tests.fuzz.running import Finding, Target, refused
from tests.fuzz.torch_formats import ZOO
from tests.hostile import sources


def safetensors_files(rng: random.Random, folder: Path) -> None:
    """Require what the official parser refuses to be refused, and equal bytes for what both accept."""
    raw = sources.safetensors({"a": [2, 3], "b.c": [4], "e": [0, 7], "s": []})
    length = int.from_bytes(raw[:8], "little")
    if rng.random() < 0.5:
        header = {**json.loads(raw[8 : 8 + length]), "__metadata__": {"format": "pt"}}
        text = json_text(rng, mutate_tree(rng, header)) + b" " * rng.choice((0, 0, 1, 8))
        data = (len(text) + rng.choice((0, 0, 0, 1, -1))).to_bytes(8, "little") + text + raw[8 + length :]
    else:
        data = mutate(rng, raw, [raw])
    (folder / "model.safetensors").write_bytes(data)
    with refused("model.safetensors"):
        ours = read_header(LocalStore(folder), "model.safetensors").tensors
        try:
            theirs = dict(safetensors.deserialize(data))
        except Exception as error:
            raise Finding(f"the official parser refuses what was accepted: {error}") from error
        found = {n: (list(t.shape), data[t.start : t.start + t.nbytes]) for n, t in ours.items()}
        if found != {name: (list(t["shape"]), bytes(t["data"])) for name, t in theirs.items()}:
            raise Finding("the official parser reads something else")


def indexes(rng: random.Random, folder: Path) -> None:
    """Require an accepted index to match its files."""
    if rng.random() < 0.5:
        sources.hf_sharded(folder)
        path = folder / "model.safetensors.index.json"
    else:
        for i, name in enumerate(("weight", "bias"), start=1):
            torch.save({name: sources.weights()[name]}, folder / f"model-0000{i}-of-00002.safetensors")
        sources.write_index(folder, {}, "pytorch_model.bin.index.json")
        path = folder / "pytorch_model.bin.index.json"
    raw = path.read_bytes()
    path.write_bytes(json_text(rng, mutate_tree(rng, json.loads(raw))) if rng.random() < 0.7 else mutate(rng, raw))
    _look(folder, path.name, "safetensors", "model-", str(folder))


def configs(rng: random.Random, folder: Path) -> None:
    """Fuzz config.json and adapter_config.json in a conversion that is only planned."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True, "dtype": "float32",
        "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "text_config": {"vocab_size": 4},
        "auto_map": {"AutoModel": "x.Y"}, "quantization_config": {"a": 1},
    }  # fmt: skip
    adapter = {
        "lora_alpha": 16, "r": 2, "peft_type": "LORA", "target_modules": ["q"], "rank_pattern": {"q": 2},
        "alpha_pattern": {"^q$": 4}, "use_rslora": True, "base_model_name_or_path": "a/b",
    }  # fmt: skip
    names = {
        "model.q.weight": [4, 4], "model.q.lora_A.weight": [2, 4], "model.q.lora_B.weight": [4, 2],
        "lm_head.weight": [4, 4], "model.embed_tokens.weight": [4, 4],
    }  # fmt: skip
    src = folder / "src"
    src.mkdir()
    (src / "model.safetensors").write_bytes(sources.safetensors(names))
    (src / "config.json").write_bytes(json_text(rng, mutate_tree(rng, config)))
    (src / "adapter_config.json").write_bytes(json_text(rng, mutate_tree(rng, adapter)))
    with refused():
        convert(str(src), str(folder / "dst"), dry_run=True, merge_adapter=rng.random() < 0.5, untie=rng.random() < 0.5)


_RANK_FILES = {
    **dict.fromkeys(("deepspeed_zero2_bf16_w2/ckpt", "deepspeed_zero3_bf16_tied_w2/ckpt"), "*.pt"),
    **dict.fromkeys(("verl_fsdp2_w2", "verl_fsdp1_nomesh_w2"), "*.pt"),
    **dict.fromkeys(("accelerate_fsdp2_nodcp_llama_untied_w2/checkpoint", "torchsave_pytorch_model_bin"), "*.bin"),
    **dict.fromkeys(("lightrft_mp_optim_w2", "fsdp1_local_state_dict_nomesh_w2"), "*"),
    "lightning_trainer_fsdp_w2": "meta.pt", "lightning_trainer_full": "*.ckpt",
    "megatron_torch_dist_emulated": "common.pt",
}  # fmt: skip


def rank_files(rng: random.Random, folder: Path) -> None:
    """Fuzz one rank file, in its pickle or in its values."""
    name = rng.choice(sorted(_RANK_FILES))
    ignore = shutil.ignore_patterns("EXPECTED*")
    shutil.copytree(ZOO / name, folder, dirs_exist_ok=True, ignore=ignore)
    paths = [p for p in sorted(folder.rglob(_RANK_FILES[name])) if p.is_file() and p.stat().st_size < 400_000]
    path = rng.choice(paths)
    raw = path.read_bytes()
    if raw[:2] != b"PK" or rng.random() < 0.1:
        path.write_bytes(mutate(rng, raw))
    elif rng.random() < 0.5:
        path.write_bytes(mutate_zip(rng, raw))
    else:
        path.write_bytes(_with_other_values(rng, raw))
    _look(folder)


def _with_other_values(rng: random.Random, raw: bytes) -> bytes:
    with sources.deepspeed_classes():
        try:
            value = torch.load(io.BytesIO(raw), weights_only=False)  # written by the test
            return sources.saved(mutate_tree(rng, value, plain=False))
        except Exception:
            return mutate_zip(rng, raw)


def key_maps(rng: random.Random, _: Path) -> None:
    rules = [
        {"op": "rename", "from": "layers.{i:d}.{x:*}", "to": "model.layers.{i}.{x}"},
        {"op": "split", "from": "qkv", "to": ["q", "k", "v"], "sizes": [2, "1*head", 1], "dim": 0},
        {"op": "stack", "from": "e.{i:d}.w", "to": "e.w"},
        {"op": "unstack", "from": "s", "to": "s.{i}", "dim": 1},
        {"op": "concat", "from": ["a", "b"], "to": "ab", "sizes": "equal"},
        {"op": "transpose", "from": "t", "dims": [1, 0]},
        {"op": "rope_permute", "from": "r", "heads": "heads"},
        {"op": "cast", "match": "c(\\d+)", "dtype": "bf16"},
        {"op": "drop", "match": "(\\w+)\\.(x|y)", "why": "z"},
    ]
    tree = {"name": "n", "rest": "keep", "rules": rules}
    data = json_text(rng, mutate_tree(rng, tree))
    text = (mutate(rng, data) if rng.random() < 0.3 else data).decode("utf-8", "replace")
    shapes = {
        "layers.0.w": (2, 2), "qkv": (4, 2), "e.0.w": (2,), "e.1.w": (2,), "s": (2, 3), "a": (2,), "b": (2,),
        "t": (2, 3), "r": (8, 2), "c1": (3,), "z.x": (1,), "empty": (2**40, 0),
    }  # fmt: skip
    targets = {name: whole_target(name, shape) for name, shape in shapes.items()}
    with refused():
        parse_key_map(text, file="m.json").apply(targets, config={"head": 1, "heads": 2})


def layouts(rng: random.Random, folder: Path) -> None:
    units = {"": {"fqns": ["a", "b"], "shapes": [[2, 3], [4]], "numels": [6, 2, 4], "pad_mask": [False, True, False]}}
    path = folder.parent / "layout.json"
    path.write_bytes(json_text(rng, mutate_tree(rng, units)))
    with refused():
        open_source(str(ZOO / "fsdp1_local_state_dict_nomesh_w2"), options=ReadOptions(layout=str(path)))


FOREIGN: list[Target] = [safetensors_files, indexes, configs, rank_files, key_maps, layouts]


# --- helpers


def _look(folder: Path, *files: str) -> None:
    """Open the checkpoint, read all of it, and plan a reshard, which reads its objects."""
    with refused(*files, *(("tensor", "reshard", "optimizer") if files else ())):
        catalog = open_source(str(folder)).catalog
        stored = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        for entry in catalog.tensors.values():
            entry.check_coverage()
            if entry.nbytes > stored:
                raise Finding(f"{entry.name} has {entry.nbytes} bytes, the files {stored}")
        summarise(catalog, tensors="*")
        reshard(str(folder), str(folder.parent / "dst"), world_size=2, dry_run=True)
