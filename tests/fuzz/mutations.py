"""Small damages to bytes, as bit rot, cut-off copies and people with bad intentions make them. Seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["mutate"]

_INTERESTING = [0, 1, 2, 7, 8, 127, 128, 255, 256, 65535, 65536]
_INTERESTING += [2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
_OPCODES = (
    b"\x80\x95\x88\x89)(]}\x8f\x85\x86\x87taeus\x90\x91\x94qrpghj\x93ci\x81\x92RobKMJ\x8a\x8bGX\x8c\x8d"
    b"CB\x8e\x96PQ012N."
)


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Return `data` with one to four damages; `others` are files of the same kind to splice from."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not out:
            break
        _one(rng, out, others)
    return bytes(out)


def _one(rng: random.Random, out: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(out))
    kind = rng.randrange(9)
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[at] = rng.randrange(256)
    elif kind == 2:
        width = rng.choice((2, 4, 8))
        out[at : at + width] = (rng.choice(_INTERESTING) % (1 << (8 * width))).to_bytes(width, "little")
    elif kind == 3:
        del out[at : at + rng.choice((1, 2, 8, 64, 512))]
    elif kind == 4:
        out[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 8, 32))))
    elif kind == 5:
        piece = out[at : at + rng.choice((1, 4, 16, 128))]
        out[at:at] = piece * rng.choice((1, 2, 20))
    elif kind == 6:
        del out[at:]
    elif kind == 7:
        out[at] = rng.choice(_OPCODES)
    elif others:
        other = rng.choice(others)
        start = rng.randrange(len(other)) if other else 0
        out[at : at + 64] = other[start : start + 64]
