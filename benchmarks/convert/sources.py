"""Create the sources of the benchmark: a llama with random weights, as safetensors and as rank files of verl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["make_dcp", "make_model", "make_verl"]

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def _shapes(nbytes: int, itemsize: int, small: bool) -> tuple[dict[str, tuple[int, ...]], dict[str, object]]:
    """Return names and shapes of about `nbytes` in all, and a matching config.json."""
    hidden, vocabulary, head = (64, 1024, 16) if small else (4096, 8000, 128)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    size, layer = 2 * vocabulary * hidden * itemsize, 0
    while size < nbytes:
        for name, shape in (
            ("self_attn.q_proj.weight", (hidden, hidden)),
            ("self_attn.k_proj.weight", (hidden // 4, hidden)),
            ("self_attn.v_proj.weight", (hidden // 4, hidden)),
            ("self_attn.o_proj.weight", (hidden, hidden)),
            ("mlp.gate_proj.weight", (hidden * 3, hidden)),
            ("mlp.up_proj.weight", (hidden * 3, hidden)),
            ("mlp.down_proj.weight", (hidden, hidden * 3)),
            ("input_layernorm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
        ):
            shapes[f"model.layers.{layer}.{name}"] = shape
        size += (hidden * hidden * 23 // 2 + 2 * hidden) * itemsize
        layer += 1
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return shapes, {
        **_CONFIG, "hidden_size": hidden, "intermediate_size": hidden * 3, "num_hidden_layers": layer,
        "num_attention_heads": hidden // head, "num_key_value_heads": hidden // head // 4, "head_dim": head,
        "vocab_size": vocabulary,
        "dtype": "bfloat16" if itemsize == 2 else "float32",
    }  # fmt: skip


def make_model(folder: Path, nbytes: int, dtype: str, small: bool = False, *, empty: bool = False) -> None:
    """Write model.safetensors and config.json. With `empty`, model.safetensors is a sparse file of zeros."""
    import numpy as np

    from ckptkit.formats.hf.header import TensorToWrite, lay_out

    itemsize = 2 if dtype == "bfloat16" else 4
    shapes, config = _shapes(nbytes, itemsize, small)
    layout = lay_out([TensorToWrite(name, dtype, shape) for name, shape in shapes.items()], {"format": "pt"})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        ((_, header),) = layout.literals
        file.write(header)
        if empty:
            file.truncate(layout.nbytes)
            return
        values = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32) * 0.02
        block = values.tobytes() if itemsize == 4 else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        left = layout.nbytes - len(header)
        while left:
            left -= file.write(block[: min(left, len(block))])


def make_dcp(model: Path, folder: Path, ranks: int) -> None:
    """Write the weights of `model` with torch.distributed.checkpoint from `ranks` processes, sharded like FSDP2."""
    import torch.multiprocessing

    torch.multiprocessing.spawn(_save_rank, (str(model), str(folder), ranks), nprocs=ranks)


def _save_rank(rank: int, model: str, folder: str, ranks: int) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.FileStore(f"{folder}.rendezvous", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    dcp.save({"model": _rows_of_rank(Path(model), mesh, rank)}, checkpoint_id=folder)
    dist.destroy_process_group()


def _rows_of_rank(model: Path, mesh: Any, rank: int) -> dict[str, Any]:
    """Return the DTensors of one rank, sharded by rows like FSDP2."""
    import torch
    from safetensors import safe_open
    from torch.distributed.tensor import DTensor, Shard

    state = {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            whole = file.get_slice(name)
            shape = torch.Size(whole.get_shape())
            rows = -(-shape[0] // mesh.size())
            local = whole[min(rank * rows, shape[0]) : min((rank + 1) * rows, shape[0])].clone()
            stride = torch.empty(shape, device="meta").stride()
            state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return state


def make_verl(model: Path, folder: Path, ranks: int) -> None:
    """Write the weights of `model` as FSDP2 DTensors, one file per rank, with the config and a tokenizer."""
    import torch
    import torch.distributed as dist
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        torch.save(_rows_of_rank(model, mesh, rank), folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()
    tokens = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, "<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>").save_pretrained(folder / "huggingface")
    (folder / "huggingface" / "config.json").write_text((model / "config.json").read_text())
