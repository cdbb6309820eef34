"""Finding the pieces of a box in the slices of a tensor."""

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog import tiles
from tests.catalog.boxes import boxes_in, columns, partitions, shapes

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
