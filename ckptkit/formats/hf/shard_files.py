"""Finds the files that together contain a model: those that an index lists, or all numbered files of a directory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence

from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsafePathError
from ckptkit.formats.own.json import parse
from ckptkit.storage.store import Store, is_safe_name

_MAX_INDEX_BYTES = 96 << 20  # enough for a million tensors
_NUMBERED = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.(\w+)")


def read_index(store: Store, index: str, there: Collection[str]) -> dict[str, str]:
    """Return the file of each tensor, as listed in an index such as `model.safetensors.index.json`."""
    info = store.info(index)
    if info is not None and info.size > _MAX_INDEX_BYTES:
        raise CorruptCheckpointError(
            f"{index} has {info.size} bytes; an index of a million tensors has at most {_MAX_INDEX_BYTES}. "
            "It is damaged, or is not an index."
        )
    content = parse(store.read(index, 0, _MAX_INDEX_BYTES), file=index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptCheckpointError(f"{index} is not an index: expected a JSON object with a weight_map of files.")
    files = sorted(set(weight_map.values()))
    for file in files:
        if not is_safe_name(file):
            raise UnsafePathError(f"{index} names the file {file!r:.200}; only files in its directory are allowed.")
    missing = [file for file in files if file not in there]
    if missing:
        raise IncompleteCheckpointError(
            f"{index} names {len(files)} files; missing: {', '.join(missing[:8])}{'...' if len(missing) > 8 else ''}."
        )
    return weight_map


def check_index(index: str, weight_map: Mapping[str, str], contents: Mapping[str, Collection[str]]) -> None:
    """Check that each file contains exactly the tensors that the index lists."""
    for name, file in weight_map.items():
        if name not in contents[file]:
            raise IncompleteCheckpointError(f"{index} says that tensor {name!r:.200} is in {file}, but it is not.")
    for file, names in contents.items():
        for name in names:
            if weight_map.get(name) != file:
                where = f"places it in {weight_map[name]}" if name in weight_map else "does not list it"
                raise CorruptCheckpointError(f"{file} holds tensor {name!r:.200}, but {index} {where}.")


def numbered_files(names: Sequence[str], extension: str) -> list[str] | None:
    """Return the files named -0000i-of-0000n.`extension`, in order, or None if there are no such files."""
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name)) and match[4] == extension]
    if not matches:
        return None
    sets = {(match[1], match[3]) for match in matches}
    if len(sets) > 1:
        raise CorruptCheckpointError(f"the directory has numbered files of {len(sets)} checkpoints: {sorted(sets)}.")
    stem, total = sets.pop()
    have = {int(match[2]) for match in matches}
    first = 0 if 0 in have else 1  # some tools count from 0
    wanted = range(first, first + int(total))
    if len(have) != len(wanted) or have != set(wanted):
        absent = itertools.islice((i for i in wanted if i not in have), 8)
        gone = [f"{stem}-{i:0{len(total)}d}-of-{total}.{extension}" for i in absent]
        there = f"{len(have)} of {int(total)} shards were found; "
        raise IncompleteCheckpointError(
            there + (f"missing: {', '.join(gone)}." if gone else "some have unexpected numbers.")
        )
    return sorted(match[0] for match in matches)
