"""Small seeded damages to bytes: bit rot, truncated copies, and hostile edits."""

import contextlib
import copy
import functools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tests.formats.damages import rezipped

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
        if out:
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


# --- by structure

_HOSTILE: list[Any] = [
    None, True, -1, 0, 2**31, 2**53, 2**63, 2**70, 10**400, 1.5, float("nan"), float("inf"), 1e308,
    "", "../../outside/x", "/etc/passwd", "a\0b", "x" * 5000, "\ud800", "²", "9" * 5000,
    [], {}, [[]], {"": {}}, [0, -1], [2**40, 2**40], [2**40, 0], ["x", {}], {"$ref": "x"},
    {"$tensor": {"dtype": "float32"}}, [[[[[[[[[[1]]]]]]]]]], list(range(300)),
]  # fmt: skip


def mutate_tree(rng: random.Random, tree: Any, *, plain: bool = True) -> Any:
    """Return a copy of nested dicts, lists and tuples with one to three parts replaced, removed, duplicated or
    swapped.

    Args:
        plain: Insert only JSON values (no infinite numbers, no numbers with hundreds of digits).
    """
    out = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(out))
        if not places:
            return _hostile(rng)
        holder, key = rng.choice(places)
        _damage(rng, holder, key, places, plain=plain)
    return out


def _hostile(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(_HOSTILE))


def _places(tree: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    keys: Iterable[Any] = ()
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = range(len(tree))
    for key in keys:
        yield tree, key
        if depth < 30:
            yield from _places(tree[key], depth + 1)


def _damage(rng: random.Random, holder: Any, key: Any, places: list[tuple[Any, Any]], *, plain: bool) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        name = _hostile(rng)
        holder[name if isinstance(name, str) else f"{key}x"] = holder.pop(key)
    elif kind == 2:
        other, at = rng.choice(places)
        with contextlib.suppress(LookupError, TypeError):
            holder[key] = copy.deepcopy(other[at])
    elif kind == 3 and isinstance(holder[key], (str, int, list)) and not isinstance(holder[key], bool):
        holder[key] = holder[key] * 2 if not isinstance(holder[key], int) else rng.choice(_INTERESTING)
    elif kind == 4 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        made = _hostile(rng)
        holder[key] = 7 if plain and isinstance(made, (int, float)) and not -(2**80) < made < 2**80 else made


def json_text(rng: random.Random, tree: Any) -> bytes:
    """Return the tree as JSON, sometimes with invalid parts: NaN, duplicate keys, deep nesting."""
    text = json.dumps(tree)
    kind = rng.randrange(12)
    if kind == 0 and ": " in text:
        at = rng.choice([m.start() for m in re.finditer(": ", text)])
        bad = rng.choice(("NaN, ", "-Infinity", "1e999", "[" * 3000, "0x1", "'", "9" * 5000))
        text = text[: at + 2] + bad + text[at + 2 :]
    elif kind == 1 and '{"' in text:
        at = rng.choice([m.start() for m in re.finditer(r'\{"', text)]) + 1
        text = text[:at] + text[at : text.find(",", at) + 1] + text[at:]
    return text.encode("utf-8", "surrogatepass")


def mutate_zip(rng: random.Random, data: bytes, change: Callable[[bytes], bytes] | None = None) -> bytes:
    """Return a torch.save archive whose pickle is damaged, with matching sizes and checksums."""
    damage = change or functools.partial(mutate, rng)
    return rezipped(data, lambda name, raw: [(name, damage(raw) if name.endswith("/data.pkl") else raw)])
