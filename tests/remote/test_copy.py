"""`copy` to and from an object store: identical bytes both ways, interrupted or not."""

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest

from ckptkit import copy
from ckptkit.checkpoint.run.pins import list_pins, pin_forever
from ckptkit.storage.objects import RemoteStore
from tests.checkpoint.saving import fork
from tests.patches import before, die
from tests.remote.runs import Place

ZOO = Path(__file__).parents[1] / "zoo"


def checkpoints(place: Place) -> dict[str, bytes]:
    """Return the files of a run's checkpoints."""
    return {path: data for path, data in place.objects().items() if path.startswith("step_")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(str(tmp_path_factory.mktemp("copy") / "RUN"))
    made.save(1, 2, 3)
    pin_forever(f"{made.url}/step_00000002", "table 2")
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "disk"))


def copied(source: Place, target: Place, **options: Any) -> None:
    copy(source.url, target.url, src_storage_options=source.options, dst_storage_options=target.options, **options)


def test_a_run_is_copied_to_a_bucket_and_back(run, near, disk):
    copied(run, near, verify=True)
    assert checkpoints(near) == checkpoints(run)
    assert [pin.name for pin in list_pins(near.store)] == ["step_00000002"]
    assert near.objects()["latest"] == b"step_00000003\n"
    copied(near, disk)
    assert checkpoints(disk) == checkpoints(run)
    copy(near.url, near.beside("too").url, storage_options=near.options)
    for place in (near, disk):
        place.loads(3)
        place.save(4)
    assert checkpoints(near.beside("too")) == checkpoints(run)


@pytest.mark.parametrize("name", ["dcp_fsdp2_uneven_w4/ckpt", "hf_ref_llama_tied", "verl_fsdp2_w2"])
def test_a_foreign_checkpoint_is_copied_to_a_bucket_and_back(name, near, disk):
    source = Place(str(ZOO / name))
    copied(source, near)
    copied(near, disk)
    assert near.objects() == disk.objects() == source.objects()


def _killed(say: Any, run: Place, place: Place, nth: int) -> None:
    calls = itertools.count(1)
    before(pytest.MonkeyPatch(), RemoteStore, "writer", lambda *_, **__: next(calls) == nth and die())
    copied(run, place)


@pytest.mark.parametrize("nth", [1, 4, 8])
def test_a_killed_copy_to_a_bucket_is_a_shorter_run_and_continues(run, near, nth):
    assert fork(_killed, run, near, nth)[0] == -signal.SIGKILL
    done = near.steps()
    assert done == [1, 2, 3][: len(done)] != [1, 2, 3]
    copied(run, near)
    assert checkpoints(near) == checkpoints(run)
