"""Each attack is refused with a message, and its control is accepted. `python -m tests.hostile` runs all commands."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.hostile.attacks import ATTACKS
from tests.hostile.harness import Place, run_commands

CONTROLS: dict[Callable[[Place], None], str] = {}
for _name, _attack in ATTACKS.items():
    CONTROLS.setdefault(_attack.control, _name)


def _convert(folder: Path, build: Callable[[Place], None]) -> int:
    place = Place(folder / "case")
    build(place)
    outcomes = run_commands(place, ("convert hf",))
    shutil.rmtree(place.top)
    assert not {key: (o.bad, o.text[-300:]) for key, o in outcomes.items() if o.bad}
    return outcomes["convert hf"].code


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_or_does_nothing(name: str, tmp_path: Path) -> None:
    assert _convert(tmp_path, ATTACKS[name].hostile) == 1 or ATTACKS[name].harmless


@pytest.mark.parametrize("build", CONTROLS, ids=CONTROLS.values())
def test_the_control_of_an_attack_is_accepted(build: Callable[[Place], None], tmp_path: Path) -> None:
    assert _convert(tmp_path, build) == 0


def test_a_tensor_too_large_for_memory_is_a_ckptkit_error(tmp_path: Path) -> None:
    """Shape and size match; the file is sparse."""
    place = Place(tmp_path / "case")
    ATTACKS["true_but_sparse"].hostile(place)
    outcome = run_commands(place, ("open",))["open"]
    assert (outcome.code, outcome.bad) == (1, ())
    assert "no memory" in outcome.text
