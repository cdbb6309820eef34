"""Two commands write to one URL of an object store at once: one wins, or both fail; nothing is mixed."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CheckpointExistsError, CkptkitError
from ckptkit.offline.convert import convert
from ckptkit.offline.reshard import reshard
from ckptkit.storage import open_store

Options = dict[str, Any]
UNEVEN = Path(__file__).parents[1] / "zoo" / "dcp_fsdp2_uneven_w4" / "ckpt"
COMMANDS: dict[str, Options] = {
    "one file": {},
    "ten files": {"max_shard_size": "1kB"},
    "two ranks": {"world_size": 2},
    "torch": {"to": "torch"},
    "torch, bf16": {"to": "torch", "dtype": "bf16"},
}


def write(url: str, s3: Options, command: str, **more: Any) -> None:
    options = {**COMMANDS[command], **more}
    (reshard if "world_size" in options else convert)(str(UNEVEN), url, dst_storage_options=s3, **options)


def objects(url: str, s3: Options) -> dict[str, bytes]:
    store = open_store(url, storage_options=s3)
    return {item.path: store.read(item.path) for item in store.list(recursive=True)}


def at_once(url: str, s3: Options, commands: tuple[str, str], apart_s: float, **more: Any) -> list[str]:
    """Run two commands in two processes, the second a little later; return how each ended."""
    readers, start = [], time.time() + 0.3
    for nth, command in enumerate(commands):
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the server has threads; the child touches none
            pid = os.fork()
        if pid == 0:
            said = "it broke"
            try:
                time.sleep(max(0.0, start + nth * apart_s - time.time()))
                write(url, s3, command, **more)
                said = "done"
            except CheckpointExistsError as error:
                said = f"refused: {error}"
            except CkptkitError as error:
                said = f"told: {error}"
            finally:
                os.write(writer, json.dumps(said).encode())
                os._exit(0)
        os.close(writer)
        readers.append((reader, pid))
    ends = []
    for reader, pid in readers:
        with open(reader, "rb") as found:
            ends.append(json.loads(found.read()))
        os.waitpid(pid, 0)
    return ends


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "commands", [("one file", "ten files"), ("ten files", "two ranks"), ("torch", "torch, bf16")], ids=str
)
def test_one_of_two_concurrent_commands_wins_and_nothing_is_mixed(
    url: str, s3: Options, commands: tuple[str, str], overwrite: bool
) -> None:
    alone = {}
    for command in commands:
        write(f"{url}/alone-{len(alone)}", s3, command)
        alone[command] = objects(f"{url}/alone-{len(alone)}", s3)
    write(f"{url}/old", s3, commands[0])
    for nth, apart_s in enumerate((0.0, 0.1)):
        here = f"{url}/{nth}"
        if overwrite:
            write(here, s3, commands[0])
        ends = at_once(here, s3, commands, apart_s, **({"overwrite": True} if overwrite else {}))
        won = [command for command, end in zip(commands, ends, strict=True) if end == "done"]
        assert "it broke" not in ends and won, ends
        assert overwrite or len(won) == 1, ends
        found = objects(here, s3)
        assert any(same(found, alone[command]) for command in won), (ends, sorted(found))


def same(found: dict[str, bytes], other: dict[str, bytes]) -> bool:
    """Compare everything except times and writers."""
    varies = ("checkpoint.json", "manifest.safetensors", "SHA256SUMS")
    return found.keys() == other.keys() and all(
        data == other[path] for path, data in found.items() if not path.endswith(varies)
    )
