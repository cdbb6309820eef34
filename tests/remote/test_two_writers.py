"""Two commands write to one URL of an object store at once: one wins, or both fail; nothing is mixed."""

from __future__ import annotations

import json
import os
import time
import warnings
from typing import Any

import pytest

from ckptkit.errors import CheckpointExistsError, CkptkitError
from tests.remote.runs import UNEVEN, Options, command, comparable

COMMANDS: dict[str, Options] = {
    "one file": {},
    "ten files": {"max_shard_size": "1kB"},
    "two ranks": {"world_size": 2},
    "torch": {"to": "torch"},
    "torch, bf16": {"to": "torch", "dtype": "bf16"},
}


def at_once(url: str, s3: Options, commands: list[Options], apart_s: float, **more: Any) -> list[str]:
    """Run two commands in two processes, the second a little later; return how each ended."""
    readers, start = [], time.time() + 0.3
    for nth, options in enumerate(commands):
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the server has threads; the child touches none
            pid = os.fork()
        if pid == 0:
            said = "it broke"
            try:
                time.sleep(max(0.0, start + nth * apart_s - time.time()))
                command(UNEVEN, url, s3, {**options, **more})
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
    both = [COMMANDS[name] for name in commands]
    alone = []
    for nth, options in enumerate(both):
        command(UNEVEN, f"{url}/alone-{nth}", s3, options)
        alone.append(comparable(f"{url}/alone-{nth}", s3))
    for nth, apart_s in enumerate((0.0, 0.1)):
        here = f"{url}/{nth}"
        if overwrite:
            command(UNEVEN, here, s3, both[0])
        ends = at_once(here, s3, both, apart_s, **({"overwrite": True} if overwrite else {}))
        won = [result for result, end in zip(alone, ends, strict=True) if end == "done"]
        assert "it broke" not in ends and won, ends
        assert overwrite or len(won) == 1, ends
        found = comparable(here, s3)
        assert found in won, (ends, sorted(found))
