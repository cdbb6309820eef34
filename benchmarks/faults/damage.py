"""Damage checkpoints of every kind in every file, and see whether `verify` and a load find it; print a table.

python -m benchmarks.faults.damage --rounds 3

A bit flipped, a file truncated, emptied of its tail or of a page, missing, of another save, of another rank, and one
that does not belong (the only damage that is none). SHARDED, FULL and LOCAL are loaded on two ranks after each. In
what torch's own DCP writes `verify` alone can tell, by CRC-32, sizes and coverage; files of two saves that were mixed
are sound there, one by one, and not found. Hugging Face exports are those of `convert --sha256`; where the list of
digests itself is missing, an export is one that has none.
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
    """Return the number of damages done to one of our kinds, and what was wrong with any."""
    shutil.copytree(saved / kind, place, ignore=shutil.ignore_patterns(".ckptkit"))
    *cases, (_, _, fine, _, loads_well, content) = pool.run(loads, 2, str(place / "step_00000002"), seed, timeout=220)[
        0
    ]
    wrong = [] if fine and loads_well else ["the undamaged one is not loaded, or found bad"]
    return len(cases), wrong + [text for case in cases for text in faults(case, content, "step_00000002")]


def vanilla(saved: Path, place: Path, seed: int) -> Iterator[tuple[str, bool]]:
    """Yield each damage done to the files of torch's DCP, and whether `verify` found it."""
    for what, name, do in list(damages(saved / "dcp" / "2", saved / "dcp" / "1", seed)):
        # Flips of tensors are counted apart; a flip between two records is in nobody's data. A file of another save is
        # sound in itself, and nothing in it, nor in `.metadata`, says which save it is of: that is never found there.
        if what.startswith("bit") or what in ("stray", "of another save", "of another rank"):
            continue
        shutil.copytree(saved / "dcp" / "2", place)
        sound = (place / name).read_bytes()
        do()  # to the original; the copy is what is put back
        changed = not (saved / "dcp" / "2" / name).exists() or (saved / "dcp" / "2" / name).read_bytes() != sound
        found = not verified(str(saved / "dcp" / "2"))[0]
        shutil.rmtree(saved / "dcp" / "2")
        place.rename(saved / "dcp" / "2")
        if changed:
            yield f"{name}: {what}", found


def exports(saved: Path, place: Path, seed: int) -> Iterator[tuple[str, bool]]:
    """Yield each damage done to the files of a Hugging Face export with digests, and whether `verify` found it."""
    for step in (1, 2):
        url = str(saved / "sharded" / f"step_{step:08d}")
        convert(url, str(place / str(step)), sha256=True, max_shard_size="1KB", overwrite=True)
    folder = place / "2"
    if not verified(str(folder))[0]:
        yield "the undamaged one is found bad", False
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
        pool = Pool(2)
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
