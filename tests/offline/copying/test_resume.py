"""A killed or interrupted conversion continues; anything else starts from scratch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckptkit.offline import conversion
from ckptkit.offline.convert import convert
from ckptkit.offline.copying import runs
from ckptkit.offline.copying.checks import Verifier
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify
from ckptkit.storage import journal, publish
from tests.ranks import RankError, run_ranks

UNEVEN = Path(__file__).parents[2] / "zoo" / "dcp_fsdp2_uneven_w4"
COLUMNS = {"tp_plan": {"*.up.weight": 1, "*.down.weight": 1}, "mesh": {"tp": 2}}
STEP = 16_000  # so that a small checkpoint takes several steps
# Runs one command in a separate process, which kills itself after so many steps are recorded as done.
KILLED = f"""
import json, os, signal, sys
from ckptkit.offline.convert import convert
from ckptkit.offline.copying import runs
from ckptkit.offline.reshard import reshard
from ckptkit.storage.journal import Journal
runs._STEP = {STEP}
command, src, dst, options, steps = {{"convert": convert, "reshard": reshard}}[sys.argv[1]], *sys.argv[2:]
left, done = [int(steps)], Journal.done
def counted(self, step):
    done(self, step)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.done = counted
command(src, dst, workers=1, **json.loads(options))
"""


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_STEP", STEP)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copytree(UNEVEN / "ckpt", tmp_path / "in")
    return tmp_path / "in"


def killed(command: str, source: Path, out: Path, steps: int, **options: object) -> None:
    arguments = [command, str(source), str(out), json.dumps(options), str(steps)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()


def content(folder: Path) -> dict[str, bytes]:
    """Return the files without timestamps."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: (folder / name).read_bytes() for name in names if name not in ("checkpoint.json", "README.md")}


def went_on(notes: tuple[str, ...]) -> str:
    return next((note for note in notes if note.startswith("continued an interrupted run")), "")


@pytest.mark.parametrize("steps", [1, 4])
def test_a_killed_conversion_continues_and_gives_the_same_bytes(source, tmp_path, steps):
    killed("convert", source, tmp_path / "out", steps)
    report = convert(str(source), str(tmp_path / "out"))
    assert f"{steps} of 5 steps" in went_on(report.notes)
    whole = convert(str(source), str(tmp_path / "whole"))
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert report.nbytes_read < whole.nbytes_read
    assert report.checked == whole.checked
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]


def test_a_step_without_proved_digests_is_not_recorded_as_done(source, tmp_path, monkeypatch):
    feed, done, stated = Verifier.feed, journal.Journal.done, []

    def lost(self, record, start, data):  # once, as if another thread had a piece of it
        monkeypatch.setattr(Verifier, "feed", feed)

    monkeypatch.setattr(Verifier, "feed", lost)
    monkeypatch.setattr(journal.Journal, "done", lambda self, step: (stated.append(step), done(self, step)))
    report = convert(str(source), str(tmp_path / "out"), workers=1)
    assert len(stated) == 4  # of 5
    assert report.checked == convert(str(source), str(tmp_path / "whole")).checked


@pytest.mark.parametrize("options", [{"check": False, "type": "local"}, COLUMNS])
def test_a_killed_reshard_continues_and_gives_the_same_tensors(source, tmp_path, options):
    killed("reshard", source, tmp_path / "out", 3, world_size=6, **options)
    report = reshard(str(source), str(tmp_path / "out"), world_size=6, **options)
    assert "3 of" in went_on(report.notes)
    reshard(str(source), str(tmp_path / "whole"), world_size=6, verify=True, **options)
    assert verify(str(tmp_path / "out")).ok
    assert {n: d for n, d in content(tmp_path / "out").items() if n != "manifest.safetensors"} == {
        n: d for n, d in content(tmp_path / "whole").items() if n != "manifest.safetensors"
    }


def test_a_killed_conversion_to_one_file_continues(source, tmp_path):
    arguments = [sys.executable, "-c", KILLED, "convert", str(source), str(tmp_path / "out.pt"), '{"to": "torch"}', "2"]
    subprocess.run(arguments, capture_output=True, check=False)
    assert went_on(convert(str(source), str(tmp_path / "out.pt"), to="torch").notes)
    convert(str(source), str(tmp_path / "whole.pt"), to="torch")
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.pt", "whole.pt"]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_killed_conversion_with_another_vocabulary_continues(tmp_path, steps):
    rng = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    names = {"model.embed_tokens.weight": 70, "model.layers.0.mlp.up_proj.weight": 90, "lm_head.weight": 70}
    tensors = {name: rng.random((rows, 100), np.float32) for name, rows in names.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    options = {"vocab_size": 75}
    killed("convert", tmp_path / "in", tmp_path / "out", steps, **options)
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"), verify=True, **options)
    assert went_on(report.notes)
    convert(str(tmp_path / "in"), str(tmp_path / "whole"), **options)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: len(tensor) for name, tensor in made.items()} == {**dict.fromkeys(names, 75), list(names)[1]: 90}


def test_a_run_killed_twice_continues_from_both(source, tmp_path):
    killed("convert", source, tmp_path / "out", 1)
    killed("convert", source, tmp_path / "out", 2)
    assert "3 of 5 steps" in went_on(convert(str(source), str(tmp_path / "out")).notes)


def test_the_next_run_continues_after_ctrl_c_even_in_the_same_process(source, tmp_path, monkeypatch):
    def interrupted(self, step):
        done(self, step)
        raise KeyboardInterrupt

    done = journal.Journal.done
    monkeypatch.setattr(journal.Journal, "done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), str(tmp_path / "out"), workers=1)
    monkeypatch.setattr(journal.Journal, "done", done)
    assert not (tmp_path / "out").exists()
    assert "1 of 5 steps" in went_on(convert(str(source), str(tmp_path / "out")).notes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_after_an_error_nothing_is_kept(source, tmp_path, monkeypatch):
    def failing(self, step):
        raise OSError("no")

    monkeypatch.setattr(journal.Journal, "done", failing)
    with pytest.raises(OSError, match="no"):
        convert(str(source), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def change_the_source(source: Path, left: Path) -> dict[str, object]:
    path = source / "__0_0.distcp"
    os.utime(path, ns=(0, 0))
    return {}


def change_the_plan(source: Path, left: Path) -> dict[str, object]:
    return {"max_shard_size": "3kB"}


def stop_checking(source: Path, left: Path) -> dict[str, object]:
    return {"check": False}


def cut_a_file(source: Path, left: Path) -> dict[str, object]:
    os.truncate(left / "model.safetensors", 100)
    return {}


def remove_a_file(source: Path, left: Path) -> dict[str, object]:
    (left / "model.safetensors").unlink()
    return {}


def restart_the_machine(source: Path, left: Path) -> dict[str, object]:
    owner = left.with_name(f"{left.name}.owner")
    statement, rest = owner.read_text().split("\n", 1)
    changed = json.loads(statement) | {"machine": "before/space/machine"}
    owner.write_text(json.dumps(changed) + "\n" + rest)
    return {}


@pytest.mark.parametrize(
    "change", [change_the_source, change_the_plan, stop_checking, cut_a_file, remove_a_file, restart_the_machine]
)
def test_different_work_starts_from_scratch(source, tmp_path, change, monkeypatch):
    killed("convert", source, tmp_path / "out", 2)
    left = next(path for path in tmp_path.iterdir() if path.name.startswith(".tmp-") and path.is_dir())
    (left / "stranger").write_text("of nobody")
    options = change(source, left)
    if change is restart_the_machine:
        monkeypatch.setattr("ckptkit.storage.owner._machine", lambda: "now/space/machine")
    report = convert(str(source), str(tmp_path / "out"), **options)
    assert went_on(report.notes) == ""
    convert(str(source), str(tmp_path / "whole"), **options)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]


def test_a_replaced_file_never_counts_as_finished(source, tmp_path, monkeypatch):
    convert(str(source), str(tmp_path / "out"))
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    damaged = before[:-100] + bytes(100)
    (tmp_path / "out" / "model.safetensors").write_bytes(damaged)
    # As if killed right after the swap: the old files are under the name of the staging directory.
    monkeypatch.setattr(publish, "close_staging", lambda *_, **__: None)
    convert(str(source), str(tmp_path / "out"), overwrite=True)
    monkeypatch.undo()
    left = next(path for path in tmp_path.iterdir() if path.name.startswith(".tmp-") and path.is_dir())
    assert (left / "model.safetensors").read_bytes() == damaged
    owner = left.with_name(f"{left.name}.owner")
    owner.write_text(owner.read_text().replace('"started": "', '"started": "9'))  # its writer is dead
    report = convert(str(source), str(tmp_path / "out"), overwrite=True)
    assert went_on(report.notes) == ""
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_the_work_of_a_living_writer_is_not_taken_over(source, tmp_path, monkeypatch):
    steps = []

    def second_run_meanwhile(self, step):
        done(self, step)
        steps.append(step)
        if len(steps) == 2:
            monkeypatch.undo()
            assert went_on(convert(str(source), str(tmp_path / "out")).notes) == ""

    done = journal.Journal.done
    monkeypatch.setattr(journal.Journal, "done", second_run_meanwhile)
    with pytest.raises(FileExistsError):
        convert(str(source), str(tmp_path / "out"), workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_torn_last_line_of_a_journal_is_ignored(source, tmp_path):
    killed("convert", source, tmp_path / "out", 2)
    owner = next(path for path in tmp_path.iterdir() if path.name.endswith(".owner"))
    owner.write_text(owner.read_text() + "3")
    assert "2 of 5 steps" in went_on(convert(str(source), str(tmp_path / "out")).notes)


def _killed_after_the_copy(src: str, dst: str) -> None:
    execute = conversion.execute

    def copied(*args: object, **kwargs: object) -> None:
        execute(*args, **kwargs)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGKILL)

    conversion.execute = copied  # type: ignore[assignment]
    convert(src, dst, max_shard_size="3kB")


def _converted_by_a_team(src: str, dst: str) -> int | None:
    return convert(src, dst, max_shard_size="3kB", verify=True).verified


def test_killed_ranks_publish_nothing_and_the_next_run_completes_the_result(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RankError):
        run_ranks(_killed_after_the_copy, 2, str(source), str(out))
    assert not out.exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-out-")]  # it had started to copy
    assert run_ranks(_converted_by_a_team, 2, str(source), str(out)) == [18, 18]
    convert(str(source), str(tmp_path / "alone"), max_shard_size="3kB")
    assert content(out) == content(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "in", "out"]
