"""FULL: whole tensors, gathered one at a time, which Hugging Face reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import CheckpointManager, TrainState, open_checkpoint
from ckptkit.checkpoint.save import full, stream
from ckptkit.errors import CkptkitError
from tests.checkpoint import jobs, states
from tests.fsdp.models import llama
from tests.patches import failing
from tests.ranks import on_ranks, run_ranks


def whole(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: jobs.whole(value) for name, value in state.items()}


def save(url: Path) -> Any:
    job = jobs.make("1d")
    job.train(2)
    states.save(url, job.state(), 2, state_dict_type="FULL_STATE_DICT")
    return whole(job.model.state_dict())


def test_the_model_part_is_plain_safetensors_with_an_index(ranks, tmp_path):
    expected = ranks.run(save, 3, tmp_path)[0]
    root = tmp_path / "step_00000002"
    index = json.loads((root / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        found.update(load_file(root / name))
    assert whole(found) == expected
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
    assert all("model" in path.name for path in root.glob("*.safetensors") if path.name != "manifest.safetensors")
    assert list((root / "state").glob("*.safetensors"))


def sharded(*shapes: tuple[int, int]) -> nn.Module:
    """Return parameters sharded in the first and the second dimension in turn."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    torch.manual_seed(0)
    for i, shape in enumerate(shapes):
        placed = distribute_tensor(torch.randn(shape), mesh, [Shard(i % 2)])
        model.register_parameter(f"w{i}", nn.Parameter(placed))
    return model


@on_ranks(3)
def test_files_are_distributed_over_the_ranks(tmp_path):
    model = sharded(*[(5, 9)] * 7)
    states.save(tmp_path, TrainState(model=model, rng=False), state_dict_type="full", max_shard_size=300)
    expected = whole(model.state_dict())
    opened = open_checkpoint(str(tmp_path))
    assert whole({name: torch.from_numpy(opened[f"model.{name}"].numpy()) for name in expected}) == expected
    writers = {s.rank for entry in opened.catalog.tensors.values() for s in entry.slices}
    assert writers == {0, 1, 2}


@pytest.mark.parametrize("tie", [False, True])
def test_from_pretrained_loads_a_full_checkpoint(tmp_path, tie):
    transformers = pytest.importorskip("transformers")
    state = states.trained(llama(tie_word_embeddings=tie).to(torch.bfloat16))
    states.save(tmp_path, state, state_dict_type="full")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "step_00000001", dtype="auto")
    assert type(loaded) is type(state.model)
    assert whole(loaded.state_dict()) == whole(state.model.state_dict())


WRAPPED = {
    "both": lambda model: nn.parallel.DistributedDataParallel(torch.compile(model)),
    "torch.compile": torch.compile,
    "stages": lambda model: [nn.Linear(2, 2), model],
    "DDP": nn.parallel.DistributedDataParallel,
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@on_ranks(1)
def test_the_config_of_a_wrapped_model_names_the_models_own_class(tmp_path, wrapper):
    states.save(tmp_path, TrainState(model=WRAPPED[wrapper](llama())))
    config = json.loads((tmp_path / "step_00000001" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_each_of_several_models_has_its_own_folder(tmp_path):
    models, again = ({"actor": nn.Linear(2, 3), "critic": nn.Linear(3, 1)} for _ in range(2))
    states.load(states.save(tmp_path, TrainState(model=models), state_dict_type="full"), TrainState(model=again))
    for name, model in models.items():
        (file,) = (tmp_path / "step_00000001" / name).glob("*.safetensors")
        assert torch.equal(load_file(file)["weight"], model.weight)
        assert torch.equal(again[name].weight, model.weight)


LARGEST = 48 << 20


def peak_of_a_save(url: str) -> Any:
    """Return by how many bytes a FULL save of eight tensors of 48 MB raises this rank's memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    rows = LARGEST // 4096
    for i in range(8):
        local = torch.full((rows // mesh.size(), 1024), float(i))
        tensor = torch.distributed.tensor.DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        model.register_parameter(f"w{i}", nn.Parameter(tensor))
    state = TrainState(model=model)
    with CheckpointManager(url, state_dict_type="full") as manager:
        manager.save(1, TrainState(model=nn.Linear(2, 2)))  # for imports, groups and threads
        return states.memory_of(lambda: manager.save(2, state))


@states.measures_memory
def test_no_rank_holds_more_than_twice_the_largest_tensor(tmp_path):
    peaks = run_ranks(peak_of_a_save, 2, str(tmp_path))
    assert max(peaks) <= 2 * LARGEST + (64 << 20), [peak >> 20 for peak in peaks]


@pytest.mark.parametrize("where", ["write", "_part"])
@on_ranks(3)
def test_a_failing_rank_fails_all_ranks_at_once_and_the_next_save_works(tmp_path, where):
    model, broken = sharded(*[(4, 4)] * 6), failing(OSError(28, "No space left on device"))
    with CheckpointManager(tmp_path, state_dict_type="full", timeout_s=80, max_shard_size=100) as manager:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(stream.SafetensorsStream if where == "write" else full, where, broken)
            with pytest.raises(CkptkitError, match=r"rank 1.*No space left"):
                manager.save(1, TrainState(model=model))
        manager.save(2, TrainState(model=model))
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000002"]


@pytest.mark.parametrize("kind", ["full", "local"])
def test_a_tensor_name_that_is_not_utf8_is_refused_and_nothing_is_published(tmp_path, kind):
    model = nn.Linear(2, 2)
    model.register_buffer("half\ud800", torch.zeros(2))
    said = r"half\\ud800' has a lone surrogate"
    states.check_refused(tmp_path, TrainState(model=model), said, error=CkptkitError, state_dict_type=kind)
