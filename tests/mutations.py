"""Plants mistakes in a copy of the package, one at a time, and checks that tests of the daily set find each.

    python -m tests.mutations [words of their names...]

Each mistake is a small edit of commit, retention, load, copying or digests. The named tests must pass without it, as
`make test` shows, and fail with it. The exit code is 1 if a mistake was not found, or if the code that it edits has
changed: then update the table.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    """Replace `old`, which must occur once in `file`, by `new`; then one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


RETENTION, COMMIT, ATTEMPT = "checkpoint/retention.py", "checkpoint/run/commit.py", "checkpoint/run/attempt.py"
DELETE, CHOOSE, READ = "checkpoint/run/delete.py", "checkpoint/load/choose.py", "checkpoint/load/read.py"
LOAD, CHECKS, COVERAGE = "checkpoint/load/checkpoint.py", "formats/checks.py", "offline/copying/coverage.py"
EXECUTE, DIGESTS = "offline/copying/execute.py", "digests.py"

MUTATIONS = (
    Mutation("retention keeps one more than max_num", RETENTION,
             "records[::-1][policy.max_num :]", "records[::-1][policy.max_num + 1 :]",
             "tests/checkpoint/test_retention.py"),
    Mutation("retention may delete the newest", RETENTION,
             "for record in records[-1:]}", "for record in records[:1]}",
             "tests/checkpoint/test_retention.py"),
    Mutation("max_mem deletes what is exempt", RETENTION,
             "if total > limit and record.name not in exempt and", "if total > limit and",
             "tests/checkpoint/test_retention.py"),
    Mutation("max_mem deletes all once it deletes", RETENTION,
             "total -= record.total_bytes", "total -= 0",
             "tests/checkpoint/test_retention.py"),
    Mutation("a deletion ignores pins", DELETE,
             "        if pins:\n", "        if False:\n",
             "tests/checkpoint/run/test_pins.py tests/checkpoint/run/test_delete.py"),
    Mutation("a deletion takes foreign files along", "checkpoint/run/unnamed.py",
             "    others = others_in(root, path)  # other", "    others = []  # other",
             "tests/checkpoint/run/test_delete.py"),
    Mutation("a remote deletion leaves the record for last", DELETE,
             "            root.delete([record_path(name)])\n",
             "            root.delete(f'{name}/{path}' for path in record.files)\n"
             "            root.delete([record_path(name)])\n",
             "tests/checkpoint/test_object_store.py"),
    Mutation("a save does not look for the files of its record", COMMIT,
             "            place.check(own, files)\n", "",
             "tests/checkpoint/run/test_commit.py"),
    Mutation("a save goes on without the rank that failed", COMMIT,
             "outcome = Outcome.of_error(error)\n        try:\n            # 4.",
             "outcome = Outcome(({}, payload))\n        try:\n            # 4.",
             "tests/checkpoint/run/test_commit.py tests/checkpoint/test_faults.py"),
    Mutation("two ranks may write one file", COMMIT,
             "                if path in files:\n", "                if False:\n",
             "tests/checkpoint/run/test_commit.py"),
    Mutation("a save that has lost its lease commits", COMMIT,
             "if look is None or time.monotonic() - started >= _LOOK_S:", "if False:",
             "tests/checkpoint/run/test_commit.py tests/checkpoint/run/test_hold.py"),
    Mutation("all saves have the same sequence", COMMIT,
             '"sequence": newest + 1', '"sequence": 1',
             "tests/checkpoint/run/test_commit.py tests/checkpoint/run/test_inventory.py "
             "tests/checkpoint/test_manager.py"),
    Mutation("files are not synced", ATTEMPT,
             "            self.store.sync_file(path)\n", "            pass\n",
             "tests/checkpoint/run/test_commit.py tests/checkpoint/test_order.py"),
    Mutation("directories are not synced before the rename", ATTEMPT,
             "        publish.sync_directories(self.store)\n        self.root.sync_directory()\n", "        pass\n",
             "tests/checkpoint/run/test_commit.py tests/checkpoint/test_order.py"),
    Mutation("a load takes what does not fit", LOAD,
             "plan.mismatches.check(store.url, strict=options.strict, elsewhere=world_size > 1, call=call)", "pass",
             "tests/checkpoint/test_strict.py"),
    Mutation("a half-loaded state does not know", LOAD,
             "    if not options.atomic:\n        state._half = report.url\n", "",
             "tests/checkpoint/test_load_memory.py tests/checkpoint/test_strict.py"),
    Mutation("slices that no rank reads whole are not checked", LOAD,
             " + check_slices(store, shares[rank], reading.filler.workers)", "",
             "tests/checkpoint/test_load_memory.py"),
    Mutation("a load checks no digest", READ,
             "Verify.READ if options.verify else Verify.OFF", "Verify.OFF",
             "tests/checkpoint/test_load_memory.py tests/checkpoint/test_damage.py"),
    Mutation("tensors that share memory may get different values", READ,
             "        check_claims(store, groups)\n", "",
             "tests/checkpoint/load/test_shared_memory.py"),
    Mutation("a fallback forgets to say what it passed over", CHOOSE,
             "                self.given_up.update(damaged)\n", "",
             "tests/checkpoint/test_fresh_start.py tests/checkpoint/test_damage.py tests/checkpoint/test_manager.py"),
    Mutation("a copy takes any digest", CHECKS,
             "        if value != expected:\n", "        if False:\n",
             "tests/formats/test_checks.py tests/offline/copying/test_execute.py"),
    Mutation("a copy leaves what came out of order unproved", EXECUTE,
             "checking(work, verifier.unproved())", "checking(work, verifier.unproved()[:0])",
             "tests/offline/copying/test_execute.py tests/offline/test_convert.py"),
    Mutation("gaps of the source are copied", COVERAGE,
             "    check_coverage([plan.catalog.tensors[key] for key in sources])\n", "",
             "tests/offline/copying/test_execute.py tests/offline/copying/test_plan.py tests/offline/test_gaps.py"),
    Mutation("a file of the plan may have gaps", COVERAGE,
             "    if len(wrong):\n", "    if False:\n",
             "tests/offline/copying/test_execute.py tests/offline/copying/test_plan.py"),
    Mutation("two CRCs are joined at the wrong distance", DIGESTS,
             "_multiply(_shift(second_nbytes), first)", "_multiply(_shift(second_nbytes + 1), first)",
             "tests/formats/test_checks.py"),
    Mutation("a fingerprint forgets where a block lies", DIGESTS,
             "f2 += (start + at) * total +", "f2 += start * total +",
             "tests/offline/test_prove.py"),
)  # fmt: skip


def found(mutation: Mutation, scratch: Path) -> bool:
    """Return whether the tests fail in a copy with this mistake. Raises RuntimeError if they could not run."""
    path = scratch / "ckptkit" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        print(f"NO LONGER THERE, or more than once: ckptkit/{mutation.file} has no {mutation.old!r}")
        return False
    path.write_text(text.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", "-qxm", "not night", "-p", "no:cacheprovider", *mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(command, cwd=scratch, env=environment, check=False, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
    failed = (line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    print(next(failed, f"NOT FOUND by {mutation.tests}"))
    return ended.returncode == 1


def main(words: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if all(word in mutation.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for name in ("ckptkit", "tests", "benchmarks", "docs", "examples"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        count = 0
        for mutation in chosen:
            print(f"{mutation.name}: ", end="", flush=True)
            count += found(mutation, Path(folder))
    print(f"{count} of {len(chosen)} were found")
    return 1 if count < len(chosen) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
