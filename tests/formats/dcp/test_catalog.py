"""DCP checkpoints of every form are read bit-exactly; broken and hostile ones are refused by file."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.catalog.entry import Role
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePathError,
    UnsafePickleError,
)
from ckptkit.formats.dcp.catalog import open_catalog
from ckptkit.formats.pickles.objects import read_object
from ckptkit.storage.local import LocalStore
from tests.conftest import ZOO
from tests.formats.readback import assert_model_equals, tensor_bytes

CASES = {case["name"]: case for case in json.loads((ZOO / "MANIFEST.json").read_text())}
DCP = [n for n, c in CASES.items() if c["kind"].startswith(("dcp", "lightning", "megatron")) and c["outcome"] == "ok"]
DCP = [n for n in DCP if (ZOO / n / CASES[n]["input"] / ".metadata").exists() or "collectives" in n]
# The prefix of the expected names after the planner's wrapper was removed.
FRONT = {"lightning_real_mp_w2": "model.", "lightning_trainer_fsdp_w2": "model."}


@pytest.mark.parametrize("name", DCP)
def test_the_model_is_bit_exact_and_its_names_have_no_wrapper(name: str) -> None:
    case = CASES[name]
    store = LocalStore(ZOO / name / case["input"])
    assert_model_equals(store, open_catalog(store), ZOO / name / case["expected"], FRONT.get(name, ""))


@pytest.mark.parametrize("name", DCP)
def test_every_tensor_can_be_read(name: str) -> None:
    store = LocalStore(ZOO / name / CASES[name]["input"])
    for entry in open_catalog(store).tensors.values():
        tensor_bytes(store, entry)


@pytest.mark.parametrize("name", DCP)
def test_every_object_is_read_without_running_code(name: str) -> None:
    store = LocalStore(ZOO / name / CASES[name]["input"])
    for entry in open_catalog(store).objects.values():
        read_object(store, entry)


OPTIMIZERS = {
    "dcp_appstate_w2/ckpt": "gain",
    "dcp_torchtitan_like_w2/step-2": "gain",
    "dcp_fsdp2_uneven_w4/ckpt": "gain",
    "lightrft_naive_optim_w2/global_step6/optim_states": "gain",
    "accelerate_fsdp2_sharded_llama_tied_w2/checkpoint/optimizer_0": "model.embed_tokens.weight",
    "lightning_real_mp_w2/last.ckpt": "model.model.embed_tokens.weight",
}


@pytest.mark.parametrize("path", OPTIMIZERS)
def test_optimizer_states_know_their_parameter_and_name(zoo: Path, path: str) -> None:
    catalog = open_catalog(LocalStore(zoo / path))
    states = {e.state for e in catalog.tensors.values() if e.role is Role.OPTIMIZER and e.fqn == OPTIMIZERS[path]}
    assert states == {"exp_avg", "exp_avg_sq", "step"}
    weights = {e.fqn for e in catalog.by_role(Role.MODEL).values()}
    moments = {e.fqn for e in catalog.tensors.values() if e.role is Role.OPTIMIZER}
    assert not weights or moments <= weights


def test_tensors_outside_of_model_and_optimizer_have_the_role_other(zoo: Path) -> None:
    catalog = open_catalog(LocalStore(zoo / "dcp_torchtitan_like_w2/step-2"))
    other = {e.name for e in catalog.tensors.values() if e.role is Role.OTHER}
    assert all(name.startswith(("dataloader.", "train_state.", "lr_scheduler.")) for name in other), other


def test_opening_reads_no_data_file(zoo: Path, tmp_path: Path) -> None:
    source = zoo / "dcp_threads2_w2/ckpt"
    shutil.copytree(source, tmp_path / "c")
    for file in (tmp_path / "c").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    catalog = open_catalog(LocalStore(tmp_path / "c"))
    with pytest.raises(
        CorruptCheckpointError, match=r"__\d_\d\.distcp: expected a torch.save zip .* at byte 0, found neither"
    ):
        _ = catalog.tensors["embed.weight"].slices.starts


def test_reading_imports_no_torch(zoo: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from ckptkit.storage.local import LocalStore\n"
        "from ckptkit.formats.dcp.catalog import open_catalog\n"
        f"c = open_catalog(LocalStore({str(zoo / 'dcp_zstd_w2/ckpt')!r}))\n"
        "[t.slices.starts for t in c.tensors.values()]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- broken and hostile


def test_the_digest_of_a_slice_finds_a_flipped_bit(zoo: Path) -> None:
    store = LocalStore(zoo / "broken_bitflip_shard/ckpt")
    entry = open_catalog(store).tensors["model.model.embed_tokens.weight"]
    with pytest.raises(AssertionError, match="CRC-32"):
        tensor_bytes(store, entry)


REFUSED = {
    "broken_missing_metadata/ckpt": (IncompleteCheckpointError, r"\.metadata is missing"),
    "broken_missing_shard/ckpt": (IncompleteCheckpointError, r"__1_0\.distcp is missing"),
    "hostile_metadata/ckpt": (UnsafePickleError, r"\.metadata: .*builtins\.exec"),
    "hostile_path_traversal/ckpt": (UnsafePathError, r"\.metadata: it names '\.\./\.\./"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_broken_and_hostile_checkpoints_are_refused_by_file_and_fault(
    zoo: Path, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error, text = REFUSED[path]
    with pytest.raises(error, match=text):
        open_catalog(LocalStore(zoo / path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        ({".metadata.tmp": b"x"}, IncompleteCheckpointError, r"only \.metadata\.tmp is there"),
        ({".metadata": b""}, IncompleteCheckpointError, "is empty"),
        ({}, CheckpointNotFoundError, "not a DCP checkpoint"),
    ],
    ids=["unfinished save", "empty metadata", "empty directory"],
)
def test_a_directory_without_usable_metadata_is_refused(
    tmp_path: Path, files: dict[str, bytes], error: type[CkptkitError], text: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=text):
        open_catalog(LocalStore(tmp_path))


@pytest.fixture
def copy(zoo: Path, tmp_path: Path) -> Path:
    shutil.copytree(zoo / "dcp_dtensor_2d/ckpt", tmp_path / "c")
    return tmp_path / "c"


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Load `.metadata` with torch, change it, write it back."""
    import torch.distributed.checkpoint  # noqa: F401 - its classes are in the pickle

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def first(metadata: Any, name: str = "col") -> tuple[Any, Any]:
    return next((k, v) for k, v in metadata.storage_data.items() if k.fqn == name)


def refusal(folder: Path) -> CkptkitError:
    with pytest.raises(CkptkitError) as caught:
        store = LocalStore(folder)
        for entry in open_catalog(store).tensors.values():
            _ = entry.slices.starts
    return caught.value


def test_metadata_rewritten_unchanged_are_accepted(copy: Path, zoo: Path) -> None:
    change(copy, lambda m: None)
    store = LocalStore(copy)
    assert_model_equals(store, open_catalog(store), zoo / "dcp_dtensor_2d/EXPECTED.safetensors")


def drop_place(m: Any) -> None:
    del m.storage_data[first(m)[0]]


def drop_chunk(m: Any) -> None:
    chunk = m.state_dict_metadata["col"].chunks.pop()
    m.storage_data = {k: v for k, v in m.storage_data.items() if not (k.fqn == "col" and k.offset == chunk.offsets)}


def huge_shape(m: Any) -> None:
    import torch

    m.state_dict_metadata["col"].size = torch.Size([1 << 40, 1 << 20])


def huge_chunk(m: Any) -> None:
    import torch

    entry = m.state_dict_metadata["rep" if "rep" in m.state_dict_metadata else "col"]
    entry.size = torch.Size([1 << 40] * len(entry.size))
    entry.chunks = entry.chunks[:1]
    entry.chunks[0].sizes = entry.size


def moved(m: Any) -> None:
    first(m)[1].offset += 1


def negative(m: Any) -> None:
    first(m)[1].offset = -5


def beyond(m: Any) -> None:
    first(m)[1].length = 1 << 50


def other_dtype(m: Any) -> None:
    import dataclasses

    import torch

    entry = m.state_dict_metadata["col"]
    entry.properties = dataclasses.replace(entry.properties, dtype=torch.float16)


def no_path(m: Any) -> None:
    first(m)[1].relative_path = None


def overlapping(m: Any) -> None:
    entry = m.state_dict_metadata["col"]
    entry.chunks[1].offsets = type(entry.chunks[1].offsets)([0] + [1] * (len(entry.size) - 1))
    index, info = [(k, v) for k, v in m.storage_data.items() if k.fqn == "col"][1]
    del m.storage_data[index]
    m.storage_data[type(index)("col", entry.chunks[1].offsets)] = info


def path_to(path: str) -> Callable[[Any], None]:
    def edit(m: Any) -> None:
        first(m)[1].relative_path = path

    return edit


FAULTS: dict[str, tuple[Callable[[Any], None], type[CkptkitError], str]] = {
    "a place is missing": (drop_place, IncompleteCheckpointError, "no location for the part"),
    "a part is missing": (drop_chunk, IncompleteCheckpointError, "of .* elements"),
    "a shape is larger than its parts": (huge_shape, IncompleteCheckpointError, "of .* elements"),
    "a part declares more than is stored": (huge_chunk, CorruptCheckpointError, "stores"),
    "an item begins elsewhere": (moved, CorruptCheckpointError, "found neither|overlaps"),
    "a range is negative": (negative, CorruptCheckpointError, "not a byte range"),
    "a range ends past the file": (beyond, IncompleteCheckpointError, "truncated"),
    "a dtype is another than stored": (other_dtype, CorruptCheckpointError, "Files of two saves"),
    "a path is not text": (no_path, CorruptCheckpointError, "not a string"),
    "parts overlap": (overlapping, CkptkitError, "overlap|twice|elements|outside"),
    "a path is absolute": (path_to("/etc/passwd"), UnsafePathError, "outside the checkpoint"),
    "a path climbs": (path_to("a/../../x"), UnsafePathError, "outside the checkpoint"),
    "a path has a NUL": (path_to("__0_0.distcp\0"), UnsafePathError, "outside the checkpoint"),
    "a path is of Windows": (path_to("..\\x"), UnsafePathError, "outside the checkpoint"),
    "a path is empty": (path_to(""), UnsafePathError, "outside the checkpoint"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_that_contradict_the_files_are_refused(copy: Path, fault: str) -> None:
    edit, error, text = FAULTS[fault]
    change(copy, edit)
    found = refusal(copy)
    assert isinstance(found, error)
    assert re.search(text, str(found)), found
    assert ".metadata" in str(found) or ".distcp" in str(found) or "tensor 'col'" in str(found)


def leads_outside(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def is_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def lacks_a_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def is_of_another_save(file: Path) -> None:
    raw, size = (ZOO / "dcp_hsdp_2x2/ckpt/__0_0.distcp").read_bytes(), file.stat().st_size
    file.write_bytes((raw + bytes(size))[:size])


@pytest.mark.parametrize(
    ("name", "damage", "error", "text"),
    [
        ("__0_0.distcp", leads_outside, UnsafePathError, "__0_0.distcp"),
        ("__0_0.distcp", is_a_fifo, CorruptCheckpointError, "__0_0.distcp: expected a file, found a FIFO"),
        ("__3_0.distcp", lacks_a_byte, IncompleteCheckpointError, "__3_0.distcp"),
        ("__0_0.distcp", is_of_another_save, CkptkitError, "__0_0.distcp"),
    ],
)
def test_an_error_names_a_damaged_data_file(
    copy: Path, name: str, damage: Callable[[Path], None], error: type[CkptkitError], text: str
) -> None:
    damage(copy / name)
    found = refusal(copy)
    assert isinstance(found, error) and text in str(found)


@pytest.mark.parametrize(("rank", "text"), [(0, "__0.metadata is missing"), (1, "elements")])
def test_a_missing_metadata_file_of_a_rank_is_found(zoo: Path, tmp_path: Path, rank: int, text: str) -> None:
    """No entry refers to the file of the last rank, so its parts of the tensors are missing."""
    shutil.copytree(zoo / "dcp_no_collectives_w2/ckpt", tmp_path / "c")
    (tmp_path / "c" / f"__{rank}.metadata").unlink()
    found = refusal(tmp_path / "c")
    assert isinstance(found, IncompleteCheckpointError) and text in str(found)


def test_a_shard_that_torch_lost_in_a_safetensors_file_is_reported_missing(zoo: Path, tmp_path: Path) -> None:
    import torch

    shutil.copytree(zoo / "dcp_serialization_safetensors_w2/ckpt", tmp_path / "c")

    def split(m: Any) -> None:
        entry = m.state_dict_metadata["experts"]
        chunk = entry.chunks[0]
        index, info = next(
            (k, v) for k, v in m.storage_data.items() if k.fqn == "experts" and k.offset == chunk.offsets
        )
        half = torch.Size([chunk.sizes[0] // 2, *chunk.sizes[1:]])
        second = torch.Size([chunk.offsets[0] + half[0], *chunk.offsets[1:]])
        rest = torch.Size([chunk.sizes[0] - half[0], *chunk.sizes[1:]])
        chunk.sizes = half
        entry.chunks.append(type(chunk)(second, rest))
        m.storage_data[type(index)("experts", second)] = info

    change(tmp_path / "c", split)
    found = refusal(tmp_path / "c")
    assert isinstance(found, IncompleteCheckpointError)
    assert "experts" in str(found)


def test_reading_zstd_items_without_the_package_names_the_extra(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from ckptkit.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "zstandard", None)
    catalog = open_catalog(LocalStore(zoo / "dcp_zstd_w2/ckpt"))
    with pytest.raises(MissingExtraError, match="zstd"):
        _ = catalog.tensors["model.gain"].slices.starts


def test_a_zstd_item_that_decodes_to_more_than_its_tensor_is_refused(zoo: Path, tmp_path: Path) -> None:
    import zstandard

    shutil.copytree(zoo / "dcp_zstd_w2/ckpt", tmp_path / "c")
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    file = tmp_path / "c" / "__0_0.distcp"
    raw = file.read_bytes()
    entry = open_catalog(LocalStore(tmp_path / "c")).tensors["model.embed.weight"]
    codec = next(s.codec for s in entry.slices if s.path == file.name)
    assert codec is not None
    file.write_bytes(raw[: codec.start] + bomb + raw[codec.start :])
    change(tmp_path / "c", lambda m: lengthen(m, codec.start, len(bomb)))
    found = refusal(tmp_path / "c")
    assert isinstance(found, CorruptCheckpointError)
    assert "decodes to more" in str(found)


def lengthen(m: Any, start: int, by: int) -> None:
    for info in m.storage_data.values():
        if info.relative_path == "__0_0.distcp":
            if info.offset == start:
                info.length = by
            elif info.offset > start:
                info.offset += by


def test_a_checkpoint_with_more_files_than_may_be_open_is_read(zoo: Path, tmp_path: Path) -> None:
    """One file per item (`single_file_per_rank=False`), with a low limit on descriptors."""
    import resource

    shutil.copytree(zoo / "dcp_hsdp_2x2/ckpt", tmp_path / "c")

    def scatter(m: Any) -> None:
        for number, info in enumerate(m.storage_data.values()):
            raw = (tmp_path / "c" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            info.relative_path, info.offset = f"__0_{number}.part", 0
            (tmp_path / "c" / info.relative_path).write_bytes(raw)

    change(tmp_path / "c", scatter)
    store = LocalStore(tmp_path / "c")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.formats.dcp.locate._BLOCK_FILES", 8)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
        try:
            catalog = open_catalog(store)
            starts = [s.start for e in catalog.tensors.values() for s in e.slices]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(starts) > 60
    assert_model_equals(store, catalog, zoo / "dcp_hsdp_2x2/EXPECTED.safetensors")
