"""Names and values that try to exhaust memory or crash a reader: each gives a ckptkit error at once."""

import contextlib

import pytest
import torch

from ckptkit.errors import CkptkitError
from ckptkit.formats.detect import open_source
from tests.formats.damages import lay

NAMES = [
    ["model_world_size_99999999999_rank_0.pt"],
    ["model_world_size_0_rank_0.pt"],
    ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt", "model_world_size_2_rank_5.pt"],
    ["pytorch_model_fsdp_0_rank99999999999.bin"],
    ["zero_pp_rank_99999999999_mp_rank_00_model_states.pt"],
    ["model-99999999999-of-99999999999.safetensors"],
    ["shard-99999999999-model-00001-of-00001.safetensors"],
    ["weights_rank0.pt", "weights_rank9999999.pt"],
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[-1])
def test_absurd_ranks_in_names_are_refused(tmp_path, names):
    lay(tmp_path, dict.fromkeys(names, b"PK"))
    with pytest.raises(CkptkitError):
        open_source(str(tmp_path))


FILES = ["mp_rank_00_model_states.pt", "model_world_size_1_rank_0.pt", "pytorch_model_fsdp_0_rank0.bin"]
VALUES = [
    [],
    {},
    {"module": 1},
    {"module": {}, "param_shapes": 3},
    {"module": {}, "param_shapes": [{"a": "b"}]},
    {"module": {"a": torch.ones(2)}, "buffer_names": 7, "param_shapes": [{}], "shared_params": [1]},
    {"module": {"a": torch.ones(2)}, "param_shapes": [{"a": torch.Size([2**40])}]},
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("name", FILES)
def test_values_of_unexpected_types_raise_only_ckptkit_errors(tmp_path, name, value):
    torch.save(value, tmp_path / name)
    if name.startswith("mp_rank"):
        torch.save({"optimizer_state_dict": value}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with contextlib.suppress(CkptkitError):  # any other exception fails the test
        open_source(str(tmp_path))
