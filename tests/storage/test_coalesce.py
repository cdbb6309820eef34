"""Many ranges become few reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.storage.coalesce import Scatter, coalesce
from ckptkit.storage.store import ReadInto

RANGES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)).map(lambda r: (r[0], r[0] + r[1])), max_size=40)


@given(RANGES, st.integers(0, 100), st.integers(1, 2000))
def test_every_range_is_in_exactly_one_span(ranges: list[tuple[int, int]], gap: int, span: int) -> None:
    spans = coalesce(ranges, max_gap=gap, max_span=span)
    seen = sorted(i for s in spans for i in s.members)
    assert seen == list(range(len(ranges)))
    assert all(s.start <= ranges[i][0] and ranges[i][1] <= s.stop for s in spans for i in s.members)


@given(RANGES, st.integers(0, 100), st.integers(1, 2000))
def test_a_span_exceeds_max_span_only_for_a_single_range(ranges: list[tuple[int, int]], gap: int, span: int) -> None:
    for s in coalesce(ranges, max_gap=gap, max_span=span):
        assert s.stop - s.start <= max(span, max(ranges[i][1] - ranges[i][0] for i in s.members))


def test_a_gap_above_max_gap_splits() -> None:
    assert [s.members for s in coalesce([(0, 10), (15, 20), (40, 50)], max_gap=5, max_span=100)] == [(0, 1), (2,)]


def test_arriving_bytes_are_copied_to_every_overlapping_view() -> None:
    data = bytes(range(200))
    wanted = [(0, 200), (40, 3), (38, 30), (150, 50), (199, 1), (60, 0)]
    views = [bytearray(length) for _, length in wanted]
    reads = [ReadInto("x", start, memoryview(view)) for (start, _), view in zip(wanted, views, strict=True)]
    for low, high in ((0, 41), (41, 130), (130, 200)):  # as three requests bring it
        scatter = Scatter([read for read in reads if read.start < high], low)
        for at in range(low, high, 7):
            scatter(at - low, data[at : min(at + 7, high)])
    assert [bytes(view) for view in views] == [data[start : start + length] for start, length in wanted]
