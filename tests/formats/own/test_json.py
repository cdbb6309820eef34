"""Untrusted JSON: size-limited before it is parsed, and unambiguous."""

import pytest

from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from ckptkit.formats.own.json import parse


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[NaN]", "[1e999]", "[" * 5000, "9" * 5000, "", "{", "\xff"])
def test_ambiguous_json_is_refused(text):
    with pytest.raises(CorruptCheckpointError, match="f is not JSON"):
        parse(text, file="f")


def test_megabytes_of_empty_values_are_refused_before_they_are_parsed_and_a_large_file_is_read():
    for unit in ("[],", "{},", "0,"):
        with pytest.raises(CorruptCheckpointError, match="It was not parsed"):
            parse("[" + unit * (12_000_000 // len(unit)) + "0]", file="f")
    text = "[" + ",".join(['{"name": "model.layers.0.weight", "shape": [4, 4]}'] * 60_000) + "]"
    assert len(parse(text, file="f")) == 60_000


def test_long_names_are_shortened_in_messages():
    assert len(str(CorruptCheckpointError("x" * 10**6))) <= 1000
    assert len(str(CheckpointNotFoundError("a\n" + "x" * 10**6))) <= 1002
    assert StorageError(5, "x" * 5000).errno == 5
    assert len(str(CorruptCheckpointError("\n".join(["y" * 900] * 30)))) == 30 * 901 - 1
