"""One item of a `.distcp` file: its two ends read together with those of its neighbours, and parsed."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats._restricted_pickle import loads
from ckptkit.formats._torch_records import Storage, StoredTensor, TensorRebuilder
from ckptkit.formats._torch_zip import (
    LOCAL_HEADER,
    Layout,
    ShortTailError,
    TorchArchive,
    check_byteorder,
    parse_directory,
    storage_of,
)
from ckptkit.formats.dcp_frames import Frame
from ckptkit.storage.store import ReadInto, Store

__all__ = ["FRONT_BYTES", "TAIL_BYTES", "ItemEnds", "ItemParser"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]

FRONT_BYTES = 1024
TAIL_BYTES = 1024
_JOIN = 4096  # bytes between two ranges that are read rather than skipped
_TURN = 128  # reads
_SLOW_S = 100e-6  # for one of them: longer than a thread costs


class ItemEnds:
    """The first and last bytes of a block of items, read with few reads."""

    def __init__(self, store: Store, paths: Sequence[str], files: Int32, starts: Int64, lengths: Int64) -> None:
        fronts = np.minimum(lengths, FRONT_BYTES)
        tails = np.minimum(lengths, TAIL_BYTES)
        # Two ranges an item, in file order; near ones become one read.
        low = np.stack([starts, starts + lengths - tails], axis=1).reshape(-1)
        high = np.stack([starts + fronts, starts + lengths], axis=1).reshape(-1)
        file = np.repeat(files, 2)
        # The furthest byte so far, in each file for itself: files are laid end to end for the running maximum.
        shift = np.cumsum(np.r_[False, file[1:] != file[:-1]]) * (int(high.max(initial=0)) + 1)
        stops = np.maximum.accumulate(high + shift) - shift
        breaks = np.r_[True, (file[1:] != file[:-1]) | (low[1:] - stops[:-1] > _JOIN) | (low[1:] < low[:-1])]
        heads = np.flatnonzero(breaks)
        lasts = np.r_[heads[1:], len(low)] - 1
        span_low, span_high = low[heads], np.maximum.reduceat(high, heads)
        span_stops = np.cumsum(span_high - span_low)
        moved = (span_stops - span_high)[np.cumsum(breaks) - 1]  # from the file to where it is held
        self._low, self._high = low + moved, high + moved
        held = int(span_stops[-1]) if len(span_stops) else 0
        self._held = np.empty(held + FRONT_BYTES, np.uint8)
        self._held[held:] = 0
        view = self._held.data
        begins = (span_stops - (span_high - span_low)).tolist()
        columns = (file[lasts].tolist(), span_low.tolist(), begins, span_stops.tolist())
        _read(store, [ReadInto(paths[f], start, view[a:b]) for f, start, a, b in zip(*columns, strict=True)])

    def front(self, i: int) -> memoryview:
        """The first bytes of an item."""
        return self._held[self._low[2 * i] : self._high[2 * i]].data

    def tail(self, i: int) -> memoryview:
        """The last bytes of an item."""
        return self._held[self._low[2 * i + 1] : self._high[2 * i + 1]].data

    def fronts(self, rows: Int64) -> UInt8:
        """The first bytes of items, [n, FRONT_BYTES]; after the end of a shorter one come any."""
        return self._windows(self._low[2 * rows], FRONT_BYTES)

    def tails(self, rows: Int64, nbytes: int) -> UInt8:
        """The last `nbytes` bytes of items that have as many, [n, nbytes]."""
        return self._windows(self._high[2 * rows + 1] - nbytes, nbytes)

    def _windows(self, begins: Int64, nbytes: int) -> UInt8:
        every = np.lib.stride_tricks.as_strided(self._held, (len(self._held) - nbytes + 1, nbytes), (1, 1))
        windows: UInt8 = every[begins]
        return windows


def _read(store: Store, reads: Sequence[ReadInto]) -> None:
    """Read many short ranges: in turn while they are at hand, as a page cache's are; else several at once."""
    begin = 0
    while store.local_root is not None and begin < len(reads):
        started = time.perf_counter()
        turn = reads[begin : begin + _TURN]
        store.read_many(turn, workers=1)
        begin += _TURN
        if time.perf_counter() - started > _SLOW_S * len(turn):
            break
    store.read_many(reads[begin:])


class ItemParser:
    """Parses items from their two ends. Equal pickles (same dtype, shape, strides) are parsed once."""

    def __init__(self) -> None:
        self._pickles: dict[bytes, StoredTensor] = {}

    def parse(
        self,
        front: memoryview,
        tail: memoryview,
        path: str,
        start: int,
        length: int,
        label: str,
        whole: Callable[[], TorchArchive],
    ) -> tuple[StoredTensor, Frame | None]:
        """Return the tensor, and the frame that other items may share; None where this one is unusual.

        Args:
            whole: Reads the item as any archive is read: for one whose pickle or directory is longer than usual.
        """
        try:
            members, directory = parse_directory(bytes(tail), length, file=label)
        except ShortTailError:
            return _one_tensor(whole().value, label), None
        layout = Layout(members, directory, label)
        pickled = self._member(layout, "data.pkl", front)
        order = self._member(layout, "byteorder", front) if "byteorder" in layout.members else b"little"
        if pickled is None or order is None:
            return _one_tensor(whole().value, label), None
        check_byteorder(order, file=label)
        template = self._parsed(pickled, label)
        member = layout.members.get(f"data/{template.storage.key}")
        if member is None or template.storage.nbytes > member.nbytes:
            raise CorruptCheckpointError(
                f"{label}: its storage holds {0 if member is None else member.nbytes} bytes, its tensor needs "
                f"{template.storage.nbytes}."
            )
        header = bytes(front[member.header : member.header + LOCAL_HEADER.size + len(member.name.encode())])
        if len(header) < LOCAL_HEADER.size + len(member.name.encode()):
            return _one_tensor(whole().value, label), None
        begin = start + layout.start(member, header)
        storage = Storage(path, template.storage.key, member.nbytes, template.storage.dtype, "", begin, member.crc32)
        tensor = replace(template, storage=storage)
        if template.storage.key != "0" or template.marks:
            return tensor, None
        return tensor, Frame.of(bytes(front), bytes(tail), layout.members, directory, length)

    def _member(self, layout: Layout, name: str, front: memoryview) -> bytes | None:
        """The bytes of a small member, None where they are not among the first of the item."""
        member = layout.members[name]
        header = bytes(front[member.header : member.header + LOCAL_HEADER.size + len(member.name.encode())])
        if len(header) < LOCAL_HEADER.size + len(member.name.encode()):
            return None
        begin = layout.start(member, header)
        data = bytes(front[begin : begin + member.nbytes])
        if len(data) < member.nbytes:
            return None
        if zlib.crc32(data) != member.crc32:
            raise CorruptCheckpointError(f"{layout.file}: member {member.name!r:.80} does not match its CRC-32.")
        return data

    def template(self, pickled: bytes, label: str) -> StoredTensor | None:
        """The tensor a pickle describes, its storage without a place; None where it needs a look of its own."""
        found = self._parsed(pickled, label)
        return found if found.storage.key == "0" and not found.marks else None

    def _parsed(self, pickled: bytes, label: str) -> StoredTensor:
        found = self._pickles.get(pickled)
        if found is None:
            value = loads(
                pickled,
                file=label,
                functions=TensorRebuilder(lazy=True).functions,
                persistent_load=lambda identity: storage_of(identity, None, ""),
            )
            found = self._pickles[pickled] = _one_tensor(value, label)
        return found


def _one_tensor(value: Any, label: str) -> StoredTensor:
    if not isinstance(value, StoredTensor):
        raise CorruptCheckpointError(f"{label} holds a {type(value).__name__}, where .metadata says a tensor.")
    return value
