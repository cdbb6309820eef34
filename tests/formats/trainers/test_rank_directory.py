"""Reads a directory with one torch.save file per rank from an unknown system."""

from __future__ import annotations

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
