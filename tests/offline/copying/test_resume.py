"""A killed or interrupted conversion continues; anything else starts from scratch."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import convert, reshard, verify
from ckptkit.formats.checks import Verifier
from ckptkit.storage import journal, publish
from tests.offline.exports import write_model
from tests.offline.folders import names
from tests.offline.resuming import COLUMNS, assert_whole, killed, went_on
from tests.patches import after

pytestmark = pytest.mark.usefixtures("short_steps")


@pytest.mark.parametrize(("command", "options", "steps"), [
    (convert, {}, 1), (convert, {}, 4), (reshard, {"check": False, "type": "local"}, 3), (reshard, COLUMNS, 3),
    (convert, {"vocab_size": 75}, 1), (convert, {"vocab_size": 75}, 2),
])  # fmt: skip
def test_a_killed_command_continues_and_gives_the_same_tensors(source, tmp_path, command, options, steps):
    if command is reshard:
        options = {"world_size": 6, **options}
    if "vocab_size" in options:
        rows = {"model.embed_tokens.weight": 70, "model.layers.0.mlp.up_proj.weight": 90, "lm_head.weight": 70}
        shutil.rmtree(source)
        rng = np.random.default_rng(0)
        write_model(source, {name: rng.random((count, 100), np.float32) for name, count in rows.items()})
    killed(command, source, tmp_path / "out", steps, **options)
    report = command(str(source), str(tmp_path / "out"), **options)
    assert f"{steps} of " in went_on(report.notes)
    assert command is convert or verify(str(tmp_path / "out")).ok
    apart = ["manifest.safetensors"] if command is reshard else []
    whole = assert_whole(source, tmp_path, *apart, command=command, **options)
    assert report.checked == whole.checked
    assert command is reshard or report.nbytes_read < whole.nbytes_read


def test_a_step_without_proved_digests_is_not_recorded_as_done(source, tmp_path, monkeypatch):
    begin, done, stated = Verifier.begin, journal.Journal.done, []

    def lost(self, record, start):  # once, as if another thread had a piece of it
        monkeypatch.setattr(Verifier, "begin", begin)

    monkeypatch.setattr(Verifier, "begin", lost)
    monkeypatch.setattr(journal.Journal, "done", lambda self, step: (stated.append(step), done(self, step)))
    report = convert(str(source), str(tmp_path / "out"), workers=1)
    assert len(stated) == 4  # of 5
    assert report.checked == convert(str(source), str(tmp_path / "whole")).checked


def test_a_killed_conversion_to_one_file_continues(source, tmp_path):
    killed(convert, source, tmp_path / "out.pt", 2, to="torch")
    assert went_on(convert(str(source), str(tmp_path / "out.pt"), to="torch").notes)
    convert(str(source), str(tmp_path / "whole.pt"), to="torch")
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()
    assert names(tmp_path) == ["in", "out.pt", "whole.pt"]


def restart_the_machine(left: Path) -> None:
    owner = left.with_name(f"{left.name}.owner")
    statement, rest = owner.read_text().split("\n", 1)
    changed = json.loads(statement) | {"machine": "before/space/machine"}
    owner.write_text(json.dumps(changed) + "\n" + rest)


CHANGES: dict[str, Any] = {  # of the source, and of what the killed run left
    "the source": lambda source, left: os.utime(source / "__0_0.distcp", ns=(0, 0)),
    "a cut file": lambda source, left: os.truncate(left / "model.safetensors", 100),
    "a removed file": lambda source, left: (left / "model.safetensors").unlink(),
    "a restarted machine": lambda source, left: restart_the_machine(left),
    "another plan": {"max_shard_size": "3kB"},
    "no checks": {"check": False},
}


@pytest.mark.parametrize("change", CHANGES)
def test_different_work_starts_from_scratch(source, tmp_path, change, monkeypatch):
    killed(convert, source, tmp_path / "out", 2)
    left = next(path for path in tmp_path.glob(".tmp-*") if path.is_dir())
    (left / "stranger").write_text("of nobody")
    options = CHANGES[change] if isinstance(CHANGES[change], dict) else {}
    if not options:
        CHANGES[change](source, left)
    if change == "a restarted machine":
        monkeypatch.setattr("ckptkit.storage.owner._machine", lambda: "now/space/machine")
    report = convert(str(source), str(tmp_path / "out"), **options)
    assert went_on(report.notes) == ""
    assert_whole(source, tmp_path, **options)


def test_a_replaced_file_never_counts_as_finished(source, tmp_path, monkeypatch):
    convert(str(source), str(tmp_path / "out"))
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    damaged = before[:-100] + bytes(100)
    (tmp_path / "out" / "model.safetensors").write_bytes(damaged)
    # As if killed right after the swap: the old files are under the name of the staging directory.
    monkeypatch.setattr(publish, "close_staging", lambda *_, **__: None)
    convert(str(source), str(tmp_path / "out"), overwrite=True)
    monkeypatch.undo()
    left = next(path for path in tmp_path.glob(".tmp-*") if path.is_dir())
    assert (left / "model.safetensors").read_bytes() == damaged
    owner = left.with_name(f"{left.name}.owner")
    owner.write_text(owner.read_text().replace('"started": "', '"started": "9'))  # its writer is dead
    report = convert(str(source), str(tmp_path / "out"), overwrite=True)
    assert went_on(report.notes) == ""
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert names(tmp_path) == ["in", "out"]


def test_the_work_of_a_living_writer_is_not_taken_over(source, tmp_path, monkeypatch):
    steps = []

    def second_run_meanwhile(_, journal, step):
        steps.append(step)
        if len(steps) == 2:
            monkeypatch.undo()
            assert went_on(convert(str(source), str(tmp_path / "out")).notes) == ""

    after(monkeypatch, journal.Journal, "done", second_run_meanwhile)
    with pytest.raises(FileExistsError):
        convert(str(source), str(tmp_path / "out"), workers=1)
    assert names(tmp_path) == ["in", "out"]


def test_a_torn_last_line_of_a_journal_is_ignored(source, tmp_path):
    killed(convert, source, tmp_path / "out", 2)
    owner = next(path for path in tmp_path.iterdir() if path.name.endswith(".owner"))
    owner.write_text(owner.read_text() + "3")
    assert "2 of 5 parts" in went_on(convert(str(source), str(tmp_path / "out")).notes)
