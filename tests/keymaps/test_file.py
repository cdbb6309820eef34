"""Key-map files: their syntax, and errors that name the rule and the key."""

import json
import sys

import numpy as np
import pytest

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.keymaps.file import parse_key_map
from ckptkit.keymaps.keymap import NameMap
from ckptkit.keymaps.patterns import NamePattern
from ckptkit.keymaps.rules import Split, Unstack
from tests.catalog.materialize import materialize
from tests.keymaps.test_builtin import targets_of

toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")

TOML = """
[[rules]]
op = "unstack"
from = "{p:*}.experts"
to = "{p}.{i}.experts"

[[rules]]
op = "split"
from = "{p:*}.{i:d}.experts"
to = ["{p}.{i}.gate", "{p}.{i}.up"]
"""


@toml
def test_rules_in_toml_are_those_of_python():
    both = NamePattern("{p:*}.{i:d}.experts")
    rules = Unstack(NamePattern("{p:*}.experts"), "{p}.{i}.experts"), Split(both, ("{p}.{i}.gate", "{p}.{i}.up"))
    assert parse_key_map(TOML, file="mine.toml").rules == rules


def test_every_operation_can_be_written_in_json():
    rules = [
        {"op": "drop", "match": r".*inv_freq", "why": "recomputed"},
        {"op": "concat", "from": ["{x}.a", "{x}.b"], "to": "{x}.ab", "sizes": [2, "half"]},
        {"op": "rope_permute", "from": "{x}.ab", "heads": "heads"},
        {"op": "transpose", "from": "{x}.ab", "dims": [1, 0]},
        {"op": "cast", "from": "{x}.ab", "dtype": "bf16"},
        {"op": "split", "from": "{x}.ab", "dim": 1, "to": ["{x}.l", "{x}.r"], "sizes": ["half", 2]},
        {"op": "unstack", "from": "{x}.l", "to": "{x}.l.{k}", "dim": 1, "index": "k"},
        {"op": "stack", "from": "{x}.l.{k:d}", "to": "{x}.l", "dim": 1, "index": "k"},
        {"op": "rename", "from": "{x}.r", "to": "right.{x}"},
    ]
    key_map = parse_key_map(json.dumps({"rules": rules, "rest": "refuse"}), file="m.json")
    sources = {"t.a": np.arange(6).reshape(2, 3), "t.b": np.arange(6, 12).reshape(2, 3), "x.inv_freq": np.ones(1)}
    mapped = key_map.apply(targets_of(sources), config={"heads": 2, "half": 2})
    whole = np.concatenate([sources["t.a"], sources["t.b"]]).T  # heads of two rows keep their order
    assert {n: t.dtype for n, t in mapped.targets.items()} == {"t.l": "bfloat16", "right.t": "bfloat16"}
    assert np.array_equal(materialize(mapped.targets["t.l"], sources), whole[:, :2])
    assert np.array_equal(materialize(mapped.targets["right.t"], sources), whole[:, 2:])
    assert dict(mapped.dropped) == {"x.inv_freq": "recomputed"}


def parse(*rules: object, **more: object) -> NameMap:
    return parse_key_map(json.dumps({"rules": rules, **more}), file="m.json")


@toml
def test_sizes_of_null_mean_equal_parts_in_a_split_and_its_inverse():
    rule = {"op": "split", "from": "qkv", "to": ["q", "k"]}
    null, equal = (parse({**rule, "sizes": sizes}, name="m") for sizes in (None, "equal"))
    assert null == equal and null.inverse() == equal.inverse()


@pytest.mark.parametrize(("rule", "said"), [
    ({"op": "rename", "from": "a"}, "'to' must be text, not missing"),
    ({"op": "rename", "to": "a"}, "give either 'from' (a template) or 'match' (a regex)"),
    ({"op": "rename", "from": "a", "match": "a", "to": "b"}, "give either 'from'"),
    ({"op": "rename", "from": "a", "to": "b", "dim": 0}, "unknown key 'dim'"),
    ({"op": "rename", "from": "a.{", "to": "b"}, "has a brace"),
    ({"op": "rename", "from": "a", "to": "{x}"}, "uses {x}, which a does not bind"),
    ({"op": "split", "from": "a", "to": ["b"]}, "'to' must be a list of two names"),
    ({"op": "split", "from": "a", "to": ["b", "c"], "sizes": [1]}, "expected 2 'sizes', one per name"),
    ({"op": "split", "from": "a", "to": ["b", "c"], "dim": "0"}, "'dim' must be an integer, not str '0'"),
    ({"op": "concat", "match": "a", "to": "b"}, "unknown key 'match'"),
    ({"op": "transpose", "from": "a", "dims": [1.5]}, "'dims' must be a list of integers"),
    ({"op": "rope_permute", "from": "a"}, "'heads' must be a number or a key"),
    ({"op": "rope_permute", "from": "a", "heads": 2, "to": "half"}, "'to' must be 'halves' (transformers)"),
    ({"op": "unstack", "from": "a", "to": "b"}, "must contain {i}"),
    ({"op": "cast", "from": "a", "dtype": "int8"}, "'dtype' must be a float dtype such as"),
    ({"op": "cast", "from": "a", "dtype": "b16"}, "'dtype' must be a float dtype such as"),
    ({"op": "run"}, "op = 'run' is not one of"),
    ("rename", "a rule is a table, not str"),
])  # fmt: skip
def test_each_error_in_a_file_names_the_rule_and_the_key(rule, said):
    with pytest.raises(UsageError) as caught:
        parse({"op": "drop", "from": "z"}, rule)
    assert all(part in str(caught.value) for part in ("m.json", "rule 2", said))


@pytest.mark.parametrize("op", [[], {}, None, 1, "x" * 10**6], ids=lambda op: type(op).__name__)
def test_the_error_for_an_invalid_operation_is_short(op):
    with pytest.raises(UsageError, match="rule 1") as caught:
        parse({"op": op, "from": "a"})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("index", ["²", "٣", "9" * 5000, "-1"])
def test_an_index_that_is_not_a_plain_number_does_not_match(index):
    key_map = parse({"op": "stack", "match": "a\\.(?P<i>.*)", "to": "a", "index": "i"})
    assert list(key_map.apply(targets_of({f"a.{index}": np.zeros(2)})).targets) == [f"a.{index}"]


@toml
@pytest.mark.parametrize(("text", "said"), [
    (TOML.replace('op = "split"', 'op = "slice"'), ", rule 2, line 7: op = 'slice' is not one of rename, drop"),
    ("rules = =", " is not valid TOML: .*line 1"),
    *((text, "") for text in ("a = " + "[" * 5000, "a = " + "9" * 5000, "a" + ".a" * 5000 + " = 1", "a = {" * 3000)),
], ids=["rule", "broken", "deep", "digits", "dotted", "tables"])  # fmt: skip
def test_toml_that_is_wrong_or_would_exhaust_its_parser_is_refused_with_the_line(text, said):
    with pytest.raises(UsageError, match=rf"m\.toml{said}"):
        parse_key_map(text, file="m.toml")


@pytest.mark.parametrize("text", [
    "[]", "{}", '{"rules": []}', '{"rules": {}}', '{"rules": [], "extra": 1}', "{", "[" * 9999,
    '{"rules": [{"op": "drop", "from": "a"}], "rest": "maybe"}',
])  # fmt: skip
def test_a_file_without_a_key_map_is_refused(text):
    with pytest.raises(CkptkitError, match=r"m\.json.*rest = 'maybe'" if "rest" in text else r"m\.json"):
        parse_key_map(text, file="m.json")


@pytest.mark.parametrize(("rules", "name", "shape", "said"), [
    ([{"op": "rename", "from": "{x:*}", "to": "{x}{x}"}] * 40, "ab", (2,), "65536 are allowed"),
    ([{"op": "unstack", "from": "a", "to": "a.{i}"}], "a", (2**40, 0), "65536 are allowed"),
    *(([{"op": "split", "from": "a", "to": ["b", "c"], "sizes": sizes}], "a", (4,), None)
      for sizes in ([-1, 5], ["²", 4], [0, "9" * 4999])),
])  # fmt: skip
def test_rules_with_exponential_or_impossible_results_are_refused(rules, name, shape, said):
    with pytest.raises(CkptkitError, match=said):
        parse(*rules).apply(targets_of({name: np.empty(shape)}))
