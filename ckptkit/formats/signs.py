"""Views that torch saves before it has conjugated or negated them: their bytes with some of the sign bits flipped.

`z.conj()` and `z.conj().imag` share the memory of `z` and carry a mark; torch.save writes that memory, and the mark.
So such a slice has a codec, "sign:<bytes of a number>:<which of two numbers>": of "sign:4:01" every second float32,
the imaginary part of a complex64, has the other sign.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.formats.dcp_encode import crc32

__all__ = ["flip", "flipped_crc", "is_sign", "sign_codec"]

_PREFIX = "sign:"
_BLOCK = 1 << 20


def sign_codec(dtype: str, marks: Collection[str]) -> str | None:
    """Return the codec of a view with these marks, out of "conj" and "neg"; None where signs alone do not make it."""
    kind = dtype_of(dtype)
    if kind.kind not in ("float", "complex") or ("conj" in marks and kind.kind != "complex"):
        return None
    real, imaginary = "neg" in marks, ("neg" in marks) != ("conj" in marks)
    if kind.kind == "float":
        imaginary = real
    nbytes = kind.itemsize // 2 if kind.kind == "complex" else kind.itemsize
    return f"{_PREFIX}{nbytes}:{int(real)}{int(imaginary)}"


def is_sign(codec: str) -> bool:
    return codec.startswith(_PREFIX)


def flip(codec: str, at: int, view: memoryview | bytearray) -> None:
    """Give the numbers in `view`, which begins at byte `at` of the record, the signs that they have."""
    width, which = codec.removeprefix(_PREFIX).split(":")
    array, nbytes = np.frombuffer(view, np.uint8), int(width)
    for number, flipped in enumerate(which):
        if flipped == "1":
            last = number * nbytes + nbytes - 1  # where the sign is: numbers are little-endian
            array[(last - at) % (2 * nbytes) :: 2 * nbytes] ^= 0x80


def flipped_crc(codec: str, crc: int, nbytes: int) -> int:
    """Return the CRC-32 of a record once `flip` has been over it, given the one before: what was flipped is added."""
    mask, zeros = bytearray(min(nbytes, _BLOCK)), bytes(min(nbytes, _BLOCK))
    flip(codec, 0, mask)
    ones = none = 0
    for start in range(0, nbytes, _BLOCK):
        part = min(_BLOCK, nbytes - start)
        ones, none = crc32(memoryview(mask)[:part], ones), crc32(memoryview(zeros)[:part], none)
    return int(crc ^ ones ^ none)
