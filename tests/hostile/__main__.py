"""Run every attack and its control on every command: `python -m tests.hostile [NAME...]`. Prints a table."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

from tests.hostile import sources
from tests.hostile.attacks import ATTACKS
from tests.hostile.harness import COMMANDS, Outcome, Place, run_commands

# Commands that need a run: on other checkpoints they only report wrong usage, which proves nothing.
OF_A_RUN = ("ls", "load", "pin", "prune")
READS = tuple(name for name in COMMANDS if name not in (*OF_A_RUN, "diff", "open"))


def main() -> int:
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or list(ATTACKS)
    fell, refused, runs, slowest, largest = 0, 0, 0, 0.0, 0
    for name in names:
        attack = ATTACKS[name]
        with tempfile.TemporaryDirectory() as folder:
            hostile, control = Place(Path(folder, "hostile")), Place(Path(folder, "control"))
            for place, build in ((hostile, attack.hostile), (control, attack.control)):
                build(place)
                place.control.mkdir()
                sources.hf(place.control)
            good, bad = run_commands(control), run_commands(hostile)
        faults = [
            f"control {c}: exit {o.code}, {o.text[-200:]!r} {o.bad}"
            for c, o in good.items()
            if c in READS and (o.code or o.bad)
        ]
        faults += [f"{c}: {o.bad} {o.text[-300:]!r}" for c, o in bad.items() if o.bad]
        faults += [f"{c}: accepted" for c in ("convert hf",) if not attack.harmless and not bad[c].code]
        faults += [
            f"{c}: {(o.grown - good[c].grown) >> 20} MB more than the control" for c, o in bad.items()
            if isinstance(o, Outcome) and c in good and o.grown > 2 * good[c].grown + (256 << 20)
        ]  # fmt: skip
        for fault in faults:
            print(f"{name}: {fault}", flush=True)
        fell += bool(faults)
        runs += len(bad)
        refused += sum(o.code != 0 for o in bad.values())
        slowest = max(slowest, *(o.seconds for o in bad.values()))
        largest = max(largest, *(o.grown for o in bad.values()))
    print(
        f"{len(names)} attacks, {runs} runs of {len(COMMANDS)} commands: {refused} refused, {runs - refused} accepted; "
        f"{fell} attacks fell; slowest {slowest:.1f} s, largest {largest >> 20} MB"
    )
    return int(fell > 0)


if __name__ == "__main__":
    sys.exit(main())
