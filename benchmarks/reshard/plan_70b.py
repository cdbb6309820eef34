"""Plan 16 -> 1,024 -> 24 ranks of a 70B llama from names and shapes; print seconds and peak memory.

    python -m benchmarks.reshard.plan_70b [--ranks 16 1024 24]

The state is weights, one fp32 moment and the steps. Each plan is created, its coverage is proved, and its result is
the source of the next plan.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time

from ckptkit.offline.resharding.mesh import TargetMesh
from ckptkit.offline.resharding.seal import planned_catalog
from ckptkit.storage.open import open_store
from tests.offline.test_reshard_plans import planned, shapes, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 1024, 24])
    options = parser.parse_args()
    catalog = whole(shapes())
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            started = time.perf_counter()
            plan, sealing = planned(open_store(folder), catalog, TargetMesh(1, ranks, 1))
            seconds = time.perf_counter() - started
            catalog = planned_catalog(plan, sealing)
            slices = sum(len(placement) for placement in plan.placements)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"to {ranks:5d} ranks: {slices:7d} slices planned, proved in {seconds:5.2f} s, peak {peak:4.0f} MB")


if __name__ == "__main__":
    main()
