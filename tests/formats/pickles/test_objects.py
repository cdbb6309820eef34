"""read_object returns plain Python values, runs no code, and refuses unknown classes by name."""

import argparse
import collections
import datetime
import io
import pathlib
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from ckptkit.catalog.entry import ObjectEntry
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.objects import Inert, TensorValue, read_object
from ckptkit.storage.local import LocalStore


def entry_of(folder: Path, value: object, *, protocol: int = 2) -> tuple[LocalStore, ObjectEntry]:
    torch.save(value, folder / "o.pt", pickle_protocol=protocol)
    return LocalStore(folder), ObjectEntry("o", "o.pt", 0, (folder / "o.pt").stat().st_size)


PLAIN = {
    "rng": ("MT19937", np.arange(624, dtype=np.uint32), 3, 0, 0.0),
    "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6), "for": datetime.timedelta(days=2, seconds=3),
    "where": pathlib.PurePosixPath("/a/b"), "args": argparse.Namespace(lr=0.1, names=["x"]),
    "ordered": collections.OrderedDict(a=1), "counts": collections.Counter("aab"),
    "last": collections.deque([1, 2], 5), "set": {1, 2}, "frozen": frozenset("ab"), "scalar": np.float64(2.5),
    "complex": 1 + 2j, "slice": slice(1, None, 2), "bytes": b"\x00\xff", "range_": [True, None, -(1 << 40)],
    "version": TorchVersion("2.13.0+cpu"),  # the type of torch.__version__
}  # fmt: skip
# What is read as something else.
READ_AS = {"where": "/a/b", "args": {"lr": 0.1, "names": ["x"]}, "last": [1, 2]}


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_the_values_of_training_states_are_read_correctly(tmp_path, protocol):
    found = read_object(*entry_of(tmp_path, PLAIN, protocol=protocol))
    name, words, *_ = found.pop("rng")
    assert name == "MT19937" and (words == PLAIN["rng"][1]).all()
    assert found | {"rng": PLAIN["rng"]} == PLAIN | READ_AS and type(found["version"]) is str


def test_tensors_become_arrays_and_dtypes_numpy_lacks_keep_their_bytes(tmp_path):
    t = torch.arange(6.0).reshape(2, 3)
    found = read_object(*entry_of(tmp_path, {"t": t.t(), "b": t.bfloat16(), "empty": torch.empty(0, 3)}))
    assert found["t"].tolist() == t.t().tolist()
    assert found["b"] == TensorValue("bfloat16", (2, 3), t.bfloat16().view(torch.int16).numpy().tobytes())
    assert found["empty"].shape == (0, 3)


def test_a_buffer_in_memory_is_read_as_its_bytes(tmp_path):
    assert read_object(*entry_of(tmp_path, {"extra": io.BytesIO(b"\x00\xff")})) == {"extra": b"\x00\xff"}


class Foreign:
    def __init__(self) -> None:
        self.x = [1]


def test_a_foreign_class_is_an_inert_record_on_request(tmp_path):
    found = read_object(*entry_of(tmp_path, Foreign()), allow_pickle=True)
    assert found == Inert("tests.formats.pickles.test_objects.Foreign", (), {"x": [1]}, [], known=False)


def test_a_value_that_contains_itself_or_expands_exponentially_is_refused(tmp_path):
    loop: list[object] = []
    loop.append(loop)
    laugh: list[object] = ["ha"]
    for _ in range(60):
        laugh = [laugh, laugh]
    with pytest.raises(CorruptCheckpointError, match="contains itself"):
        read_object(*entry_of(tmp_path, loop))
    with pytest.raises(UnsupportedFormatError, match="unfolds"):
        read_object(*entry_of(tmp_path, laugh))


def test_a_too_large_object_is_not_reported_as_damaged(tmp_path):
    store, entry = entry_of(tmp_path, 1)
    with pytest.raises(UnsupportedFormatError, match="at most 4 GiB are read"):
        read_object(store, replace(entry, nbytes=5 << 30))


def test_a_plain_pickle_is_read_too(tmp_path):
    store, entry = LocalStore(tmp_path), ObjectEntry("s", "s.pkl")
    store.write("s.pkl", pickle.dumps({"a": (1, 2)}))
    assert read_object(store, entry) == {"a": (1, 2)}
    store.write("s.pkl", pickle.dumps({"a": (1, 2)}, 0), overwrite=True)
    with pytest.raises(CorruptCheckpointError, match="pickle of protocol 2 or newer"):
        read_object(store, entry)


def test_inert_records_do_not_share_fields(tmp_path):
    """Containers that a conversion creates and drops may share an address with a later one."""
    values = [argparse.Namespace(a=i, b=str(i)) for i in range(500)]
    found = read_object(*entry_of(tmp_path, values))
    assert found == [vars(value) for value in values]
