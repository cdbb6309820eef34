"""Each hostile checkpoint in every command: no code runs, no other file is read or written, and the command ends soon
with a message."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from ckptkit.cli.main import cli
from tests.hostile import bombs, escapes, payloads, sources
from tests.hostile.attacks import ATTACKS
from tests.hostile.harness import Place, run_commands
from tests.hostile.sources import Evil, weights

QUICK = ("inspect --json", "verify", "convert hf")
# Opening works; reading the value is refused, and a conversion copies it as inert data.
ONLY_WHEN_READ = {"byte_entry", "lightning_meta", "megatron_common", "own_object"}
# Harmless: the file is skipped with a note, or is the older of two.
LEFT_OUT = {"linked_config", "linked_tokenizer", "linked_to_passwd", "linked_blobs", "fifo_index", "fifo_record", "linked_folder",
            "record_missing", "object_reference"}  # fmt: skip
CONTROLS: dict[Callable[[Place], None], str] = {}  # each once, under the name of its first attack
for _name, _attack in ATTACKS.items():
    CONTROLS.setdefault(_attack.control, _name)


@pytest.fixture
def codes(tmp_path):
    """Return a function that runs commands on a case; returns their exit codes, and fails if one does harm."""

    def run(build: Callable[[Place], None], *names: str) -> dict[str, int]:
        place = Place(tmp_path / "case")
        build(place)
        outcomes = run_commands(place, names)
        assert not {name: (o.bad, o.text[-300:]) for name, o in outcomes.items() if o.bad}
        shutil.rmtree(place.top)
        return {name: outcome.code for name, outcome in outcomes.items()}

    return run


@pytest.mark.parametrize("name", sources.CONTROLS)
def test_the_checkpoint_that_attacks_modify_is_accepted(codes, name):
    assert codes(sources.unchanged(name), *QUICK) == dict.fromkeys(QUICK, 0)


@pytest.mark.parametrize("name", payloads.PAYLOADS)
def test_code_in_a_file_of_a_checkpoint_is_not_run(codes, name):
    found = codes(payloads.PAYLOADS[name], *QUICK, "open")
    assert found["open"] == 1
    assert name in ONLY_WHEN_READ or (found["verify"], found["convert hf"]) == (1, 1)


@pytest.mark.parametrize("name", payloads.IGNORED)
def test_code_next_to_a_checkpoint_is_not_run(codes, name):
    assert codes(payloads.IGNORED[name], *QUICK)["convert hf"] == 0


@pytest.mark.parametrize("name", escapes.ESCAPES)
def test_names_and_links_do_not_lead_out_of_a_checkpoint(codes, name):
    assert codes(escapes.ESCAPES[name], *QUICK)["convert hf"] == 1 or name in LEFT_OUT


@pytest.mark.parametrize("name", escapes.ALLOWED)
def test_odd_names_and_odd_neighbouring_files_do_no_harm(codes, name):
    codes(escapes.ALLOWED[name], *QUICK, "convert local")


@pytest.mark.parametrize("name", bombs.BOMBS)
def test_a_false_size_claim_is_refused_at_once(codes, name):
    assert codes(bombs.BOMBS[name], "verify", "convert hf") == {"verify": 1, "convert hf": 1}


@pytest.mark.parametrize("name", bombs.HEAVY)
def test_very_many_small_entries_need_bounded_time_and_memory(codes, name):
    codes(bombs.HEAVY[name], *QUICK)


def test_a_reference_to_a_missing_tensor_is_refused_when_it_is_read(codes):
    assert codes(escapes.ESCAPES["object_reference"], "open") == {"open": 1}


def test_a_run_with_a_hostile_record_can_be_listed_pruned_and_loaded_from(codes):
    found = codes(escapes.ESCAPES["record_absolute"], "ls", "pin", "prune", "load")
    assert found.pop("pin") == 1  # "latest" names no committed checkpoint
    assert set(found.values()) <= {0, 1}, found


# --- attacks and their controls; `python -m tests.hostile` runs all commands on them


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_or_does_nothing(codes, name):
    assert codes(ATTACKS[name].hostile, "convert hf")["convert hf"] == 1 or ATTACKS[name].harmless


@pytest.mark.parametrize("build", CONTROLS, ids=CONTROLS.values())
def test_the_control_of_an_attack_is_accepted(codes, build):
    assert codes(build, "convert hf") == {"convert hf": 0}


def test_a_tensor_too_large_for_memory_is_a_ckptkit_error(tmp_path):
    """Shape and size match; the file is sparse."""
    place = Place(tmp_path / "case")
    ATTACKS["true_but_sparse"].hostile(place)
    outcome = run_commands(place, ("open",))["open"]
    assert (outcome.code, outcome.bad) == (1, ())
    assert "no memory" in outcome.text


# --- --allow-pickle is used only on request, with a warning, and runs no code


@pytest.fixture
def source(tmp_path):
    (tmp_path / "src").mkdir()
    torch.save({"state_dict": weights(), "x": Evil(tmp_path / "PWNED")}, tmp_path / "src" / "model.pt")
    return tmp_path / "src"


def run(source: Path, name: str, *flags: str) -> Result:
    rest = {"convert": [str(source.parent / "dst")], "reshard": [str(source.parent / "dst"), "--world-size", "2"]}
    result = CliRunner().invoke(cli, [name, str(source), *rest.get(name, []), *flags])
    assert not (source.parent / "PWNED").exists()
    assert "bug in ckptkit" not in result.output
    return result


@pytest.mark.parametrize("name", ["inspect", "verify", "convert", "reshard"])
def test_a_file_with_an_unknown_class_is_read_only_with_allow_pickle(name, source):
    refused = run(source, name)
    assert refused.exit_code == 1 and "posix.mkdir" in refused.output
    taken = run(source, name, "--allow-pickle")
    assert taken.exit_code == 0, taken.output
    assert "may be incomplete" in " ".join(taken.stderr.split())


def test_the_weights_next_to_an_unknown_class_are_unchanged(source):
    run(source, "convert", "--allow-pickle")
    found = load_file(source.parent / "dst" / "model.safetensors")
    assert sorted(found) == sorted(weights())
    assert all(torch.equal(found[name], value) for name, value in weights().items())
