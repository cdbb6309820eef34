"""Mutation fuzzers of the readers of torch's formats: `python -m tests.fuzz.torch_formats --seconds 600`.

Each target takes damaged bytes. A finding is any of these: an exception other than ours, a value that differs from
that of torch's weights_only loader, changed tensor bytes although every checksum matches, more than a few seconds, or
a new file in the working directory.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import re
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.catalog.entry import Role
from ckptkit.errors import CkptkitError
from ckptkit.formats import torch_save
from ckptkit.formats.dcp import catalog as dcp
from ckptkit.formats.pickles import zip as archives
from ckptkit.formats.pickles.objects import TensorValue, plain, read_tensor
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.pickles.walk import loads
from ckptkit.formats.pickles.zip import read_archive
from ckptkit.formats.torch_save import read_torch_file
from ckptkit.storage.local import LocalStore
from tests.formats.described import described
from tests.formats.pickles.reference import loads_in_c
from tests.fuzz.mutations import mutate, mutate_zip

ZOO = Path(__file__).parents[1] / "zoo"
MAX_SECONDS = 10.0


class Finding(AssertionError):
    """A damaged input had a forbidden effect."""


Target = Callable[[random.Random, Path], None]


def metadata_pickles(rng: random.Random, _: Path) -> None:
    files = [p for p in _seeds("*metadata") if "hostile" not in p.relative_to(ZOO).as_posix()]
    data = mutate(rng, rng.choice(files).read_bytes(), [rng.choice(files).read_bytes()])
    try:
        plain(loads(data, file="f"), file="f")
    except CkptkitError as error:
        _check_message(error, "f")


def metadata_and_c(rng: random.Random, _: Path) -> None:
    """Require our value to equal that of C's unpickler, if that reads the bytes."""
    data = mutate(rng, rng.choice(_seeds("*metadata")).read_bytes())
    try:
        ours = _described(loads(data, file="f"))
    except CkptkitError as error:
        _check_message(error, "f")
        return
    try:
        in_c = _described(loads_in_c(data, file="f"))
    except CkptkitError:
        return
    if in_c != ours:
        raise Finding(f"C's unpickler: {in_c!r:.300}; ours: {ours!r:.300}")


def archives_and_c(rng: random.Random, folder: Path) -> None:
    """Require the same for damaged archives of torch.save."""
    seed = rng.choice(_archive_seeds())
    others = [rng.choice(_archive_seeds())]
    (folder / "x.pt").write_bytes(mutate_zip(rng, seed, lambda raw: mutate(rng, raw, others)))
    try:
        ours = _described(read_archive(LocalStore(folder), "x.pt").value)
    except CkptkitError as error:
        _check_message(error, "x.pt")
        return
    archives.loads = loads_in_c  # type: ignore[assignment]
    try:
        in_c = _described(read_archive(LocalStore(folder), "x.pt").value)
    except CkptkitError:
        return
    finally:
        archives.loads = loads
    if in_c != ours:
        raise Finding(f"C's unpickler: {in_c!r:.300}; ours: {ours!r:.300}")


def torch_files(rng: random.Random, folder: Path) -> None:
    """Require equal values for zip and legacy files that both accept."""
    import torch

    seed = rng.choice(_torch_seeds())
    (folder / "x.pt").write_bytes(mutate(rng, seed))
    store = LocalStore(folder)
    try:
        archive = read_torch_file(store, "x.pt")
        ours = plain(archive.value, file="x.pt", read=lambda t: _checked(store, t))
    except CkptkitError as error:
        _check_message(error, "x.pt")
        return
    try:
        theirs = torch.load(folder / "x.pt", weights_only=True)
    except Exception:
        return
    _compare(ours, theirs)


def catalogs_of_files(rng: random.Random, folder: Path) -> None:
    (folder / "x.pt").write_bytes(mutate(rng, rng.choice(_torch_seeds())))
    try:
        catalog = torch_save.open_catalog(LocalStore(folder))
        catalog.by_role(Role.MODEL)
    except CkptkitError as error:
        if "occurs twice" not in str(error):
            _check_message(error, "x.pt")


def dcp_directories(rng: random.Random, folder: Path) -> None:
    """Damage one file of a DCP checkpoint: it must be refused, found by a checksum, or harmless."""
    source = ZOO / rng.choice(("dcp_dtensor_2d/ckpt", "dcp_threads2_w2/ckpt", "dcp_dtypes_w2/ckpt"))
    files = sorted(source.iterdir())
    damaged = rng.choice(files)
    for file in files:
        (folder / file.name).write_bytes(mutate(rng, file.read_bytes()) if file == damaged else file.read_bytes())
    try:
        found = _read_all(folder)
    except CkptkitError as error:
        if not any(text in str(error) for text in (".metadata", ".distcp", "tensor '")):
            raise Finding(f"the message names no file: {error}") from error
        return
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
    from ckptkit.formats.dcp.locate import ENDS, parse_item
    from ckptkit.formats.pickles.zip import memory_store

    _, frame = parse_item(memory_store("x", item), "x", 0, item[:ENDS], item[-ENDS:], len(item), "f")
    assert frame is not None
    front, tail = (np.frombuffer(part, np.uint8)[None] for part in (damaged[:ENDS], damaged[-ENDS:]))
    if not frame.same(front, tail)[0]:
        return
    (folder / "x").write_bytes(damaged)
    try:
        tensor = read_archive(LocalStore(folder), "x").value
    except CkptkitError as error:
        raise Finding(f"the frame accepts what a full look refuses: {error}") from error
    begin, nbytes = frame.begin, frame.tensor.storage.nbytes
    if (tensor.storage.start, tensor.storage.nbytes, tensor.crc32) != (begin, nbytes, int(frame.crcs(tail)[0])):
        raise Finding("the frame finds other bytes than a full look")


TARGETS: dict[str, Target] = {
    f.__name__: f
    for f in (
        metadata_pickles,
        metadata_and_c,
        archives_and_c,
        torch_files,
        catalogs_of_files,
        dcp_directories,
        archives_of_items,
    )
}


# --- helpers

_cache: dict[str, Any] = {}


def _seeds(pattern: str) -> list[Path]:
    if pattern not in _cache:
        _cache[pattern] = sorted(p for p in ZOO.rglob(pattern) if p.is_file() and p.stat().st_size < 20_000)
    return list(_cache[pattern])


def _archive_seeds() -> list[bytes]:
    """Return archives of the zoo with sharded tensors of all kinds, and archives that torch writes here."""
    if "archives" not in _cache:
        found = [path.read_bytes() for suffix in ("pt", "bin", "ckpt") for path in _seeds(f"*.{suffix}")]
        _cache["archives"] = [data for data in [*found, *_torch_seeds()] if data[:2] == b"PK"]
    return list(_cache["archives"])


def _described(value: Any) -> str:
    """Return the value as a string, because NaN is not equal to itself. A cycle becomes "a cycle"."""
    try:
        return re.sub(" at 0x[0-9a-f]+", "", repr(described(value)))
    except RecursionError:
        return "a cycle"


def _torch_seeds() -> list[bytes]:
    if "torch" not in _cache:
        import torch

        base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
        value = {
            "w": base, "v": base[1:, :, 2], "t": base.transpose(0, 2), "b": base.bfloat16(), "i": torch.arange(3),
            "e": torch.zeros(0, 3), "s": torch.tensor(2.5), "n": [1, "x", None, (2.5, True)],
        }  # fmt: skip
        seeds = []
        for protocol in (2, 4):
            for modern in (True, False):
                out = io.BytesIO()
                torch.save(value, out, pickle_protocol=protocol, _use_new_zipfile_serialization=modern)
                seeds.append(out.getvalue())
        actor = "verl_fsdp2_w2/global_step_4/actor/extra_state_world_size_2_rank_0.pt"
        _cache["torch"] = [*seeds, (ZOO / actor).read_bytes()]
    return list(_cache["torch"])


def _check_message(error: CkptkitError, file: str) -> None:
    if file not in str(error) or len(str(error)) > 2000:
        raise Finding(f"the message does not name the file, or is too long: {str(error)[:300]}") from error


def _checked(store: LocalStore, tensor: StoredTensor) -> Any:
    """Return the tensor's value; None if its storage does not match its CRC-32, which torch does not check."""
    storage = tensor.storage
    raw = store.read(storage.path, storage.start, storage.start + storage.nbytes)
    if storage.crc32 is not None and zlib.crc32(raw) != storage.crc32:
        return None
    return read_tensor(store, tensor)


def _compare(ours: Any, theirs: Any) -> None:
    import torch

    if ours is None:
        return
    if isinstance(theirs, torch.Tensor):
        if theirs.numel() * theirs.element_size() > 1 << 20:
            raise Finding(f"ours accepts {tuple(theirs.shape)} of a small file")
        flat = torch.empty(theirs.numel(), dtype=theirs.dtype).copy_(theirs.reshape(-1))  # contiguous
        raw = flat.view(torch.uint8).numpy().tobytes()
        found = ours.data if isinstance(ours, TensorValue) else ours.tobytes()
        if tuple(ours.shape) != tuple(theirs.shape) or found != raw:
            raise Finding(f"a tensor differs: {ours!r:.200} and {theirs!r:.200}")
    elif isinstance(theirs, dict):
        if not isinstance(ours, dict) or len(ours) != len(theirs):
            raise Finding(f"a dict differs: {ours!r:.200} and {theirs!r:.200}")
        for mine, other in zip(ours.values(), theirs.values(), strict=True):
            _compare(mine, other)
    elif isinstance(theirs, (list, tuple)):
        if not isinstance(ours, (list, tuple)) or len(ours) != len(theirs):
            raise Finding(f"a list differs: {ours!r:.200} and {theirs!r:.200}")
        for mine, other in zip(ours, theirs, strict=True):
            _compare(mine, other)
    elif isinstance(theirs, (int, float, str)) and ours != theirs and theirs == theirs:
        raise Finding(f"a value differs: {ours!r:.200} and {theirs!r:.200}")


def _read_all(folder: Path) -> dict[str, bytes | None]:
    """Return every tensor's bytes; None if a checksum finds damage."""
    from tests.formats.readback import tensor_bytes

    store = LocalStore(folder)
    found: dict[str, bytes | None] = {}
    for name, entry in dcp.open_catalog(store).tensors.items():
        if entry.nbytes > 1 << 20:
            raise Finding(f"{name} has {entry.nbytes} bytes, the checkpoint a few kilobytes")
        try:
            found[name] = tensor_bytes(store, entry)[2]
        except AssertionError:
            found[name] = None
    return found


def _expected(source: Path) -> dict[str, bytes | None]:
    key = f"expected {source}"
    if key not in _cache:
        _cache[key] = _read_all(source)
    return dict(_cache[key])


def run(target: str, seed: int, folder: Path) -> None:
    """Run one damaged input of one target. Raises: Finding, or any exception of the reader."""
    rng = random.Random(f"{target} {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    started, here = time.monotonic(), Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            TARGETS[target](rng, folder)
        finally:
            os.chdir(here)
        if os.listdir(empty):
            raise Finding("something was written to the working directory")
    if time.monotonic() - started > MAX_SECONDS:
        raise Finding(f"took {time.monotonic() - started:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--target", choices=[*TARGETS], action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for target in options.target or TARGETS:
            stop, seed, findings = time.monotonic() + options.seconds, options.seed, 0
            while time.monotonic() < stop:
                try:
                    run(target, seed, Path(name))
                except (Exception, pickle.UnpicklingError) as error:
                    findings += 1
                    print(f"{target} seed {seed}: {type(error).__name__}: {str(error)[:300]}")
                seed += 1
            print(f"{target}: {seed - options.seed} inputs, {findings} findings")


if __name__ == "__main__":
    main()
