"""Training state as strict JSON and tensors, and back."""

import base64
import collections
import enum
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.checkpoint.state.values import decode, encode, references
from ckptkit.errors import CorruptCheckpointError, SaveError


def through(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "extra.x", tensors), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


@pytest.mark.parametrize("value", [
    None, True, -(2**80), 1e-300, math.inf, "ü$", b"\x00\xff", (1, [2, (3,)], {"a": ()}), {1, 2, 3}, frozenset({"a"}),
    {1: "int", "1": "str", (2, 3): None}, {"$ref": "not a tag"}, {"$a": 1, "b": 2},
    collections.OrderedDict([("b", 1), ("a", 2)]), collections.defaultdict(list, {"a": [1], 2: []}),
    collections.defaultdict(None), collections.Counter("aab"), torch.float32, torch.device("cpu"), torch.Size([2, 3]),
    [torch.Tensor],
])  # fmt: skip
def test_plain_values_round_trip_with_their_types(value):
    back = through(value)
    assert back == value
    assert type(back) is type(value)


HUGE = 2**14283  # JSON readers refuse it


def test_nan_and_the_largest_integer_survive_strict_json():
    assert math.isnan(through(math.nan))
    assert through(HUGE - 1) == HUGE - 1


SEEN = torch.tensor([1 + 2j, 3 - 4j]).conj()


@pytest.mark.parametrize("tensor", [
    *(torch.arange(6).reshape(2, 3).to(kind) for kind in (torch.float32, torch.bfloat16, torch.int64, torch.bool)),
    *(SEEN, SEEN.imag, torch.zeros(0, 3), torch.tensor(2.5)),
], ids=repr)  # fmt: skip
def test_small_tensors_are_stored_inside_the_json(tensor):
    tensors: dict[str, torch.Tensor] = {}
    back = decode(encode(tensor, "extra.x", tensors), tensors.__getitem__)
    assert tensors == {} and back.dtype == tensor.dtype and torch.equal(back, tensor)


@pytest.mark.parametrize("numel", [6, 600])
def test_tensors_keep_the_order_of_their_dimensions_in_memory(numel):
    for order in ((0, 2, 1), (2, 0, 1), (1, 2, 0)):
        seen = torch.arange(numel).reshape(1, 2, -1).expand(3, 2, -1).contiguous().permute(order)
        back = through(seen)
        assert torch.equal(back, seen) and back.stride() == seen.stride()
    assert through(torch.zeros(4, 4)[:, ::2]).is_contiguous()  # gaps are not kept


def test_large_tensors_are_referred_to_by_their_path():
    tensors: dict[str, torch.Tensor] = {}
    tree = encode({"a": [torch.zeros(1000)], "a.0": torch.ones(1000)}, "extra.x", tensors)
    assert list(tensors) == ["extra.x.a.0", "extra.x.a.0~1"]
    assert references(tree) == list(tensors)
    assert torch.equal(decode(tree, tensors.__getitem__)["a.0"], torch.ones(1000))


def test_numpy_values_round_trip_as_numpy():
    values = [np.arange(2000, dtype=np.int16).reshape(2, 1000), np.float32(0.1), np.zeros((0, 2))]
    for value, back in zip(values, through(values), strict=True):
        assert type(back) is type(value) and back.dtype == value.dtype and np.array_equal(back, value)


@pytest.mark.parametrize("size", [2, 40])
def test_sparse_and_quantized_tensors_round_trip(size):
    sparse = through(torch.eye(size).to_sparse())
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense(), torch.eye(size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates quantized tensors
        quantized = torch.quantize_per_tensor(torch.ones(size, size), 0.1, 0, torch.qint8)
        back = through(quantized)
    assert back.is_quantized
    assert torch.equal(back.int_repr(), quantized.int_repr())


def test_a_device_tensor_is_restored_on_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.serialization.location_tag", lambda _: "cuda:7")
    monkeypatch.setattr("torch.serialization._get_restore_location", lambda _: lambda storage, _location: storage)
    tree = encode(torch.eye(3).to_sparse(), "extra.x", {})
    assert b"cuda:7" in base64.b64decode(tree["$torch_save"])
    monkeypatch.undo()
    assert torch.equal(decode(tree, {}.__getitem__).to_dense(), torch.eye(3))


class Colour(enum.Enum):
    RED = 1


LOOP: list[Any] = []
LOOP.append(LOOP)
PATH, TOO_LONG = r"extra\.x\.deep\.1", r"extra\.x\.deep\S*: the integer has 14284 bits"


@pytest.mark.parametrize(("value", "said"), [
    (Colour.RED, PATH), (lambda: 0, PATH), (object(), PATH), (np.ma.array([1, 2], mask=[0, 1]), PATH),
    (np.zeros(2, np.longdouble), PATH), (np.longdouble(1), PATH), (LOOP, "contains itself"),
    (HUGE, TOO_LONG), ([1, HUGE], TOO_LONG), ({"a": (-HUGE,)}, TOO_LONG),
], ids=["enum", "function", "object", "masked array", "long doubles", "a long double", "a loop",
        "an integer that JSON readers refuse", "in a list", "in a tuple"])  # fmt: skip
def test_a_value_that_no_load_could_restore_is_refused_with_its_path(value, said):
    with pytest.raises(SaveError, match=said):
        encode({"deep": [0, value]}, "extra.x", {})


ORDERS = ([0], [0, 0], [1, 2], [1.0, 0.0], "10", None, [0, 1, 2])  # of two dimensions


@pytest.mark.parametrize("tree", [
    {"$eval": "1"},
    {"$bytes": 3},
    {"$tensor": {"dtype": "float32", "shape": [2], "data": ""}},
    {"$tensor": {"dtype": "load", "shape": [0], "data": ""}},
    {"$dict": [[1]]},
    {"$tuple": 3},
    *({"$order": [order, encode(torch.zeros(2, 3), "x", {})]} for order in ORDERS),
    {"$torch_save": "gASVIQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAZwd24gbWWUhZRSlC4="},
])  # fmt: skip
def test_a_malformed_tree_is_a_corrupt_checkpoint(tree):
    with pytest.raises(CorruptCheckpointError):
        decode(tree, {}.__getitem__)
