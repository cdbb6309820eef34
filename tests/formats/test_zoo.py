"""Every checkpoint of the zoo, opened as by a user: the weights bit for bit, or a refusal that names the fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.catalog.entry import Role
from ckptkit.errors import CkptkitError, IncompleteCheckpointError, UnsafePathError, UnsafePickleError
from ckptkit.formats.detect import open_source
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.objects import read_object
from tests.formats.readback import contents, contents_of_file
from tests.lazy import modules_after

ZOO = Path(__file__).parents[1] / "zoo"
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in json.loads((ZOO / "MANIFEST.json").read_text())}
OK = [name for name, case in CASES.items() if case["outcome"] == "ok"]
# Not a safetensors dtype: the catalog lists it, an export refuses or skips it.
NOT_EXPECTED = {"dcp_dtypes_w2": {"c64"}}


def _options(case: dict[str, Any]) -> ReadOptions:
    layout = ZOO / case["name"] / "flat_param_layout_NOT_ON_DISK_NORMALLY.json"
    return ReadOptions(layout=str(layout) if layout.exists() else None)


def url_of(case: dict[str, Any]) -> str:
    return str(ZOO / case["name"] / case["input"])


@pytest.mark.parametrize("name", OK)
def test_the_weights_are_bit_exact_and_all_else_can_be_read(name):
    case = CASES[name]
    source = open_source(url_of(case), options=_options(case))
    found = contents(source.store, source.catalog.by_role(Role.MODEL))
    expected = contents_of_file(ZOO / name / (case["expected"] or "model.safetensors"))
    assert {fqn: found[fqn] for fqn in set(found) - NOT_EXPECTED.get(name, set())} == expected
    contents(source.store, source.catalog.tensors)
    for entry in source.catalog.objects.values():
        read_object(source.store, entry)


REFUSED = {  # but for the flipped bit in tensor data: opening reads none, `verify` and every copy find it
    "hostile_metadata": (UnsafePickleError, r"\.metadata: .*builtins\.exec"),
    "broken_missing_metadata": (IncompleteCheckpointError, r"\.metadata is missing"),
    "broken_missing_shard": (IncompleteCheckpointError, r"__1_0\.distcp is missing"),
    "broken_verl_missing_rank": (CkptkitError, r"model_world_size_2_rank_1\.pt"),
    "hostile_path_traversal": (UnsafePathError, r"\.metadata: it names '\.\./\.\./"),
}


def test_every_refused_checkpoint_is_listed():
    assert {*REFUSED, "broken_bitflip_shard"} == {name for name, case in CASES.items() if case["outcome"] == "refuse"}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_for_a_broken_or_hostile_checkpoint_names_file_and_fault(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        open_source(url_of(CASES[name]))
    assert not list(tmp_path.iterdir())  # no code ran


@pytest.mark.parametrize("name", ["torch_checkpointing_w1", "torch_checkpointing_w2"])
def test_an_optimizer_in_other_files_than_the_model_is_read(name):
    source = open_source(url_of(CASES[name]))
    entries = source.catalog.by_role(Role.OPTIMIZER).values()
    found = contents(source.store, {f"{entry.fqn}.{entry.state}": entry for entry in entries})
    assert found == contents_of_file(ZOO / name / "EXPECTED_optimizer.safetensors")
    assert any("not read: train_state_0.pt" in note for note in source.catalog.info.notes)


def test_opening_needs_no_torch():
    urls = [url_of(CASES[name]) for name in OK if "fsdp1_local" not in name]
    code = f"from ckptkit.formats.detect import open_source\nfor url in {urls!r}: open_source(url)"
    assert not modules_after(code) & {"torch", "safetensors", "deepspeed", "lightning"}
