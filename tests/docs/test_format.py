"""docs/format.md is sufficient: a reader written from it alone restores, bit for bit, what ranks have saved."""

import numpy as np
import pytest
import torch
import xxhash

from tests.docs.reader import outlines, read_objects, read_tensors
from tests.dtensors import whole


def _bits(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def save(root: str, kind: str) -> dict[str, np.ndarray]:
    """Save uneven shards, replicas, low precision, moments, scalars and an object; return the whole tensors."""
    from torch.distributed.fsdp import fully_shard

    from ckptkit import CheckpointManager, TrainState

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5), torch.nn.LayerNorm(5))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    fully_shard(model[0])
    fully_shard(model[1])
    model[2].bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[1](model[0](torch.ones(2, 6))).sum().backward()
    optimizer.step()
    state = TrainState(model=model, optimizer=optimizer, extra={"seen": {"tokens": (1, float("inf")), "id": b"ab"}})
    with CheckpointManager(root, state_dict_type=kind) as manager:
        manager.save(3, state, metrics={"loss": 1.0})

    found = {f"model.{name}": _bits(whole(tensor)) for name, tensor in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        found |= {f"optimizer.state.{names[parameter]}.{key}": _bits(whole(value)) for key, value in values.items()}
    return found


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_reader_written_from_the_page_alone_returns_every_tensor_bit_for_bit_and_other_values(ranks, tmp_path, kind):
    saved = ranks.run(save, 3, str(tmp_path), kind)[0]
    objects = read_objects(tmp_path / "step_00000003")
    assert (objects["step"], objects["extra.seen"]) == (3, {"tokens": (1, float("inf")), "id": b"ab"})
    (group,) = objects["optimizer"]["param_groups"]
    assert (group["lr"], group["params"][:2]) == (0.1, ["0.weight", "0.bias"])
    found = read_tensors(tmp_path / "step_00000003")
    assert {name for name in found if not name.startswith("rng.")} == set(saved)
    for name, value in saved.items():
        assert found[name].shape == value.shape
        assert found[name].tobytes() == value.tobytes(), name


def save_large(root: str, kind: str) -> None:
    """Save tensors that outlines replace, and some that they contain. Ranks 0 and 1 share one copy of `twice`, ranks 2
    and 3 another one that they do not recognize as equal."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from ckptkit import CheckpointManager, TrainState

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    state = {
        "twice": distribute_tensor(torch.arange(40_000.0), mesh["dp"]),
        "large": torch.arange(30_000.0),
        "small": torch.ones(3),
    }
    with CheckpointManager(root, state_dict_type=kind) as manager:
        manager.save(3, TrainState(extra={"state": state}))


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_every_file_digest_covers_the_bytes_that_the_page_states(ranks, tmp_path, kind):
    ranks.run(save_large, 4, str(tmp_path), kind)
    found = outlines(tmp_path / "step_00000003")
    for path, (data, digest) in found.items():
        assert xxhash.xxh3_64_hexdigest(data) == digest, path
        nbytes = (tmp_path / "step_00000003" / path).stat().st_size
        assert (len(data) < nbytes) == (nbytes > 65536), path
