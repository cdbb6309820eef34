"""Row cuts are found for exactly the tensors that are sharded by consecutive rows; pieces of a box in any tensor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog import tiles
from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import TensorEntry
from ckptkit.catalog.tiles import RowCuts
from ckptkit.catalog.tiles import row_cuts as cuts_of
from tests.catalog.boxes import boxes_in, columns, partitions, shapes, tensor_of


def entry(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]], name: str = "w") -> TensorEntry:
    return tensor_of(shape, *columns([Box(*box) for box in boxes], len(shape)), name=name)


def row_cuts(entries: list[TensorEntry]) -> RowCuts:
    return cuts_of([entry.shape for entry in entries], [entry.slices for entry in entries])


ROWS = entry((5, 3), ((0, 0), (2, 3)), ((2, 0), (3, 3)))
CUT = {
    "rows": ROWS, "the whole": entry((4,), ((0,), (4,))), "an empty part": entry((2,), ((0,), (2,)), ((2,), (0,))),
    "no elements": entry((0, 7)), "a scalar": entry((), ((), ())),
}  # fmt: skip
NOT_CUT = {
    "columns": entry((2, 4), ((0, 0), (2, 2)), ((0, 2), (2, 2))),
    "a gap": entry((5,), ((0,), (2,)), ((3,), (2,))),
    "an end that is missing": entry((5,), ((0,), (2,)), ((2,), (2,))),
    "a beginning that is missing": entry((5,), ((1,), (4,))),
    "replicas": entry((2,), ((0,), (2,)), ((0,), (2,))),
    "another order": entry((4,), ((2,), (2,)), ((0,), (2,))),
    "nothing": entry((3,)),
    "too much": entry((3,), ((0,), (4,))),
    "a negative size": entry((3,), ((0,), (4,)), ((4,), (-1,))),
    "sizes that overflow": entry((4,), ((0,), (1 << 62,)), ((1 << 62, ), (1 << 62,)), ((-(1 << 63),), (1 << 62,))),
    "a scalar twice": entry((), ((), ()), ((), ())),
    "a hostile shape": entry((1 << 70,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*CUT, *NOT_CUT])
def test_only_consecutive_rows_are_row_cuts(kind):
    tensor = {**CUT, **NOT_CUT}[kind]
    for others in ([], [ROWS], [NOT_CUT["columns"], NOT_CUT["a gap"]], [CUT["the whole"], CUT["no elements"]]):
        assert row_cuts([*others, tensor]).cut[-1] == (kind in CUT)
        assert row_cuts([tensor, *others]).cut[0] == (kind in CUT)


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4)), max_size=4), st.integers(0, 5), st.integers(1, 2))
def test_every_row_cut_tensor_is_covered(slices, height, width):
    tensor = entry((height, width), *(((a, 0), (n, width)) for a, n in slices))
    if row_cuts([tensor]).cut[0]:
        tensor.check_coverage()
        rows = [row for a, n in slices for row in range(a, a + n)]
        assert rows == list(range(height))


cases = shapes.flatmap(
    lambda shape: st.tuples(st.just(shape), partitions(shape), st.lists(boxes_in(shape), min_size=1, max_size=4))
)


@given(cases)
def test_the_interval_search_finds_the_same_pieces_as_comparing_all_pairs(case):
    shape, parts, wanted = case
    if not shape:
        return
    starts, sizes = columns(parts, len(shape))
    lo, extent = columns(wanted, len(shape))
    split = tiles._splitting_dim(starts, starts + sizes)
    if split is None:
        return
    boxes, rows = tiles._by_intervals(*split, lo[:, split[0]], (lo + extent)[:, split[0]])
    candidates = set(zip(boxes.tolist(), rows.tolist(), strict=True))
    overlapping = {
        (i, j) for i, box in enumerate(wanted) for j, part in enumerate(parts) if box.intersect(part) is not None
    }
    assert overlapping <= candidates
