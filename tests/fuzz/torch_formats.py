"""Fuzzers of the readers of torch's formats.

A finding is also a value that differs from that of torch's weights_only loader, or tensor bytes that changed although
every checksum matches.
"""

import contextlib
import functools
import itertools
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from ckptkit.catalog.entry import Role
from ckptkit.errors import CkptkitError
from ckptkit.formats import torch_save
from ckptkit.formats.dcp import catalog as dcp
from ckptkit.formats.dcp.locate import ENDS, parse_item
from ckptkit.formats.pickles import zip as zips
from ckptkit.formats.pickles.objects import TensorValue, plain, read_tensor
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.pickles.walk import loads
from ckptkit.formats.pickles.zip import memory_store, read_archive
from ckptkit.formats.torch_save import read_torch_file
from ckptkit.storage.local import LocalStore
from tests.formats.pickles.reference import described, loads_in_c
from tests.formats.readback import tensor_bytes
from tests.fuzz.mutations import mutate, mutate_zip
from tests.fuzz.running import Finding, Target, refused
from tests.hostile.sources import saved

ZOO = Path(__file__).parents[1] / "zoo"


def metadata_pickles(rng: random.Random, _: Path) -> None:
    files = _seeds("*metadata")
    data = mutate(rng, rng.choice(files).read_bytes(), [rng.choice(files).read_bytes()])
    _compare_with_c("f", lambda loads: loads(data, file="f"))


def archives(rng: random.Random, folder: Path) -> None:
    seed = rng.choice(_archive_seeds())
    others = [rng.choice(_archive_seeds())]
    (folder / "x.pt").write_bytes(mutate_zip(rng, seed, lambda raw: mutate(rng, raw, others)))

    def read(loads: Any) -> Any:
        with mock.patch.object(zips, "loads", loads):
            return read_archive(LocalStore(folder), "x.pt")

    _compare_with_c("x.pt", read)


def _compare_with_c(file: str, read: Callable[[Any], Any]) -> None:
    """Require our value to equal that of C's unpickler, if that reads the bytes."""
    with refused(file):
        ours = _described(read(loads))
        with contextlib.suppress(CkptkitError):
            in_c = _described(read(loads_in_c))
            if in_c != ours:
                raise Finding(f"C's unpickler: {in_c!r:.300}; ours: {ours!r:.300}")


def torch_files(rng: random.Random, folder: Path) -> None:
    """Require equal values for zip and legacy files that both accept, and a catalog or an error for all files."""
    seed = rng.choice(_torch_seeds())
    (folder / "x.pt").write_bytes(mutate(rng, seed))
    store = LocalStore(folder)
    with refused("x.pt", unless="occurs twice"):
        torch_save.open_catalog(store).by_role(Role.MODEL)
    with refused("x.pt"):
        ours = plain(read_torch_file(store, "x.pt"), file="x.pt", read=lambda t: _checked(store, t))
        try:
            theirs = torch.load(folder / "x.pt", weights_only=True)
        except Exception:
            return
        _compare(ours, theirs)


def dcp_directories(rng: random.Random, folder: Path) -> None:
    """Damage one file of a DCP checkpoint: it must be refused, found by a checksum, or harmless."""
    source = ZOO / rng.choice(("dcp_dtensor_2d/ckpt", "dcp_threads2_w2/ckpt", "dcp_dtypes_w2/ckpt"))
    files = sorted(source.iterdir())
    damaged = rng.choice(files)
    for file in files:
        (folder / file.name).write_bytes(mutate(rng, file.read_bytes()) if file == damaged else file.read_bytes())
    with refused(".metadata", ".distcp", "tensor '"):
        found = _read_all(folder)
        if damaged.name == ".metadata":
            return  # it may now describe other tensors correctly
        expected = _expected(source)
        for name, value in found.items():
            if value is not None and value != expected[name]:
                raise Finding(f"{damaged}: {name} changed, and nothing noticed")


def archives_of_items(rng: random.Random, folder: Path) -> None:
    """Require items parsed by comparison and items parsed alone to agree on damaged bytes."""
    source = (ZOO / "dcp_threads2_w2/ckpt/__0_0.distcp").read_bytes()
    item = source[:2281] if rng.random() < 0.5 else source[2281 : 2281 + 2025]
    damaged = mutate(rng, item)
    if len(damaged) != len(item):
        return
    _, frame = parse_item(memory_store("x", item), "x", 0, item[:ENDS], item[-ENDS:], len(item), "f")
    assert frame is not None
    front, tail = (np.frombuffer(part, np.uint8)[None] for part in (damaged[:ENDS], damaged[-ENDS:]))
    if not frame.same(front, tail)[0]:
        return
    (folder / "x").write_bytes(damaged)
    try:
        tensor = read_archive(LocalStore(folder), "x")
    except CkptkitError as error:
        raise Finding(f"the frame accepts what a full look refuses: {error}") from error
    begin, nbytes = frame.begin, frame.tensor.storage.nbytes
    if (tensor.storage.start, tensor.storage.nbytes, tensor.crc32) != (begin, nbytes, int(frame.crcs(tail)[0])):
        raise Finding("the frame finds other bytes than a full look")


TARGETS: list[Target] = [metadata_pickles, archives, torch_files, dcp_directories, archives_of_items]


# --- helpers


@functools.cache
def _seeds(pattern: str) -> list[Path]:
    return sorted(p for p in ZOO.rglob(pattern) if p.is_file() and p.stat().st_size < 20_000)


@functools.cache
def _archive_seeds() -> list[bytes]:
    """Return archives of the zoo with sharded tensors of all kinds, and archives that torch writes here."""
    found = [path.read_bytes() for suffix in ("pt", "bin", "ckpt") for path in _seeds(f"*.{suffix}")]
    return [data for data in [*found, *_torch_seeds()] if data[:2] == b"PK"]


def _described(value: Any) -> str:
    """Return the value as a string, because NaN is not equal to itself. A cycle becomes "a cycle"."""
    try:
        return re.sub(" at 0x[0-9a-f]+", "", repr(described(value)))
    except RecursionError:
        return "a cycle"


@functools.cache
def _torch_seeds() -> list[bytes]:
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    value = {
        "w": base, "v": base[1:, :, 2], "t": base.transpose(0, 2), "b": base.bfloat16(), "i": torch.arange(3),
        "e": torch.zeros(0, 3), "s": torch.tensor(2.5), "n": [1, "x", None, (2.5, True)],
    }  # fmt: skip
    kinds = itertools.product((2, 4), (True, False))
    seeds = [saved(value, pickle_protocol=p, _use_new_zipfile_serialization=modern) for p, modern in kinds]
    return [*seeds, (ZOO / "verl_fsdp2_w2/global_step_4/actor/extra_state_world_size_2_rank_0.pt").read_bytes()]


def _checked(store: LocalStore, tensor: StoredTensor) -> Any:
    """Return the tensor's value; None if its storage does not match its CRC-32, which torch does not check."""
    storage = tensor.storage
    raw = store.read(storage.path, storage.start, storage.start + storage.nbytes)
    if storage.crc32 is not None and zlib.crc32(raw) != storage.crc32:
        return None
    return read_tensor(store, tensor)


def _compare(ours: Any, theirs: Any) -> None:
    if ours is None:
        return
    if isinstance(theirs, torch.Tensor):
        if theirs.numel() * theirs.element_size() > 1 << 20:
            raise Finding(f"ours accepts {tuple(theirs.shape)} of a small file")
        flat = torch.empty(theirs.numel(), dtype=theirs.dtype).copy_(theirs.reshape(-1))  # contiguous
        raw = flat.view(torch.uint8).numpy().tobytes()
        found = ours.data if isinstance(ours, TensorValue) else ours.tobytes()
        same = tuple(ours.shape) == tuple(theirs.shape) and found == raw
    elif isinstance(theirs, (dict, list, tuple)):
        kind = dict if isinstance(theirs, dict) else (list, tuple)
        same = isinstance(ours, kind) and len(ours) == len(theirs)
        if same:
            pairs = zip(
                *(value.values() if isinstance(value, dict) else value for value in (ours, theirs)), strict=True
            )
            for mine, other in pairs:
                _compare(mine, other)
    else:
        same = not isinstance(theirs, (int, float, str)) or ours == theirs or theirs != theirs
    if not same:
        raise Finding(f"a value differs: {ours!r:.200} and {theirs!r:.200}")


def _read_all(folder: Path) -> dict[str, bytes | None]:
    """Return every tensor's bytes; None if a checksum finds damage."""
    store = LocalStore(folder)
    found: dict[str, bytes | None] = {}
    for name, entry in dcp.open_catalog(store).tensors.items():
        if entry.nbytes > 1 << 20:
            raise Finding(f"{name} has {entry.nbytes} bytes, the checkpoint a few kilobytes")
        try:
            found[name] = tensor_bytes(store, entry)
        except AssertionError:
            found[name] = None
    return found


@functools.cache
def _expected(source: Path) -> dict[str, bytes | None]:
    return _read_all(source)
