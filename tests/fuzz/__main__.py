"""Run every fuzzer for long: `python -m tests.fuzz --seconds 600 --target rank_files`.

Prints each finding with the seed that reproduces it, and at the end the number of inputs. The exit code is 1 if there
was a finding. `--seed N --count 1` runs one input again and shows where it failed.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from tests.fuzz.foreign_formats import FOREIGN
from tests.fuzz.own_formats import OWN
from tests.fuzz.running import Target, run_input
from tests.fuzz.torch_formats import TARGETS
from tests.hostile.harness import limit_address_space

MAX_FINDINGS = 50  # per target: with more, the target itself is wrong
ALL: dict[str, Target] = {target.__name__: target for target in (*TARGETS, *OWN, *FOREIGN)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--count", type=int, default=0, help="inputs of each target; 0 is no limit")
    parser.add_argument("--target", choices=[*ALL], action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    limit_address_space()
    return int(any([_fuzz(target, options) for target in options.target or ALL]))


def _fuzz(target: str, options: argparse.Namespace) -> int:
    stop, seed, findings = time.monotonic() + options.seconds, options.seed, 0
    with tempfile.TemporaryDirectory() as name:
        end = options.seed + (options.count or sys.maxsize)
        while time.monotonic() < stop and findings < MAX_FINDINGS and seed < end:
            warm = seed > options.seed  # the first input includes the imports
            try:
                run_input(ALL[target], random.Random(f"{target} {seed}"), Path(name, "x"), memory=warm)
            except (Exception, RecursionError) as error:
                findings += 1
                print(f"{target} seed {seed}: {type(error).__name__}: {str(error)[:300]!r}", flush=True)
                if options.count == 1:
                    traceback.print_exception(error)
            seed += 1
    print(f"{target}: {seed - options.seed} inputs, {findings} findings", flush=True)
    return findings


if __name__ == "__main__":
    sys.exit(main())
