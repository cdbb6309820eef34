"""Key maps: every operation equals numpy, uses each element once, and can be inverted."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.keymaps.keymap import NameMap, check_one_to_one
from ckptkit.keymaps.patterns import NamePattern
from ckptkit.keymaps.rules import Cast, Concat, Drop, Rename, RopePermute, Rule, Split, Stack, Transpose, Unstack
from ckptkit.keymaps.wrappers import strip_infixes, strip_prefix
from tests.catalog.materialize import materialize, whole_target

pattern = NamePattern
W = pattern("w")


def arrays(**shapes: tuple[int, ...]) -> dict[str, Any]:
    start, made = 0, {}
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        made[name] = np.arange(start, start + n, dtype=np.int64).reshape(shape)
        start += n
    return made


def wholes(sources: dict[str, Any]) -> dict[str, Target]:
    return {name: whole_target(name, array.shape) for name, array in sources.items()}


def apply(rules: list[Rule], sources: dict[str, Any], *, config: Any = None, **options: Any) -> dict[str, Any]:
    mapped = NameMap("test", tuple(rules), **options).apply(wholes(sources), config=config)
    assert all(name == made.name for name, made in mapped.targets.items())
    return {name: materialize(made, sources) for name, made in mapped.targets.items()}


@pytest.mark.parametrize(("rule", "names", "renamed"), [
    (Rename(pattern("layers.{i:d}.wq.{what}"), "model.{i}.q.{what}"), ["layers.3.wq.weight", "norm.weight"],
     ["model.3.q.weight", "norm.weight"]),
    (Rename(NamePattern(regex=r"layers\.(\d+)\.(?P<rest>.*)"), "h.{1}.{rest}"), ["layers.3.a.b"], ["h.3.a.b"]),
    (Rename(pattern("norm"), "x"), ["norm.weight"], ["norm.weight"]),  # only a part
])  # fmt: skip
def test_rename_uses_what_matched_if_the_whole_name_matches(rule, names, renamed):
    assert sorted(apply([rule], {name: np.ones((2, 2)) for name in names})) == renamed


def test_split_sizes_may_be_products_of_config_keys():
    sources = arrays(qkv=(16, 3))
    rule = Split(pattern("qkv"), ("q", "k", "v"), sizes=("num_attention_heads*head_dim", "4", 4))
    made = apply([rule], sources, config={"num_attention_heads": 4, "head_dim": 2})
    assert np.array_equal(made["k"], sources["qkv"][8:12])


def test_stack_orders_by_number_not_by_text():
    sources = {f"e.{i}.w": np.full((2,), i) for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}
    made = apply([Stack(pattern("e.{i:d}.w"), "e.w")], sources)
    assert made["e.w"][:, 0].tolist() == list(range(11))


def llama_permute(w: Any, heads: int) -> Any:
    """The formula of transformers' llama conversion script."""
    rest = w.shape[1:]
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *rest).swapaxes(1, 2).reshape(w.shape)


@pytest.mark.parametrize(("rule", "dtypes", "text"), [
    (Split(W, ("a", "b")), {"w": "float32"}, r"'w' of shape \[7, 4\] can't be split"),
    (Concat((pattern("{n:d}.gate"), pattern("{n:d}.up")), "{n}.both"),
     dict.fromkeys(("0.gate", "0.up", "1.gate"), "float32"), r"'1\.both' lacks \{n:d\}\.up; found only 1\.gate"),
    (Concat((pattern("a"), pattern("b")), "c"), {"a": "float32", "b": "bfloat16"},
     "'a' is float32, but 'b' is bfloat16"),
    (Stack(pattern("e.{i:d}"), "e"), dict.fromkeys(("e.0", "e.2"), "float32"),
     r"'e': no tensor matches e\.{i:d} with i = \[1\]"),
    (RopePermute(W, 3), {"w": "float32"}, "cannot be divided into 3 heads, each with an even"),
    *((Cast(W, "bf16"), {"w": dtype}, f"'w' is {dtype}, which can't be cast")
      for dtype in ("int64", "bool", "float8_e4m3fn")),
    *((rule, dict.fromkeys(("l.0", "l.00", "n"), "float32"), r"'s': 'l\.0' and 'l\.00' would both be piece 0")
      for rule in (Stack(pattern("l.{i}"), "s"), Concat((pattern("l.{i}"), pattern("n")), "s"))),
    (Rename(pattern("{side}.{i:d}"), "x.{i}"), dict.fromkeys(("l.0", "l.1", "r.0", "r.1"), "float32"),
     r"(?s)two tensors would be called 'x\.0': 'l\.0' and 'r\.0'.*'x\.1'"),  # all are listed
])  # fmt: skip
def test_a_rule_that_does_not_fit_is_refused_by_name(rule, dtypes, text):
    with pytest.raises(CheckpointMismatchError, match=text):
        NameMap("test", (rule,)).apply({name: whole_target(name, (7, 4), dtype) for name, dtype in dtypes.items()})


def test_a_missing_config_key_says_how_to_give_it():
    said = r"there is no config\.json\. Give --base\. .*may also be a number\..*the live model's `config`"
    with pytest.raises(UsageError, match=said):
        apply([RopePermute(pattern("q"), "num_attention_heads")], arrays(q=(8, 2)))


def test_all_tensors_that_no_rule_matches_are_listed_but_not_those_mapped_to_their_own_name():
    rules: list[Rule] = [Rename(pattern("a"), "b"), Transpose(pattern("t"))]
    with pytest.raises(CheckpointMismatchError) as caught:
        apply(rules, arrays(a=(1,), t=(1, 2), x=(2,), y=(3,)), rest="refuse")
    assert re.findall(r"no rule matches '(\w)'", str(caught.value)) == ["x", "y"]


def test_elements_that_are_lost_or_used_twice_are_caught_by_the_final_check():
    whole = whole_target("w", (4, 2))
    twice = Target("w", "float32", (8, 2), whole.parts, "float32")
    for target, text in (
        (whole.split(0, [2, 2])[0], "source 'w': 4 of 8 elements are used"), (twice, "target 'w': 8 of 16 elements"),
    ):  # fmt: skip
        with pytest.raises(CheckpointMismatchError, match=text):
            check_one_to_one({"w": whole}, {"w": target})
    rules = (Split(W, ("p", "q")), Drop(pattern("p")), Concat((pattern("q"), pattern("q")), "c"))
    with pytest.raises(CheckpointMismatchError, match="source 'w': 12 of 8 elements are used"):
        NameMap("test", rules).apply({"w": whole})


@pytest.mark.parametrize("rule", [
    Rename(pattern("{a}.x"), "{b}.x"), Unstack(W, "w"), Stack(pattern("w.{i:d}"), "w.{i}"),
    Concat((pattern("{n}.a"), pattern("b")), "{n}.c"), "a.{", "a.{i:x}", "a}b", "{1}",
])  # fmt: skip
def test_templates_that_are_malformed_or_have_unbound_placeholders_are_refused_at_construction(rule):
    with pytest.raises(UsageError, match=None if isinstance(rule, str) else r"key map 'test', rule 1"):
        NamePattern(rule) if isinstance(rule, str) else NameMap("test", (rule,))


# --- inverse maps


@pytest.mark.parametrize("rule", [
    Drop(W), Cast(W, "bf16"), Rename(NamePattern(regex="w.*"), "x"), Concat((pattern("a"), pattern("b")), "c"),
    Rename(pattern("a.{x}"), "b"),
])  # fmt: skip
def test_a_lossy_rule_has_no_inverse(rule):
    with pytest.raises(UsageError, match="can't be inverted: rule 1"):
        NameMap("test", (rule,)).inverse()


class _Numpy:
    """The same operations, on whole arrays, by numpy."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.rules: list[Rule] = []

    def step(self, draw: Any) -> None:
        kind = draw(st.sampled_from(["transpose", "rope", "cut", "unstack_stack"]))
        dim = draw(st.integers(0, self.array.ndim - 1))
        if kind == "transpose":
            dims = tuple(draw(st.permutations(range(self.array.ndim))))
            self.rules.append(Transpose(W, dims))
            self.array = self.array.transpose(dims)
        elif kind == "rope":
            rows = self.array.shape[0]
            heads = [h for h in range(1, rows + 1) if rows % (2 * h) == 0]
            if heads:
                n = draw(st.sampled_from(heads))
                self.rules.append(RopePermute(W, n))
                self.array = llama_permute(self.array, n)
        elif kind == "cut":  # split in two and joined in the other order
            at = draw(st.integers(0, self.array.shape[dim]))
            self.rules.append(Split(W, ("l", "r"), dim, (at, self.array.shape[dim] - at)))
            self.rules.append(Concat((pattern("r"), pattern("l")), "w", dim, (self.array.shape[dim] - at, at)))
            left, right = np.split(self.array, [at], axis=dim)
            self.array = np.concatenate([right, left], axis=dim)
        elif self.array.shape[dim] > 0 and self.array.ndim < 4:
            onto = draw(st.integers(0, self.array.ndim - 1))
            self.rules += [Unstack(W, "w.{i}", dim), Stack(pattern("w.{i:d}"), "w", onto)]
            self.array = np.moveaxis(self.array, dim, onto)


@given(data=st.data())
def test_any_chain_of_operations_equals_numpy_and_its_inverse_gives_the_source_back(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    source = np.arange(int(np.prod(shape))).reshape(shape)
    model = _Numpy(source)
    for _ in range(data.draw(st.integers(1, 5))):
        model.step(data.draw)
    if model.rules:
        key_map = NameMap("test", tuple(model.rules))
        there = key_map.apply(wholes({"w": source})).targets
        assert np.array_equal(materialize(there["w"], {"w": source}), model.array)
        (back,) = key_map.inverse().apply(there).targets.values()
        assert np.array_equal(materialize(back, {"w": source}), source)


# --- wrappers and prefixes

WRAPPED = "_orig_mod.model.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.mlp._orig_mod.w"


@pytest.mark.parametrize("names", [
    {WRAPPED: "model.layers.0.mlp.w"},
    {"my_orig_mod.w": "my_orig_mod.w"},  # inside a longer word
    {"module.a": "a", "module.module.b": "module.b"},
    {"_forward_module.a": "a", "_forward_module.module.b": "module.b"},  # Lightning's
    {"module.a": "module.a", "head.b": "head.b"},  # not the prefix of every name
])  # fmt: skip
def test_wrapper_infixes_and_a_common_module_prefix_are_removed(names):
    assert strip_infixes(list(names)) == names


def test_infixes_that_make_names_collide_and_a_prefix_that_no_name_has_are_refused():
    with pytest.raises(CheckpointMismatchError, match=r"'a' from '_orig_mod\.a' and 'a'"):
        strip_infixes(["_orig_mod.a", "a"])
    with pytest.raises(UsageError, match=r"starts with 'actor\.'; the names are like 'net\.a'"):
        strip_prefix(["net.a"], "actor.")
