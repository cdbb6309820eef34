"""Reads a directory with one torch.save file per rank from an unknown system."""

from __future__ import annotations

import pytest
import torch

from ckptkit.catalog.entry import Role
from ckptkit.formats.detect import open_source


def test_models_and_optimizers_are_found_under_any_usual_key_with_the_rest(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {"policy": model.state_dict(), "optimizer_state": optimizer.state_dict(), "net": {}, "iter": 3, "seen": 7}
    for rank in range(2):
        torch.save(saved, tmp_path / f"rank_{rank}.pt")
    catalog = open_source(str(tmp_path)).catalog
    assert catalog.info.format == "rank-files" and catalog.info.step == 3
    assert catalog.by_role(Role.MODEL).keys() == {"weight", "bias"} and len(catalog.by_role(Role.OPTIMIZER)) == 6
    assert catalog.objects["seen"].value == 7


@pytest.mark.parametrize("apart", [False, True])
def test_of_several_steps_the_latest_is_read_with_its_optimizer(tmp_path, apart):
    for step in (100, 300, 200):
        state = {"state": {0: {"exp_avg": torch.full((3,), float(step))}}, "param_groups": [{"params": [0]}]}
        model = {"w": torch.full((3,), float(step))}
        for rank in range(2):
            torch.save(model if apart else {"model": model}, tmp_path / f"model_step_{step}_rank_{rank}.pt")
            if apart and step != 200:
                torch.save(state, tmp_path / f"optim_step_{step}_rank_{rank}.pt")
    source = open_source(str(tmp_path))
    tensors = source.catalog.tensors
    assert {path for entry in tensors.values() for path in entry.slices.paths} == {
        f"{kind}_step_300_rank_0.pt" for kind in (("model", "optim") if apart else ("model",))
    }
    assert bool(source.catalog.by_role(Role.OPTIMIZER)) == apart
