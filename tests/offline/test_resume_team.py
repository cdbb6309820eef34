"""A job of several ranks that was killed or lost a rank is continued by any number of ranks."""

import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptkit import convert, reshard, verify
from ckptkit.checkpoint.run import coordinator
from ckptkit.errors import RankFailedError
from ckptkit.offline.copying import runs
from ckptkit.storage import owner
from ckptkit.storage.local import LocalStore
from tests.checkpoint.crash import kill_at
from tests.offline.folders import names
from tests.offline.resuming import COLUMNS, STEP, assert_whole, content, dying_after, went_on
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("short_steps")
MANY = {"max_shard_size": "1kB"}  # ten files
Options = dict[str, Any]


def run(src: str, dst: str, options: Options) -> str:
    """Return what this rank's report says about the work that it reused."""
    runs._STEP = STEP  # in this process too
    command = reshard if "world_size" in options else convert
    return went_on(command(src, dst, workers=1, **options).notes)


def dies(src: str, dst: str, options: Options, victims: tuple[int, ...], steps: int) -> None:
    """Kill some ranks once so many of their steps are done; the others write their errors to a file."""
    rank = int(os.environ["RANK"])
    if rank in victims:
        dying_after(steps)
    coordinator._BOARD_S = 0.5  # no rank is left to record an error
    try:
        run(src, dst, options)
    except RankFailedError as error:
        Path(src).with_name(f"said-{rank}").write_text(str(error))
        raise


def killed(source: Path, out: Path, ranks: int, victims: tuple[int, ...], steps: int, **options: Any) -> None:
    with pytest.raises(RankError):
        run_ranks(dies, ranks, str(source), str(out), options, victims, steps)
    assert not out.exists()


def run_again(ranks: int, source: Path, out: Path, options: Options = MANY) -> None:
    """Run it on these ranks; assert that it continued the work of another run."""
    assert run_ranks(run, ranks, str(source), str(out), options)[0]


def test_a_reshard_continues_after_killed_ranks(source, tmp_path):
    options = {"world_size": 6, **COLUMNS, "type": "local"}
    killed(source, tmp_path / "out", 3, (0, 1, 2), 1, **options)
    run_again(2, source, tmp_path / "out", options)
    assert verify(str(tmp_path / "out")).ok
    assert_whole(source, tmp_path, "manifest.safetensors", command=reshard, **options)


def _killed_at(src: str, dst: str, kills: dict[int, int]) -> int:
    """Run a conversion in which some ranks are killed at their nth file operation; return this rank's operations."""
    operations = kill_at(kills.get(int(os.environ["RANK"]), 0))
    coordinator._BOARD_S = 0.5
    run(src, dst, MANY)
    return operations()


@pytest.mark.parametrize(("first", "second", "seeds"), [(1, 1, range(8)), (3, 2, range(2)), (1, 3, range(2))])
def test_ranks_killed_at_any_file_operation_are_continued_by_any_number(source, tmp_path, first, second, seeds):
    out, whole = tmp_path / "out", tmp_path / "whole"
    most = min(run_ranks(_killed_at, first, str(source), str(whole), {}))
    for rng in map(random.Random, seeds):
        victims = rng.choice([range(first), [rng.randrange(first)]])
        with contextlib.suppress(RankError):
            run_ranks(_killed_at, first, str(source), str(out), {rank: rng.randrange(10, most) for rank in victims})
        there = out.exists()
        assert not there or content(out) == content(whole)
        run_ranks(run, second, str(source), str(out), {**MANY, "overwrite": there})
        assert content(out) == content(whole) and names(tmp_path) == ["in", "out", "whole"]
        shutil.rmtree(out)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_ends_the_others_with_an_error_that_names_it(source, tmp_path, victim):
    killed(source, tmp_path / "out", 3, (victim,), 1, **MANY)
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {victim}" in (tmp_path / f"said-{rank}").read_text()
        (tmp_path / f"said-{rank}").unlink()
    run_again(3, source, tmp_path / "out")
    assert names(tmp_path) == ["in", "out"]


def _on_another_disk(src: str, dst: str) -> None:
    real = LocalStore.info

    def not_shared(self: LocalStore, path: str) -> Any:
        return None if path.startswith(".tmp-out-") else real(self, path)

    if os.environ["RANK"] == "1":
        LocalStore.info = not_shared  # type: ignore[method-assign]
    convert(src, dst, **MANY)


def test_a_destination_that_only_one_rank_sees_fails_all_and_keeps_nothing(source, tmp_path):
    with pytest.raises(RankError, match="DST must be on storage that all machines share"):
        run_ranks(_on_another_disk, 2, str(source), str(tmp_path / "out"))
    assert names(tmp_path) == ["in"]


def _on_two_machines(src: str, dst: str, options: Options, kill: bool) -> str:
    rank = os.environ["RANK"]
    owner._machine = lambda: f"boot-{rank}/space/machine-{rank}"
    os.environ["LOCAL_RANK"] = "0"
    if not kill:
        return run(src, dst, options)
    dies(src, dst, options, (0, 1), 1)
    return ""


def test_a_run_on_two_machines_continues_if_both_take_part_again(source, tmp_path):
    with pytest.raises(RankError):
        run_ranks(_on_two_machines, 2, str(source), str(tmp_path / "out"), MANY, True)
    assert run_ranks(_on_two_machines, 2, str(source), str(tmp_path / "out"), MANY, False)[0]
    assert names(tmp_path) == ["in", "out"]


def test_a_restarted_file_does_not_count_as_written_by_an_earlier_run(source, tmp_path):
    first = {"max_shard_size": "3kB"}
    killed(source, tmp_path / "out", 1, (0,), 2, **first)
    left = next(path for path in tmp_path.glob(".tmp-*") if path.is_dir())
    for path in left.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size - 1)  # the second run, which is killed as well, keeps none of them
    killed(source, tmp_path / "out", 2, (0, 1), 1, **first)
    convert(str(source), str(tmp_path / "out"), **first)
    assert_whole(source, tmp_path, **first)
