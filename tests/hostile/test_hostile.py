"""Each hostile checkpoint in every command: no code runs, no other file is read or written, and the command ends soon
with a message."""

import shutil
from collections.abc import Callable

import pytest
from safetensors.torch import load_file

from tests.cli import commands
from tests.hostile import bombs, escapes, payloads, sources
from tests.hostile.attacks import ATTACKS, CONTROLS, HARMLESS
from tests.hostile.harness import COMMANDS, Place, run_commands
from tests.hostile.sources import weights
from tests.offline.exports import assert_same

REFUSED = {**payloads.PAYLOADS, **escapes.ESCAPES, **bombs.BOMBS, **ATTACKS}
ODD = {**payloads.IGNORED, **escapes.ALLOWED, **bombs.HEAVY}
# A conversion copies the hostile value as inert data, skips the file with a note, or takes the older of two.
CONVERTED = {
    "byte_entry", "lightning_meta", "megatron_common", "own_object", "linked_config", "linked_tokenizer", "linked_to_passwd",
    "linked_blobs", "fifo model.safetensors.index.json", "fifo checkpoint.json", "linked_folder", "record_missing", "object_reference", *HARMLESS,
}  # fmt: skip
# Commands that accept all that is not a run.
READS = [name for name in COMMANDS if name not in ("ls", "load", "pin", "prune", "diff", "open", "copy")]


@pytest.fixture
def codes(tmp_path):
    """Return a function that runs commands on a case; returns their exit codes, and fails if one does harm."""

    def run(build: Callable[[Place], None], *names: str) -> dict[str, int]:
        place = Place(tmp_path / "case")
        build(place)
        place.control.mkdir()
        sources.hf(place.control)
        outcomes = run_commands(place, names)
        assert not {name: (o.bad, o.text[-300:]) for name, o in outcomes.items() if o.bad}
        shutil.rmtree(place.top)
        return {name: outcome.code for name, outcome in outcomes.items()}

    return run


@pytest.mark.parametrize("name", CONTROLS)
def test_the_checkpoint_that_attacks_modify_is_accepted(codes, name):
    assert codes(CONTROLS[name], *READS) == dict.fromkeys(READS, 0)


@pytest.mark.parametrize("name", REFUSED)
def test_every_command_refuses_an_attack_or_is_not_affected(codes, name):
    found = codes(REFUSED[name], *COMMANDS)
    assert found["convert hf"] == 1 or name in CONVERTED
    assert found["open"] == 1 or name not in (*payloads.PAYLOADS, "object_reference")
    assert found["verify"] == 1 or name in CONVERTED or name not in (*payloads.PAYLOADS, *bombs.BOMBS)


@pytest.mark.parametrize("name", ODD)
def test_no_command_is_affected_by_odd_names_files_and_sizes(codes, name):
    assert codes(ODD[name], *COMMANDS)["convert hf"] == 0 or name not in payloads.IGNORED


def test_a_tensor_too_large_for_memory_is_a_ckptkit_error(tmp_path):
    """Shape and size match; the file is sparse."""
    place = Place(tmp_path / "case")
    ATTACKS["true_but_sparse"](place)
    outcome = run_commands(place, ("open",))["open"]
    assert (outcome.code, outcome.bad) == (1, [])
    assert "no memory" in outcome.text


# --- --allow-pickle is used only on request, with a warning, and runs no code


@pytest.mark.parametrize("name", ["inspect", "verify", "convert", "reshard"])
def test_a_file_with_an_unknown_class_is_read_only_with_allow_pickle(name, tmp_path):
    place = Place(tmp_path / "case")
    payloads.PAYLOADS["zip_pt"](place)
    dst = place.work / "dst"
    rest = {"convert": [dst], "reshard": [dst, "--world-size", "2"]}.get(name, [])
    refused, taken = (commands.run(name, place.src, *rest, *flags) for flags in ([], ["--allow-pickle"]))
    assert not place.marker.exists() and "bug in ckptkit" not in refused.output + taken.output
    assert refused.exit_code == 1 and "posix.mkdir" in refused.output
    assert taken.exit_code == 0, taken.output
    assert "may be incomplete" in " ".join(taken.stderr.split())
    if name == "convert":
        assert_same(load_file(dst / "model.safetensors"), weights())
