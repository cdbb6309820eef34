"""At most six of our functions are between a worker and the read or write of a conversion: docs/internals/ways.md."""

import pytest

from ckptkit import convert, reshard
from ckptkit.offline.copying.copier import Copier
from tests.checkpoint.test_ways import Entered
from tests.offline.folders import UNEVEN
from tests.offline.resuming import COLUMNS

MOST = 6


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bf16"}, {"check": False}, {"world_size": 3}, {"world_size": 6, **COLUMNS}]
)
def test_a_worker_reads_and_writes_at_most_six_functions_deep(tmp_path, options):
    command = reshard if "world_size" in options else convert
    with Entered("preadv") as read, Entered("pwritev") as written:
        command(str(UNEVEN / "ckpt"), str(tmp_path / "out"), **options)
    for found in (read, written):
        # A name is "<file> <function> <line>".
        depths = [len(s) for s in found.stacks if any(name.split()[1].endswith(Copier.do.__name__) for name in s)]
        assert 0 < max(depths) <= MOST, found.stacks
