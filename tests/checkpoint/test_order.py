"""The order of writes, fsyncs, renames and deletions in a trace of real calls: it survives a power cut."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit import CheckpointManager, RetentionPolicy, convert, reshard
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.storage import open_store, publish
from tests.checkpoint import states
from tests.checkpoint.crash import watch
from tests.checkpoint.killed import state
from tests.checkpoint.saving import fork, save

Event = tuple[str, str, str]  # operation, path, second path of a rename


class Recorder:
    """Turns file operations into events with absolute paths."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.paths: dict[int, str] = {}
        watch(lambda name, args: None, self.note)

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        first = args[0] if args else ""
        if name in ("open", "close"):
            return  # the descriptor is resolved when it is used
        path = self._path(first)
        if name in ("rename", "replace", "link", "_rename_noreplace", "_exchange"):
            kind = {"_rename_noreplace": "rename", "replace": "rename", "_exchange": "exchange"}.get(name, name)
            target = os.fspath(args[1])
            self.events.append((kind, path, target))
            # Either this interpreter wrote the published file, or a library that cannot be traced.
            below = [os.path.join(folder, file) for folder, _, files in os.walk(target) for file in files]
            self.events += [("holds", file, target) for file in sorted(below)]
        else:
            self.events.append((name, path, ""))

    @staticmethod
    def _path(what: Any) -> str:
        return os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)


def violations(events: list[Event], root: str) -> list[str]:
    """Return the violations of the rules R1 to R5 of a durable commit in a trace."""
    found: list[str] = []
    dirty: set[str] = set()  # files with bytes that are not fsynced
    unsynced: set[str] = set()  # directories with names that are not fsynced
    pending: list[str] = []  # commits whose rename is not durable yet
    durable: set[str] = set()  # files that were fsynced after they were written
    for kind, path, other in events:
        folder = os.path.dirname(path)
        if kind in ("write", "pwrite", "pwritev", "ftruncate", "posix_fallocate"):
            dirty.add(path)
            durable.discard(path)
            unsynced.add(folder)
            if _checkpoint_of(path, root):
                found.append(f"R0: {path} was written after it was published")
        elif kind == "fsync":
            durable.add(path)
            dirty.discard(path)
            unsynced.discard(path)
            if path == root:
                pending.clear()
        elif kind == "mkdir":
            unsynced.add(folder)
        elif kind == "holds" and _checkpoint_of(other, root) == other and path not in durable:
            found.append(f"R1: {path} was published, and nobody fsynced it")
        elif kind in ("rename", "exchange"):
            if _checkpoint_of(other, root) == other:
                found += [f"R1: {file} was not fsynced before the commit of {other}" for file in _below(dirty, path)]
                found += [f"R2: {name} was not fsynced before the commit of {other}" for name in _below(unsynced, path)]
                if root in unsynced:
                    found.append(f"R3: {root} was not fsynced before the commit of {other}")
                pending.append(other)
            for names in (dirty, unsynced, durable):
                moved = {name for name in names if name == path or name.startswith(path + "/")}
                names -= moved
                names |= {other + name[len(path) :] for name in moved}
            unsynced |= {folder, os.path.dirname(other)} - {os.path.dirname(root)}
        elif kind in ("unlink", "rmdir") and "/.trash-" in path and pending:
            found.append(f"R5: {path} was deleted while the commit of {pending[0]} was not durable")
        elif kind == "returned" and pending:
            found.append(f"R4: the save of {pending[0]} returned before its name was durable")
        if kind in ("rename", "exchange") and "/.ckptkit/" in other:
            unsynced -= {os.path.dirname(other)}  # leases and pins need not survive their owner
            dirty -= {other}
    return found


def _checkpoint_of(path: str, root: str) -> str | None:
    name = path[len(root) + 1 :].split("/", maxsplit=1)[0] if path.startswith(root + "/") else ""
    return f"{root}/{name}" if name.startswith("step_") else None


def _below(names: set[str], path: str) -> list[str]:
    return sorted(name for name in names if name == path or name.startswith(path + "/"))


def _saves(root: str, kind: str, recorder: Recorder) -> None:
    for step, options in ((1, {}), (2, {}), (2, {"overwrite": True})):
        save(root, step, sync=False, **options)
        recorder.events.append(("returned", "", ""))
        rotate(open_store(root), RetentionPolicy(max_num=1))


def _of_a_manager(root: str, kind: str, recorder: Recorder) -> None:
    with CheckpointManager(root, state_dict_type=kind, retention=RetentionPolicy(max_num=1)) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.save_async(2, state(2, 1), overwrite=True).result()


def _of_a_command(root: str, kind: str, recorder: Recorder) -> None:
    source = f"{os.path.dirname(root)}/source/step_00000001"
    os.mkdir(root)
    for again in (False, True):  # names that the rules recognize as checkpoints
        if kind == "reshard":
            reshard(source, f"{root}/step_out", world_size=3, overwrite=again)
        else:
            convert(source, f"{root}/step_out", to=kind, overwrite=again)


Job = Callable[[str, str, Recorder], None]


def _traced(say: Callable[[bytes], Any], root: str, job: Job, kind: str, swap: bool, forget: str) -> None:
    if not swap:
        publish._exchange = lambda first, second: False
    recorder = Recorder()
    if forget:
        fsync = os.fsync  # the recorded one: an omitted call leaves no event

        def forgetful(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if not (forget in path if "." in forget else path.endswith(forget)):
                fsync(fd)

        os.fsync = forgetful
    job(root, kind, recorder)
    happened = [event for event in recorder.events if swap or event[0] != "exchange"]
    say(json.dumps([*happened, ("returned", "", "")]).encode())


def trace(root: Path, job: Job = _saves, kind: str = "", *, swap: bool = True, forget: str = "") -> list[Event]:
    code, said = fork(_traced, str(root), job, kind, swap, forget)
    assert code == 0
    return [(kind, path, other) for kind, path, other in json.loads(said)]


def published(events: list[Event], kinds: tuple[str, ...], root: Path) -> int:
    """Return the number of events of these kinds that name a checkpoint as their target."""
    return sum(kind in kinds and _checkpoint_of(other, str(root)) == other for kind, _, other in events)


@pytest.mark.parametrize("swap", [True, False])
def test_files_are_durable_before_the_commit_and_the_commit_before_the_return(tmp_path, swap):
    events = trace(tmp_path, swap=swap)
    assert sum(kind == "fsync" for kind, _, _ in events) > 20
    assert published(events, ("rename", "exchange"), tmp_path) >= 3
    assert sum(kind == "unlink" for kind, _, _ in events) > 3
    assert violations(events, str(tmp_path)) == []


@pytest.mark.parametrize(
    ("job", "kind"),
    [(_of_a_manager, kind) for kind in ("sharded", "full", "local")]
    + [(_of_a_command, kind) for kind in ("hf", "dcp", "reshard")],
)
def test_files_are_durable_before_the_rename_and_the_directory_after(tmp_path, job, kind):
    if job is _of_a_command:
        states.save(tmp_path / "source", state(1))
    events = trace(tmp_path / "run", job, kind)
    assert published(events, ("holds",), tmp_path / "run") >= 4
    assert violations(events, str(tmp_path / "run")) == []


@pytest.mark.parametrize(("forget", "rule"), [("__0_0.distcp", "R1"), ("/shards", "R2"), ("checkpoint.json", "R1")])
def test_the_rules_find_a_forgotten_fsync(tmp_path, forget, rule):
    found = violations(trace(tmp_path, forget=forget), str(tmp_path))
    assert any(text.startswith(rule) for text in found), found


def test_the_rules_find_a_root_that_is_not_synced(tmp_path):
    events = [event for event in trace(tmp_path) if event != ("fsync", str(tmp_path), "")]
    found = {text[:2] for text in violations(events, str(tmp_path))}
    assert found == {"R3", "R4", "R5"}
