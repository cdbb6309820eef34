"""--verify: what it reads, and the damage that it finds, for tensors that are copied, cast or sharded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptkit import convert, reshard
from ckptkit.errors import IntegrityError
from ckptkit.formats.detect import open_source
from ckptkit.formats.hf.header import read_header
from ckptkit.offline import prove
from ckptkit.offline.prove import prove_equal
from ckptkit.storage.local import LocalStore
from tests.offline.folders import flip

FILE = "model.safetensors"


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Path:
    convert(str(source), str(tmp_path / "out"))
    return tmp_path


def proved(folder: Path, command: Any = convert, source: str = "in") -> int:
    plan = command(str(folder / source), str(folder / "again"), dry_run=True).plan
    return prove_equal(plan, LocalStore(str(folder / source)), LocalStore(str(folder / "out")), max_memory=10**8)


def place(folder: Path, name: str) -> int:
    """Return where a tensor starts in the result."""
    return read_header(LocalStore(str(folder / "out")), FILE).tensors[name].start


@pytest.fixture
def read(monkeypatch) -> list[tuple[str, int]]:
    """Return the path and the size of each range that --verify reads."""
    found, plain = [], prove.SourceReader.read_many

    def counted(self, ranges):
        found.extend((self._origins[item.origin].path, len(item.view)) for item in ranges)
        return plain(self, ranges)

    monkeypatch.setattr(prove.SourceReader, "read_many", counted)
    return found


def test_slices_with_digests_are_proved_without_reading_the_source(made, read):
    assert proved(made) == 18
    assert all(nbytes <= 8 for path, nbytes in read if path != FILE)  # scalars


def test_a_transposed_tensor_is_read_once_however_many_ranks_share_it(made, read):
    (made / "out").rename(made / "whole")
    (made / "map.toml").write_text('[[rules]]\nop = "transpose"\nfrom = "head.weight"\n')
    options = {"to": "dcp", "world_size": 10, "include": ["head.weight"], "key_map": str(made / "map.toml")}
    convert(str(made / "whole"), str(made / "out"), **options)
    read.clear()
    assert proved(made, partial(convert, **options), "whole") == 1
    tensor = read_header(LocalStore(str(made / "whole")), FILE).tensors["head.weight"]
    assert sum(nbytes for path, nbytes in read if path == FILE) == tensor.nbytes


COLUMNS = {"world_size": 2, "mesh": "tp=2", "tp_plan": {"*.up.weight": 1}}


@pytest.mark.parametrize("command", [
    partial(convert, dtype="bf16"), partial(reshard, world_size=3), partial(reshard, **COLUMNS),
], ids=["cast", "rows", "columns"])  # fmt: skip
def test_a_flipped_bit_is_found_in_tensors_whose_bytes_have_no_digests(made, command):
    (made / "out").rename(made / "whole")  # safetensors have no digests
    command(str(made / "whole"), str(made / "out"), verify=True)
    assert proved(made, command, "whole") == 18
    store = LocalStore(str(made / "out"))
    part = next(e for n, e in open_source(store.url).catalog.tensors.items() if n.endswith("up.weight")).slices[0]
    flip(made / "out" / part.path, part.start)
    with pytest.raises(IntegrityError, match=r"1 of 18 tensors.*up\.weight"):
        proved(made, command, "whole")


@pytest.mark.parametrize("name", ["embed.weight", "gain"])
def test_a_flipped_bit_of_the_result_is_found_and_its_tensor_named(made, name):
    flip(made / "out" / FILE, place(made, name))
    with pytest.raises(IntegrityError, match=f"1 of 18 tensors.*{name}"):
        proved(made)


def test_swapped_slices_are_found(made):
    data = bytearray((made / "out" / FILE).read_bytes())
    start, rows = place(made, "embed.weight"), 10 * 4 * 10  # ranks hold ten rows of ten numbers
    data[start : start + 2 * rows] = data[start + rows : start + 2 * rows] + data[start : start + rows]
    (made / "out" / FILE).write_bytes(data)
    with pytest.raises(IntegrityError, match=r"embed\.weight"):
        proved(made)


def test_a_result_equal_to_a_damaged_source_is_equal(made):
    slices = open_source(str(made / "in")).catalog.tensors["model.head.weight"].slices
    first = next(row for row in range(len(slices)) if not slices.offsets[row].any())
    flip(made / "in" / slices.paths[int(slices.files[first])], int(slices.starts[first]))
    flip(made / "out" / FILE, place(made, "head.weight"))
    assert proved(made) == 18
