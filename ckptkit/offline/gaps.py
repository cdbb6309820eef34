"""Finds missing or unreadable files in checkpoints that ckptkit did not write. Does not check tensor files."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ckptkit.catalog.entry import Catalog, ObjectEntry
from ckptkit.errors import (
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePickleError,
    command_line,
)
from ckptkit.formats.hf.side_files import is_side_file
from ckptkit.formats.pickles.objects import read_object
from ckptkit.formats.pickles.zip import sizes_in

if TYPE_CHECKING:
    from ckptkit.storage.store import Store


# Files that each rank writes for itself, in accelerate, transformers, verl and its derivatives.
_RANK_FILE = re.compile(
    r"(random_states_|rng_state_|(?:extra_state|optim|model)_world_size_(\d+)_rank_)(\d{1,7})(\.(?:pkl|pth|pt))"
)
_DATA_FILE = re.compile(r"__(\d{1,7})_\d+\.distcp")
_MARKERS = ("metadata.json", "fsdp_config.json")  # each identifies a format, and thus which files must exist
_MAX_OBJECT_BYTES = 64 << 20  # larger objects, such as a dataloader's state, are not parsed
_MAX_JSON_BYTES = 1 << 20  # larger JSON files, such as tokenizers, are not parsed


def find_gaps(store: Store, catalog: Catalog, *, quick: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (path, message) for each missing, empty or unreadable file, except tensor files.

    ckptkit's own checkpoints do not need this check, because their commit record lists all files.

    Args:
        quick: Do not parse configs, nor the files that contain schedulers, random states and the like.
    """
    if catalog.info.format.startswith("ckptkit-"):
        return
    for message in _stated(catalog):
        yield "", message
    if not catalog.tensors:
        yield "", "it contains no tensors, so there is nothing to verify. An interrupted save looks like this."
    files = _files(store, catalog)
    for path in _missing_ranks(files, catalog.info.world_size or 0):
        yield path, f"{path} is missing: every rank of this save wrote one."
    if ".metadata" in files and "common.pt" in files and "metadata.json" not in files:
        yield (
            "metadata.json",
            "metadata.json is missing, although common.pt exists: Megatron writes metadata.json last.",
        )
    objects = {  # those with a file of their own, rather than a record in a data file
        entry.path: entry
        for entry in catalog.objects.values()
        if entry.encoding != "value" and entry.start == 0 and files.get(entry.path) == entry.nbytes
    }
    for path, size in files.items():
        name = path.rpartition("/")[2]
        if size == 0 and (path in objects or is_side_file(path) or name in _MARKERS or _RANK_FILE.fullmatch(name)):
            yield path, f"{path} is empty: the save or copy was interrupted."
    if not quick:
        yield from _unreadable(store, files, catalog.info.side_files, objects)


def _unreadable(
    store: Store, files: Mapping[str, int], side_files: Iterable[str], objects: Mapping[str, ObjectEntry]
) -> Iterator[tuple[str, str]]:
    for path in side_files:
        if path.endswith(".json") and 0 < files.get(path, 0) <= _MAX_JSON_BYTES:
            try:
                json.loads(store.read(path))
            except (ValueError, RecursionError) as error:
                yield path, f"{path} is not valid JSON: {error}"
    for path, entry in objects.items():
        if not 0 < files[path] <= _MAX_OBJECT_BYTES:
            continue
        try:
            read_object(store, entry, allow_pickle=True)
        except UnsafePickleError:
            pass  # the file itself may be complete; a load reports the problem
        except CorruptCheckpointError as error:
            yield path, f"{entry.path} can't be read: {error}"
        except CkptkitError:
            pass


def refuse_partial(store: Store, catalog: Catalog) -> None:
    """Raise if a part of the training state was never written. For commands that need the complete state.

    Raises:
        IncompleteCheckpointError: There are no tensors, a rank's optimizer file is missing, or the format's reader
            found that another part is missing.
    """
    if catalog.info.format.startswith("ckptkit-"):
        return
    if not catalog.tensors:
        raise IncompleteCheckpointError(f"{store.url} contains no tensors. An interrupted save looks like this.")
    found = [*_stated(catalog)]
    for path in _missing_ranks(_files(store, catalog), catalog.info.world_size or 0):
        if path.rpartition("/")[2].startswith("optim"):
            found.append(f"{path} is missing: every rank of this save wrote one.")
    if found:
        raise IncompleteCheckpointError(
            f"{store.url}: {found[0]} Nothing was written. To export only the weights: "
            + command_line("convert", store.url, "DST")
        )


def _stated(catalog: Catalog) -> tuple[str, ...]:
    """Return the problems that the format's reader recorded in the catalog, but did not raise."""
    stated = catalog.info.extra.get("missing", ())
    return tuple(map(str, stated)) if isinstance(stated, (list, tuple)) else ()


def _files(store: Store, catalog: Catalog) -> dict[str, int]:
    """Return the sizes of all files in the checkpoint's directories."""
    info = catalog.info
    return file_sizes(store, {""} | {path.rpartition("/")[0] for path in (*info.files, *info.side_files)})


def file_sizes(store: Store, folders: Iterable[str]) -> dict[str, int]:
    """Return the sizes of all files in `folders`. A link that the store follows has its target's size."""
    sizes = (pair for folder in sorted(folders) for pair in sizes_in(store, folder).items())
    return {path: size for path, size in sizes if size >= 0}


def _missing_ranks(files: Mapping[str, int], world_size: int) -> list[str]:
    ranks: dict[tuple[str, str], set[int]] = defaultdict(set)
    for path in files:
        folder, _, name = path.rpartition("/")
        data, match = _DATA_FILE.fullmatch(name), _RANK_FILE.fullmatch(name)
        if data is not None:
            world_size = max(world_size, int(data[1]) + 1)
        if match is not None:
            world_size = max(world_size, int(match[3]) + 1, min(int(match[2] or 0), 1 << 20))
            ranks[f"{folder}/{match[1]}".lstrip("/"), match[4]].add(int(match[3]))
    return [
        f"{head}{rank}{ending}"
        for (head, ending), have in ranks.items()
        for rank in range(world_size)
        if rank not in have
    ]
