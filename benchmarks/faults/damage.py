"""Damage checkpoints of every kind in every file, and check that `verify` and a load find it; print a table.

python -m benchmarks.faults.damage --rounds 3

The damages: a flipped bit, a truncated file, a zeroed tail or page, a missing file, a file of another save or rank,
and an extra file (which is not damage). SHARDED, FULL and LOCAL checkpoints are also loaded on two ranks after each
damage. For torch's own DCP only `verify` is checked, by CRC-32, sizes and coverage; it cannot find files of two saves
that were mixed. Hugging Face exports are written by `convert --sha256`; an export whose list of digests is missing
counts as one without digests.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ckptkit import convert
from ckptkit.offline.export.checksums import SUMS_NAME
from tests.checkpoint.test_damage import KINDS, damages, faults, flipped_unseen, loads, make_run, verified
from tests.ranks import Pool, run_ranks


def ours(pool: Pool, saved: Path, place: Path, kind: str, seed: int) -> tuple[int, list[str]]:
    """Return how often one of our checkpoint kinds was damaged, and the failures."""
    shutil.copytree(saved / kind, place, ignore=shutil.ignore_patterns(".ckptkit"))
    count, wrong = 0, []
    for part in range(3):
        sound, cases = pool.run(loads, 2, str(place / "step_00000002"), part, seed, timeout=220)[0]
        count += len(cases) - 1
        wrong += [text for case in cases for text in faults(case, sound, "step_00000002")]
    return count, wrong


def vanilla(saved: Path, place: Path, seed: int) -> Iterator[tuple[str, bool]]:
    """Yield each damage to the files of torch's DCP, and whether `verify` found it."""
    for what, name, do in list(damages(saved / "dcp" / "2", saved / "dcp" / "1", seed)):
        # Flips in tensors are counted separately; a flip between two records affects no data. A file of another save
        # is valid, and neither the file nor `.metadata` says which save it belongs to, so `verify` cannot find it.
        if what.startswith("bit") or what in ("stray", "of another save", "of another rank"):
            continue
        shutil.copytree(saved / "dcp" / "2", place)
        sound = (place / name).read_bytes()
        do()  # damages the original; the copy is restored afterwards
        changed = not (saved / "dcp" / "2" / name).exists() or (saved / "dcp" / "2" / name).read_bytes() != sound
        found = not verified(str(saved / "dcp" / "2"))[0]
        shutil.rmtree(saved / "dcp" / "2")
        place.rename(saved / "dcp" / "2")
        if changed:
            yield f"{name}: {what}", found


def exports(saved: Path, place: Path, seed: int) -> Iterator[tuple[str, bool]]:
    """Yield each damage to the files of a Hugging Face export with digests, and whether `verify` found it."""
    for step in (1, 2):
        url = str(saved / "sharded" / f"step_{step:08d}")
        convert(url, str(place / str(step)), sha256=True, max_shard_size="1KB", overwrite=True)
    folder = place / "2"
    if not verified(str(folder))[0]:
        yield "the undamaged export is reported as damaged", False
    for what, name, do in list(damages(folder, place / "1", seed)):
        if what == "stray" or (what, name) == ("missing", SUMS_NAME):
            continue
        sound = (folder / name).read_bytes()
        do()
        fine, texts = verified(str(folder))
        yield (
            f"{name}: {what}",
            not fine and (name == SUMS_NAME or any(word in " ".join(texts) for word in (name, "no checkpoint"))),
        )
        (folder / name).write_bytes(sound)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join((*KINDS, "dcp", "hf")))
    options = parser.parse_args()
    bad: list[str] = []
    print("| kind | damages | not found, not named, or loaded as good |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        run_ranks(make_run, 2, str(saved))
        pool = Pool()
        for kind in options.kinds.split(","):
            count, wrong = 0, []
            for seed in range(1, 1 + options.rounds):
                if kind == "dcp":
                    seen = list(vanilla(saved, Path(folder) / "copy", seed))
                    wrong += [f"not found by verify: {what}" for what, found in seen if not found]
                    wrong += [f"flip not found: {flip}" for flip in flipped_unseen(saved / "dcp" / "2", 70, seed=seed)]
                    count += len(seen) + 70
                elif kind == "hf":
                    seen = list(exports(saved, Path(folder) / "exports", seed))
                    wrong += [f"not found by verify: {what}" for what, found in seen if not found]
                    count += len(seen)
                else:
                    done, texts = ours(pool, saved, Path(folder) / f"{kind}-{seed}", kind, seed)
                    count, wrong = count + done, wrong + texts
            print(f"| {kind} | {count} | {len(wrong)} |", flush=True)
            bad += wrong
        pool.close()
    print("\n".join(bad))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
