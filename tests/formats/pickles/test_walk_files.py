"""Metadata and archives of real libraries are read as by C's unpickler; deceptive ones are refused."""

import gc
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CkptkitError, CorruptCheckpointError
from ckptkit.formats.dcp import locate
from ckptkit.formats.dcp.catalog import open_catalog
from ckptkit.formats.pickles import zip as archives
from ckptkit.formats.pickles.walk import loads
from ckptkit.storage.local import LocalStore
from tests.formats.described import described
from tests.formats.pickles.reference import loads_in_c


def test_all_metadata_of_the_zoo_are_read_like_the_c_unpickler_does(zoo):
    files = [path for path in zoo.rglob("*metadata") if path.is_file() and "hostile" not in str(path)]
    assert len(files) > 30
    for file in files:
        data = file.read_bytes()
        assert described(loads(data, file="m")) == described(loads_in_c(data, file="m")), file


def test_classes_under_old_module_names_are_read(zoo):
    data = (zoo / "dcp_dtensor_2d/ckpt/.metadata").read_bytes()
    old = b"torch.distributed._shard.checkpoint.metadata"
    new = b"torch.distributed.checkpoint.metadata"
    moved = data.replace(b"\x8c" + bytes([len(new)]) + new, b"\x8c" + bytes([len(old)]) + old)
    moved = b"\x80\x04" + moved[11:]  # without the frame, whose length no longer fits
    assert moved != data
    assert described(loads(moved, file="m")) == described(loads(data, file="m"))


def test_garbage_collection_is_on_again_after_an_error():
    with pytest.raises(CorruptCheckpointError):
        loads(b"\x80\x04" + b"N" * 64 + b"R.", file="m")
    assert gc.isenabled()


@pytest.mark.parametrize("many", [b"]", b"}", b"\x8f", b"]\x94", b"N\x85", b"N\x85\x85\x85", b"(t"])
def test_oversized_containers_are_refused(many):
    count = 2_400_000 // len(many)
    with pytest.raises(CorruptCheckpointError, match="too many empty containers for its size"):
        loads(b"\x80\x04" + many * count + b".", file="m")
    loads(b"\x80\x04" + many * 1000 + b".", file="m")


@pytest.mark.parametrize("name", ["dcp_threads2_w2/ckpt", "dcp_zstd_w2/ckpt", "dcp_torchtitan_like_w2/step-2"])
def test_a_catalog_is_the_same_whether_items_are_parsed_or_compared(zoo, name, monkeypatch):
    def rows() -> dict[str, Any]:
        catalog = open_catalog(LocalStore(zoo / name))
        return {n: (e.dtype, e.shape, e.role, e.fqn, e.state, list(e.slices)) for n, e in catalog.tensors.items()}

    framed = rows()
    monkeypatch.setattr(locate, "_FEW", 1 << 40)
    assert rows() == framed


def test_all_archives_of_the_zoo_are_read_like_the_c_unpickler_does(zoo, monkeypatch):
    found = [path for pattern in ("*.pt", "*.bin", "*.ckpt") for path in sorted(zoo.rglob(pattern)) if path.is_file()]
    files = [path for path in found if not path.relative_to(zoo).parts[0].startswith("hostile")]

    def value(path: Path) -> Any:
        try:
            return described(archives.read_archive(LocalStore(path.parent), path.name))
        except CkptkitError:
            return "refused"

    ours = [value(path) for path in files]
    assert sum(one != "refused" for one in ours) > 40
    monkeypatch.setattr(archives, "loads", loads_in_c)
    for path, one in zip(files, ours, strict=True):
        assert value(path) == one, path
