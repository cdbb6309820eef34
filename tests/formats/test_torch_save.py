"""Files of torch.save become catalogs: weights are found below any wrapper, optimizer states are named."""

import collections
import io
import json
import re
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import verify
from ckptkit.catalog.entry import Role
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from ckptkit.formats.detect import open_source
from ckptkit.formats.nested import insert, with_lists
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.torch_save import open_catalog, open_file
from ckptkit.storage.local import LocalStore
from tests.formats.readback import contents, contents_of_state_dict
from tests.hostile.sources import saved


def save(folder: Path, value: Any, name: str = "x.pt") -> LocalStore:
    torch.save(value, folder / name)
    return LocalStore(folder)


def weights() -> dict[str, Any]:
    return {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2), "empty": torch.zeros(0, 3)}


WRAPPERS: dict[str, Any] = {
    "bare": lambda w: w,
    "state_dict": lambda w: {"state_dict": w, "epoch": 3},
    "model": lambda w: {"model": w, "optimizer": {"state": {}, "param_groups": []}},
    "module": lambda w: {"module": w, "args": {"lr": 1.0}},
    "model_state_dict": lambda w: {"model_state_dict": w},
    "nested": lambda w: {"app": {"model": w}},
    "of its own": lambda w: {"generator": w, "epoch": 3},
    "of two models": lambda w: {"generator": w, "critic": w},
    "beside a second copy": lambda w: {"model": w, "ema": w},
    "of Composer": lambda w: {
        "state": {"model": w, "timestamp": {"Timestamp": {"epoch": 1, "batch": 6, "sample": 24}}}
    },
    "of fairseq": lambda w: {"model": w, "optimizer_history": [{"num_updates": 3}, {"num_updates": 6}]},
    "beside a defaultdict of int": lambda w: {"model": w, "counts": collections.defaultdict(int, {"a": 1})},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_and_the_step_are_found_below_any_wrapper(tmp_path, wrapper):
    catalog = open_catalog(save(tmp_path, WRAPPERS[wrapper](weights())))
    fronts = ("generator.", "critic.") if wrapper == "of two models" else ("",)
    assert catalog.by_role(Role.MODEL).keys() == {f"{front}{name}" for front in fronts for name in weights()}
    assert ("ema.a.weight" in catalog.by_role(Role.OTHER)) == (wrapper == "beside a second copy")
    assert catalog.info.step == (6 if wrapper in ("of Composer", "of fairseq") else None)


def test_tied_weights_are_noted_but_not_a_diverged_head(zoo, tmp_path):
    catalog = open_catalog(LocalStore(zoo / "torchsave_pytorch_model_bin"))
    assert catalog.info.extra["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    base = torch.arange(12.0)
    catalog = open_catalog(save(tmp_path, {"a": base[:6], "b": base[6:], "c": base[:6].reshape(2, 3)}))
    assert "tied" not in catalog.info.extra


def test_a_rank_file_alone_is_incomplete(zoo):
    store = LocalStore(zoo / "verl_fsdp2_w2/global_step_4/actor")
    with pytest.raises(IncompleteCheckpointError, match=r"only the part of rank 1 of 2"):
        open_file(store, "model_world_size_2_rank_1.pt")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("mark", ["conj", "neg"])
def test_a_view_whose_bytes_are_not_its_values_is_refused(tmp_path, mark, legacy):
    lazy = torch.ones(3, dtype=torch.complex64).conj()
    value = {"a": lazy if mark == "conj" else lazy.imag}
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UnsupportedFormatError, match=f"x.pt: holds a lazy {mark} view"):
        open_file(LocalStore(tmp_path), "x.pt")


@pytest.mark.parametrize("legacy", [False, True])
def test_views_have_the_elements_that_torch_reads(tmp_path, legacy):
    base = torch.arange(60.0).reshape(3, 4, 5)
    state = {"scale": torch.tensor(1.5).expand(2, 3), "rows": torch.arange(3.0).expand(4, 3),
             "view": base[1:, :, 2], "t": base.transpose(0, 2)}  # fmt: skip
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    store = LocalStore(tmp_path)
    assert contents(store, open_catalog(store).tensors) == contents_of_state_dict(state)


def pretended(monkeypatch: pytest.MonkeyPatch, path: str) -> type:
    """Return a new class of a package that is not installed, which torch can pickle."""
    module, _, name = path.rpartition(".")
    made = type(name, (), {"__module__": module})
    parts = module.split(".")
    for parent in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    setattr(sys.modules[module], name, made)
    return made


def test_framework_settings_next_to_the_weights_are_accepted(tmp_path, monkeypatch):
    """Hyperparameters of Lightning and Hydra: classes with plain values, and nodes that refer to their parent."""
    settings = pretended(monkeypatch, "omegaconf.dictconfig.DictConfig")()
    leaf = pretended(monkeypatch, "omegaconf.nodes.AnyNode")()
    leaf.__dict__.update(_val=3, _parent=settings)
    settings.__dict__.update(_content={"lr": leaf}, _parent=None)
    store = save(tmp_path, {"state_dict": weights(), "hyper_parameters": settings}, "x.ckpt")
    assert open_file(store, "x.ckpt").by_role(Role.MODEL).keys() == weights().keys()


def test_the_log_of_losses_in_a_file_of_mmengine_is_accepted(tmp_path, monkeypatch):
    """MMEngine's HistoryBuffer refers to its methods."""
    kind: Any = pretended(monkeypatch, "mmengine.logging.history_buffer.HistoryBuffer")
    kind.min = types.FunctionType((lambda self: 0).__code__, {}, "min")
    kind.min.__qualname__, kind.min.__module__ = "HistoryBuffer.min", kind.__module__
    buffer = kind()
    buffer._statistics_methods = {"min": kind.min}
    saved = {"state_dict": weights(), "message_hub": {"log": buffer}, "meta": {"epoch": 2, "iter": 8}}
    catalog = open_catalog(save(tmp_path, saved))
    assert catalog.by_role(Role.MODEL).keys() == weights().keys() and catalog.info.step == 8


# --- shards with an index


INDEX, SHARD = "pytorch_model.bin.index.json", "pytorch_model-0000{}-of-00002.bin"


@pytest.fixture
def shards(tmp_path):
    w = weights()
    save(tmp_path, {"a.weight": w["a.weight"]}, SHARD.format(1))
    save(tmp_path, {"a.bias": w["a.bias"], "empty": w["empty"]}, SHARD.format(2))
    return tmp_path


def list_shards(folder: Path, numbers: dict[str, int]) -> None:
    weight_map = {name: SHARD.format(number) for name, number in numbers.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_joined_with_and_without_an_index_and_a_missing_one_or_a_false_index_is_named(shards):
    list_shards(shards, {"a.weight": 1, "a.bias": 2})
    with pytest.raises(CorruptCheckpointError, match=r"00002\.bin holds tensor 'empty', but .*does not list it"):
        open_source(str(shards))
    list_shards(shards, {"a.weight": 1, "a.bias": 2, "empty": 2})
    for _ in range(2):
        assert open_source(str(shards)).catalog.by_role(Role.MODEL).keys() == weights().keys()
        (shards / INDEX).unlink(missing_ok=True)
    (shards / SHARD.format(1)).unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"missing: pytorch_model-00001-of-00002\.bin"):
        open_source(str(shards))


def test_a_directory_without_a_single_model_is_refused_with_its_files(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"has no torch\.save file"):
        open_catalog(LocalStore(tmp_path))
    save(tmp_path, weights(), "a.pt")
    with pytest.raises(CheckpointNotFoundError, match=r"has 2 torch.save files: a\.pt, b\.pt\. Name"):
        open_catalog(save(tmp_path, weights(), "b.pt"))


@pytest.mark.parametrize("paths", [[("a",), ("a", "b")], [("a", "b"), ("a",)]])
def test_a_value_and_one_below_its_name_are_both_kept(paths):
    tree: dict[Any, Any] = {}
    for path in paths:
        insert(tree, path, ".".join(path))
    assert with_lists(tree) == {"a": {"": "a", "b": "a.b"}}


@pytest.mark.parametrize(("meta", "noted"), [({"mmengine_version": "0.10.7"}, 1), ({"epoch": 2}, 0), (None, 0)])
def test_a_note_says_that_mmengine_swaps_the_weights_and_their_average(tmp_path, meta, noted):
    weights = {"state_dict": {"w": torch.ones(2)}, "ema_state_dict": {"module.w": torch.zeros(2)}}
    torch.save({**weights, "meta": meta}, tmp_path / "epoch_2.pth")
    notes = open_source(str(tmp_path / "epoch_2.pth")).catalog.info.notes
    assert [note.startswith("state_dict is the moving average") for note in notes] == [True] * noted


def zipped(members: dict[str, str]) -> bytes:
    with zipfile.ZipFile(out := io.BytesIO(), "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return out.getvalue()


FIRST, UNSUPPORTED = saved({"w": torch.ones(2)}), UnsupportedFormatError
REFUSED: list[tuple[str, bytes, type[CkptkitError], str]] = [
    ("model.weights.h5", b"\x89HDF\r\n\x1a\n" + bytes(600), UNSUPPORTED, " is an HDF5 file, as Keras writes"),
    ("sac.zip", zipped({"data": "{}", "policy.pth": "PK"}), UNSUPPORTED,  # of stable-baselines3
     r" is an archive of several .*: policy\.pth\. Unpack it"),
    ("m.nemo", b"\x1f\x8b\x08" + bytes(600), UNSUPPORTED, " is a tar archive of NeMo.*tar -xf"),
    ("old.pt", tarfile.TarInfo("sys_info").tobuf() + bytes(1024), UNSUPPORTED,  # of torch 0.1
     " is a tar archive.*save it again"),
    ("checkpoint-2.pth.tar", b"", CorruptCheckpointError, " is empty"),  # and not called an archive
    ("x.pt", FIRST[FIRST.index(b"\x80\x02") :], CorruptCheckpointError, ": .*its first bytes are missing"),
    *((f"x{i}.bin", data, CorruptCheckpointError, ": ")
      for i, data in enumerate((b"x", b"PK", b"\x80", bytes(600), b"\x80\x02}q\x00"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "error", "text"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_file_that_torch_did_not_write_is_refused(tmp_path, name, data, error, text):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=re.escape(name) + text):
        open_source(str(tmp_path / name))


class Setting:
    """A class of the trainer."""


def test_the_error_for_a_class_next_to_the_weights_says_how_to_read_them(tmp_path):
    store = save(tmp_path, {"state_dict": weights(), "hyper_parameters": {"a": Setting()}})
    with pytest.raises(UnsafePickleError, match=r"test_torch_save\.Setting.*--allow-pickle reads the tensors"):
        open_catalog(store)
    catalog = open_catalog(store, options=ReadOptions(allow_pickle=True))
    assert catalog.by_role(Role.MODEL).keys() == weights().keys()


@pytest.fixture
def without_crcs():
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.usefixtures("without_crcs")
def test_files_that_torch_wrote_without_crcs_are_read(tmp_path):
    dcp.save({"model": weights()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save(tmp_path, {"model": weights(), "step": 3})
    for path in ("x.pt", "dcp"):
        source, report = open_source(str(tmp_path / path)), verify(tmp_path / path)
        assert contents(source.store, source.catalog.by_role(Role.MODEL)) == contents_of_state_dict(weights())
        assert source.catalog.info.step == (3 if path == "x.pt" else None)
        assert report.ok and report.unproved_bytes >= 2


@pytest.mark.usefixtures("without_crcs")
def test_an_error_says_that_ranks_can_not_be_compared_without_crcs(tmp_path):
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0, 1]}]}
    for rank in range(2):
        save(tmp_path, {"model": weights(), "optimizer": optimizer}, f"rank{rank}.pt")
    with pytest.raises(UnsupportedFormatError, match="set_crc32_options"):
        open_source(str(tmp_path))
