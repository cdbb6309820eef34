"""A small run for tests: states known by step, saved, listed and compared byte by byte."""

import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.checkpoint.run.commit import begin_save
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.formats.own.record import CommitRecord, FileRecord, data_store
from ckptkit.storage import Store, open_store
from tests.checkpoint.crash import kill_at


def content(step: int, rank: int, nbytes: int = 3000) -> bytes:
    """Return what rank `rank` saves at `step`."""
    return (f"step {step} rank {rank} ".encode() * nbytes)[:nbytes]


def write(store: Store, path: str, data: bytes, *, sync: bool = True) -> dict[str, FileRecord]:
    store.write(path, data, sync=sync)
    return {path: FileRecord(len(data), xxhash.xxh3_64_hexdigest(data))}


def save(
    root: Store | str | Path,
    step: int,
    *,
    coordinator: Coordinator | None = None,
    fields: dict[str, Any] | None = None,
    nbytes: int = 3000,
    before: Callable[[Store], None] | None = None,
    sync: bool = True,
    **options: Any,
) -> CommitRecord:
    """Save the files of `content`; `before` runs on every rank once the files are written.

    With `sync=False` no rank makes its files durable, so the commit has to.
    """
    coordinator = coordinator or Coordinator()
    store = root if not isinstance(root, (str, Path)) else open_store(str(root))
    attempt = begin_save(store, step, coordinator=coordinator, **options)
    try:
        files = write(
            attempt.store, f"shards/__{coordinator.rank}_0.distcp", content(step, coordinator.rank, nbytes), sync=sync
        )
        if before is not None:
            before(attempt.store)
    except BaseException as error:
        attempt.abort(error)
    return attempt.commit(
        files,
        {"state_dict_type": "sharded", **(fields or {})},
        payload=len(files),
        complete=lambda payloads: write(attempt.store, "objects.json", repr(payloads).encode(), sync=sync),
    )


def check(root: Store | str | Path) -> list[int]:
    """Return the listed steps in order; compare each with what was saved, byte by byte."""
    store = root if not isinstance(root, (str, Path)) else open_store(str(root))
    inventory = list_checkpoints(store)
    for item in inventory.committed:
        assert item.path == item.name or "@" in item.path
        data = data_store(store.child(item.path), item.record)
        assert len(item.record.files) == item.record.world_size + 1
        for path, file in item.record.files.items():
            read = data.read(path)
            assert (len(read), xxhash.xxh3_64_hexdigest(read)) == (file.nbytes, file.checksum), (item.path, path)
            if path != "objects.json":
                rank = int(path.removeprefix("shards/__").removesuffix("_0.distcp"))
                assert read == content(item.step, rank, len(read)), (item.path, path)
        there = {found.path for found in data.list(recursive=True)} - {"checkpoint.json"}
        assert there == set(item.record.files), item.path
    return [item.step for item in inventory.committed]


def steps(root: Store | str | Path) -> list[int]:
    """Return the listed steps in order."""
    store = root if not isinstance(root, (str, Path)) else open_store(str(root))
    return [item.step for item in list_checkpoints(store).committed]


def leftovers(root: str | Path) -> list[str]:
    """Return names below the root that a dead attempt left."""
    return sorted(p.name for p in Path(root).iterdir() if p.name.startswith((".tmp-", ".trash-")) or "@" in p.name)


def start(fn: Callable[[], Any]) -> int:
    """Run a function in a forked process; return its process id. The exit code is 97 if the function raises."""
    leave = os._exit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # for the parent's threads, which the child does not use
        pid = os.fork()
    if pid == 0:
        code = 97
        try:
            fn()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)
    return pid


def fork(fn: Callable[..., Any], *args: Any, timeout: float = 30.0) -> tuple[int, bytes]:
    """Run `fn(say, *args)` in a forked process; return its exit code and the bytes it gave to `say`."""
    reader, writer = os.pipe()
    write = os.write
    pid = start(lambda: (os.close(reader), fn(lambda data: write(writer, data), *args)))
    os.close(writer)
    said, deadline = b"", time.monotonic() + timeout
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(reader, 65536)
        if not data:
            break
        said += data
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said


def killed_at(nth: int, call: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Run a call in a process that is killed before its nth file operation. Return whether that was before its end."""

    def run(say: Any) -> None:
        kill_at(nth)
        call(*args, **options)

    code, said = fork(run)
    assert code in (0, -signal.SIGKILL), (nth, code, said)
    return code != 0
