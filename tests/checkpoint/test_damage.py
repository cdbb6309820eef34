"""Damage of every kind in every file: `verify` finds it, and no load accepts it."""

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptkit import verify
from ckptkit.errors import CkptkitError
from ckptkit.formats.detect import open_source
from ckptkit.formats.own.reader import open_catalog
from ckptkit.storage import open_store
from tests.checkpoint import jobs
from tests.checkpoint.states import KINDS, load, save

Damage = Callable[[], str]


def make_run(root: str) -> None:
    """Save two steps of each kind on these ranks, and a DCP of plain torch."""
    job = jobs.make("1d")
    for kind in KINDS:
        for step in (1, 2):
            job.train(1)
            save(f"{root}/{kind}", job.state(), step, state_dict_type=kind)
    for step in (1, 2):
        job.train(1)
        dcp.save({"model": job.model.state_dict(), "step": step}, checkpoint_id=f"{root}/dcp/{step}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.ranks import run_ranks

    root = tmp_path_factory.mktemp("damage")
    run_ranks(make_run, 2, str(root))
    return root


def copied(run: Path, to: Path) -> Path:
    return shutil.copytree(run, to / run.name, ignore=shutil.ignore_patterns(".ckptkit"))


def damages(folder: Path, older: Path, seed: int) -> Iterator[tuple[str, str, Damage]]:
    """Yield (what, file, how) for a checkpoint; each damage is done to a copy."""
    chance = random.Random(seed)
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    for name in files:
        data, file = (folder / name).read_bytes(), folder / name

        def change(new: bytes, file: Path = file) -> Damage:
            return lambda: str(file.write_bytes(new))

        for _ in range(1 + name.endswith(".distcp")):
            at = chance.randrange(len(data))
            yield f"bit {at}", name, change(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        yield "truncated", name, change(data[: chance.randrange(len(data))])
        tail = max(16, len(data) // 8)
        if any(data[-tail:]):
            yield "zeroed tail", name, change(data[:-tail] + bytes(tail))
        page = len(data) // 4
        if any(data[page : page + 512]):
            yield "zeroed page", name, change(data[:page] + bytes(len(data[page : page + 512])) + data[page + 512 :])
        yield "missing", name, lambda file=file: str(file.unlink())
        other = older / name
        if other.exists() and other.read_bytes() != data:
            yield "of another save", name, change(other.read_bytes())
    shards = [name for name in files if name.endswith(".distcp") or name.startswith("local_")]
    for one, two in itertools.pairwise(shards):
        yield "of another rank", one, lambda one=one, two=two: str(shutil.copy(folder / two, folder / one))
    yield "stray", "notes.txt", lambda: str((folder / "notes.txt").write_bytes(b"mine"))


def resumed(run: str | Path, which: str | int = "latest", **options: Any) -> tuple[int, str]:
    """Load into a fresh job: return the step and all values, or 0 and the error."""
    job = jobs.make("1d", start=9)
    try:
        report = load(run, job.state(), which, rng_on_resize="keep", per_rank_on_resize="keep", **options)
    except CkptkitError as error:
        return 0, f"{type(error).__name__} {error}"
    return report.step, repr(sorted((k, str(v)) for k, v in jobs.everything(job).items()))


def on_rank_0(do: Callable[[], Any]) -> None:
    """Let rank 0 do something while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        do()
    dist.barrier()


@contextlib.contextmanager
def done_to(folder: Path, do: Damage) -> Iterator[None]:
    """Let rank 0 damage a checkpoint, and restore it after the block. All ranks must call it."""
    good = folder.with_name(".good")
    on_rank_0(lambda: shutil.copytree(folder, good))
    on_rank_0(do)
    yield
    on_rank_0(lambda: (shutil.rmtree(folder), good.rename(folder)))


Loaded = tuple[int, str]  # the step and all values, or 0 and the error
Case = tuple[str, str, bool, tuple[str, ...], Loaded, Loaded]


def loads(url: str, part: int, seed: int = 3) -> tuple[list[Loaded], list[Case]]:
    """Apply a third of all damages in turn.

    Return the previous and this checkpoint, and for each damage: what, file, what `verify` said, and what was loaded of
    this step, and with a fallback. The last case is without damage.
    """
    folder = Path(url)
    run, step = folder.parent, int(folder.name.removeprefix("step_"))
    sound = [resumed(run, number) for number in (step - 1, step)]
    found = []
    planned = list(damages(folder, folder.parent / "step_00000001", seed))[part::3]
    for what, name, do in [*planned, ("good", "", lambda: "")]:
        with done_to(folder, do):
            seen = verified(url) if dist.get_rank() == 0 else (True, ())
            found.append((what, name, *seen, resumed(run, step), resumed(run, fallback="previous")))
    return sound, found


def verified(url: str) -> tuple[bool, tuple[str, ...]]:
    try:
        report = verify(url)
    except CkptkitError as error:
        return False, (str(error),)
    return report.ok, tuple(f"{p.path} {p.tensor} {p.message}" for p in report.problems)


@pytest.mark.parametrize("part", range(3))
def test_no_damage_is_missed_or_loaded_as_good(ranks, saved, tmp_path, kind, part):
    folder = copied(saved / kind, tmp_path) / "step_00000002"
    sound, cases = ranks.run(loads, 2, str(folder), part, timeout=120)[0]
    assert sound[0][0] == 1 and sound[1][0] == 2 and sound[0][1] != sound[1][1]
    assert len(cases) >= 8
    assert [text for case in cases for text in faults(case, sound, folder.name)] == []


def faults(case: Case, sound: Sequence[Loaded], folder: str) -> list[str]:
    """Return what is wrong with the results of `verify` and of loads for one damage."""
    what, name, ok, texts, loaded, again = case
    where = f"{folder}: {name}, {what}: verify {ok} {texts}, load {loaded[1]:.300}, fallback {again[1]:.300}"
    if what in ("stray", "good"):
        return [] if ok and loaded == again == sound[1] else [f"taken for damage: {where}"]
    # A record of another save is itself valid: either the files differ from it, or it is of another step.
    named = folder if name == "checkpoint.json" else name
    tensors = name.endswith((".distcp", ".safetensors")) and name != "manifest.safetensors"
    found = []
    if ok:
        found.append(f"not found by verify: {where}")
    elif not any(named in text or name in text for text in texts):
        found.append(f"not named by verify: {where}")
    if loaded[0] and loaded != sound[1]:
        found.append(f"loaded as good: {where}")
    if not loaded[0] and named not in loaded[1]:
        found.append(f"not named by the load: {where}")
    if tensors and not loaded[0] and not any(part in loaded[1] for part in ("tensor", "model.", "optimizer.", "rng.")):
        found.append(f"the load names no tensor: {where}")
    if again != sound[bool(loaded[0])]:
        found.append(f"the fallback loads something else: {where}")
    return found


def test_verify_finds_flips_in_the_records_of_a_dcp_checkpoint_of_torch(saved, tmp_path):
    """Found by the CRC-32 that torch writes and does not check."""
    folder = tmp_path / "dcp"
    shutil.copytree(saved / "dcp" / "2", folder)
    assert verified(str(folder))[0]
    assert flipped_unseen(folder, 40, seed=4) == []


def flipped_unseen(folder: Path, flips: int, *, seed: int) -> list[tuple[str, int, int]]:
    """Flip a bit of a tensor of plain torch's DCP repeatedly; return the flips that `verify` misses."""
    chance, missed = random.Random(seed), []
    slices = [
        (entry.slices.paths[int(file)], int(start), int(nbytes))
        for entry in open_source(str(folder)).catalog.tensors.values()
        for file, start, nbytes in zip(entry.slices.files, entry.slices.starts, entry.slices.nbytes, strict=True)
        if nbytes
    ]
    for _ in range(flips):
        path, start, length = chance.choice(slices)
        data = (folder / path).read_bytes()
        at = start + chance.randrange(length)
        (folder / path).write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        if verified(str(folder))[0]:
            missed.append((path, at - start, length))
        (folder / path).write_bytes(data)
    return missed


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_damage_in_a_slice_read_in_parts_by_ranks_is_found(ranks, saved, tmp_path, kind):
    run = str(copied(saved / kind, tmp_path))
    folder = Path(run) / "step_00000002"
    assert all(step for step, _ in ranks.run(resumed, 4, run))
    slices = open_catalog(open_store(str(folder))).tensors["model.up.weight"].slices
    file = folder / slices.paths[int(slices.files[0])]
    sound = file.read_bytes()
    for at in (0, int(slices.nbytes[0]) // 2, int(slices.nbytes[0]) - 1):
        data = bytearray(sound)
        data[int(slices.starts[0]) + at] ^= 1
        file.write_bytes(data)
        ((_, text),) = set(ranks.run(resumed, 4, run))
        assert text.startswith("IntegrityError") and "model.up.weight" in text and file.name in text
