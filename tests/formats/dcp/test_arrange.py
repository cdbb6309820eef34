"""The slices of all ranks are sorted by tensor, for any number of tensors."""

from __future__ import annotations

import numpy as np

from ckptkit.formats.dcp.files import ROW
from ckptkit.formats.dcp.index import PlannedKey, RankSlices, SaveIndex


def test_more_than_65536_tensors_are_ordered():
    tensors = (1 << 16) + 5
    rows = np.zeros(3, ROW)
    rows["start"] = [1, 2, 3]
    held = np.array([tensors - 1, 4, 1 << 16])
    found = SaveIndex()
    found._keys = {str(i): PlannedKey(str(i), "uint8", (), (), None) for i in range(tensors)}
    found._arrange([RankSlices(held, rows, np.zeros(0, np.int64), 0, 0)])
    starts = [found._rows["start"][span].tolist() for _, span, *_ in found.entries()]
    assert {tensor: start for tensor, start in enumerate(starts) if start} == {4: [2], 1 << 16: [3], tensors - 1: [1]}
