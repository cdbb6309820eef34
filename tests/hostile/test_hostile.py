"""Each hostile checkpoint in every command: no code runs, no other file is read or written, and the command ends soon
with a message."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.hostile import bombs, escapes, payloads, sources
from tests.hostile.harness import Place, run_commands

QUICK = ("inspect --json", "verify", "convert hf")
# Opening works; reading the value is refused, and a conversion copies it as inert data.
ONLY_WHEN_READ = {"byte_entry", "lightning_meta", "megatron_common", "own_object"}
# Harmless: the file is skipped with a note, or is the older of two.
LEFT_OUT = {"linked_config", "linked_tokenizer", "linked_to_passwd", "linked_blobs", "fifo_index", "fifo_record", "linked_folder",
            "record_missing", "object_reference"}  # fmt: skip
REFUSED_BY_OPEN = {"object_reference": "../../etc/passwd"}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "case")


def _run(place: Place, names: tuple[str, ...]) -> dict[str, int]:
    outcomes = run_commands(place, names)
    bad = {name: (o.bad, o.text[-300:]) for name, o in outcomes.items() if o.bad}
    assert not bad
    shutil.rmtree(place.top)
    return {name: outcome.code for name, outcome in outcomes.items()}


@pytest.mark.parametrize("name", sources.CONTROLS)
def test_the_checkpoint_that_attacks_modify_is_accepted(name: str, place: Place) -> None:
    sources.CONTROLS[name](place.src)
    assert _run(place, QUICK) == dict.fromkeys(QUICK, 0)


@pytest.mark.parametrize("name", payloads.PAYLOADS)
def test_code_in_a_file_of_a_checkpoint_is_not_run(name: str, place: Place) -> None:
    payloads.PAYLOADS[name](place)
    codes = _run(place, (*QUICK, "open"))
    assert codes["open"] == 1
    assert name in ONLY_WHEN_READ or (codes["verify"], codes["convert hf"]) == (1, 1)


@pytest.mark.parametrize("name", payloads.IGNORED)
def test_code_next_to_a_checkpoint_is_not_run(name: str, place: Place) -> None:
    payloads.IGNORED[name](place)
    assert _run(place, QUICK)["convert hf"] == 0


@pytest.mark.parametrize("name", payloads.GLOBALS)
def test_no_known_escape_from_an_unpickler_works(name: str, place: Place) -> None:
    payloads.GLOBALS[name](place)
    assert _run(place, ("convert hf",)) == {"convert hf": 1}


@pytest.mark.parametrize("name", escapes.ESCAPES)
def test_names_and_links_do_not_lead_out_of_a_checkpoint(name: str, place: Place) -> None:
    escapes.ESCAPES[name](place)
    codes = _run(place, QUICK)
    assert name in LEFT_OUT or codes["convert hf"] == 1


@pytest.mark.parametrize("name", escapes.ALLOWED)
def test_odd_names_and_odd_neighbouring_files_do_no_harm(name: str, place: Place) -> None:
    escapes.ALLOWED[name](place)
    _run(place, (*QUICK, "convert local"))


@pytest.mark.parametrize("name", bombs.BOMBS)
def test_a_false_size_claim_is_refused_at_once(name: str, place: Place) -> None:
    bombs.BOMBS[name](place)
    assert _run(place, ("verify", "convert hf")) == {"verify": 1, "convert hf": 1}


@pytest.mark.parametrize("name", bombs.HEAVY)
def test_very_many_small_entries_need_bounded_time_and_memory(name: str, place: Place) -> None:
    bombs.HEAVY[name](place)
    _run(place, QUICK)


def test_a_reference_to_a_missing_tensor_is_refused_when_it_is_read(place: Place) -> None:
    escapes.ESCAPES["object_reference"](place)
    assert _run(place, ("open",)) == {"open": 1}


def test_a_run_with_a_hostile_record_can_be_listed_pruned_and_loaded_from(place: Place) -> None:
    escapes.ESCAPES["record_absolute"](place)
    codes = _run(place, ("ls", "pin", "prune", "load"))
    assert codes.pop("pin") == 1  # "latest" names no committed checkpoint
    assert set(codes.values()) <= {0, 1}, codes
