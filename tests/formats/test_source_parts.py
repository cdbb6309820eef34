"""Rules of the readers: the prefix of a module, the owner of an index, the position of a flat element."""

import json
from typing import Any

import pytest

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Role
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError, UsageError
from ckptkit.formats.detect import open_source
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.tensors import ShardedTensorRecord, ShardRecord, Storage, StoredTensor
from ckptkit.formats.trainers import fsdp1_local
from ckptkit.formats.trainers.fsdp1_local import parse_layout
from ckptkit.formats.trainers.lightning import module_prefix
from ckptkit.formats.trainers.param_order import Param, assign
from ckptkit.storage import open_store
from tests.formats.damages import Refusal, assert_refused, each, lay, without, written
from tests.formats.readback import contents, contents_of_file

# --- the attribute of a LightningModule


@pytest.mark.parametrize(("names", "prefix"), [
    (["model.model.layers.0.w", "model.lm_head.weight"], "model."),
    (["actor.net.model.norm.weight", "actor.net.lm_head.weight"], "actor.net."),
    (["model.model.layers.0.w", "model.model.norm.weight"], "model."),
    (["model.base_model.model.layers.0.w", "model.base_model.model.norm.weight"], "model."),
    (["net.0.weight", "net.0.bias"], "net."), (["encoder.weight", "decoder.weight"], ""), (["weight", "bias"], ""),
    ([], ""),
])  # fmt: skip
def test_a_module_prefix_is_the_common_prefix_of_all_names(names, prefix):
    assert module_prefix(names) == prefix


def test_a_prefix_given_by_the_user_is_not_detected_again(zoo):
    url = str(zoo / "lightning_real_mp_w2" / "last.ckpt")
    model = open_source(url, options=ReadOptions(strip_prefix="model.")).catalog.by_role(Role.MODEL)
    assert "model.lm_head.weight" in model
    assert "lm_head.weight" in open_source(url).catalog.by_role(Role.MODEL)


# --- numbered parameters of optimizers

PARAMS = [Param("a.weight", (4, 2)), Param("a.bias", (4,)), Param("b.weight", (4, 2)), Param("b.bias", (4,))]


NORMS = [Param("a.norm.weight", (4,)), Param("a.scale", (4,)), Param("a.bias", (4,))]
ALIKE = [Param("a.weight", (4,)), Param("a.bias", (4,)), Param("b.weight", (4,)), Param("b.bias", (6,))]
LORA = [Param(f"{at}.{name}", (4, 4)) for at in "ab" for name in ("base", "lora_A.weight")]
ALL, IN_ORDER = [(4, 2), (4,), (4, 2), (4,)], [[param.fqn for param in PARAMS]]
OF_B = {"fits": lambda group, index, fqn: fqn.startswith("b.")}
ASSIGNED: dict[str, tuple[list[Param], list[Any], dict[str, Any], list[list[str]] | None]] = {
    "module order": (PARAMS, [ALL], {}, IN_ORDER),
    "shapes tell groups apart": (
        PARAMS, [[(4, 2), (4, 2)], [(4,), (4,)]], {}, [["a.weight", "b.weight"], ["a.bias", "b.bias"]]),
    "groups of equal shapes": (NORMS, [[(4,)], [(4,), (4,)]], {}, None),
    "weight decay tells groups apart": (
        NORMS, [[(4,)], [(4,), (4,)]], {"no_decay": [False, True]}, [["a.scale"], ["a.norm.weight", "a.bias"]]),
    "a frozen parameter": ([Param("vision.w", (9, 9)), *PARAMS], [ALL], {}, IN_ORDER),
    "several possible assignments": (PARAMS, [[(4, 2), (4,)]], {}, None),
    "values decide": (PARAMS, [[(4, 2), (4,)]], OF_B, [["b.weight", "b.bias"]]),
    "only adapters are trained": (LORA, [[(4, 4), (4, 4)]], {}, [["a.lora_A.weight", "b.lora_A.weight"]]),
    "other shapes": (PARAMS, [[(4, 2), (4,), (4, 3), (4,)]], {}, None),
    "equal weight decay tells no groups apart": (
        ALIKE, [[(4,), (4,)], [(4,), (6,)]], {"no_decay": [False, False]}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", ASSIGNED)
def test_numbered_parameters_get_the_only_names_that_shapes_and_order_allow(case):
    params, groups, options, names = ASSIGNED[case]
    assert assign(params, groups, **options) == names


def test_names_are_assigned_in_linear_time():
    """In quadratic time, this test takes longer than its timeout."""
    params = [Param(f"layer{i}", (2 + i % 3,)) for i in range(60_000)]
    assert assign(params, [[param.shape for param in params]]) == [[param.fqn for param in params]]


# --- layouts of flat parameters


@pytest.fixture
def local(zoo):
    return zoo / "fsdp1_local_state_dict_nomesh_w2"


@pytest.fixture
def with_layout(tmp_path):
    """Return a function that returns the options for a layout."""

    def options(layout: Any) -> ReadOptions:
        (tmp_path / "layout.json").write_text(layout if isinstance(layout, str) else json.dumps(layout))
        return ReadOptions(layout=str(tmp_path / "layout.json"))

    return options


def _layout(local) -> dict:
    return json.loads((local / "flat_param_layout_NOT_ON_DISK_NORMALLY.json").read_text())


def test_shapes_in_module_order_replace_a_layout(local, with_layout):
    shapes = {}
    for unit, body in _layout(local).items():
        prefix = unit.removesuffix("_flat_param")
        shapes.update({prefix + fqn: shape for fqn, shape in zip(body["fqns"], body["shapes"], strict=True)})
    source = open_source(str(local), options=with_layout(shapes))
    expected = contents_of_file(local / "EXPECTED.safetensors")
    assert contents(source.store, source.catalog.by_role(Role.MODEL)) == expected


UNITS: list[dict[str, Any]] = [
    {"shapes": []}, {"shapes": [[1000000000, "abcdefgh"]]},  # a string multiplied by a billion
    {"shapes": ["ab"]}, {"fqns": [1], "shapes": [[1]]}, {"shapes": [[1]], "numels": ["a"], "pad_mask": [False]},
    {"shapes": [[1]], "numels": [-1, 1], "pad_mask": [True, False]}, {"shapes": [[1.5]]},
]  # fmt: skip


@pytest.mark.parametrize("content", [
    "[]", "{", '{"x": 1}', '{"a": [9223372036854775808]}',
    *(json.dumps({"_flat_param": {"fqns": ["a"], **unit}}) for unit in UNITS),
])  # fmt: skip
def test_an_invalid_layout_is_a_usage_error(local, with_layout, content):
    with pytest.raises(UsageError, match=r"layout\.json"):
        open_source(str(local), options=with_layout(content))


def test_padding_between_parameters_is_skipped():
    body = {"fqns": ["a", "b"], "shapes": [[5, 6], [5]], "numels": [30, 2, 5], "pad_mask": [False, True, False]}
    layout = parse_layout({"block._flat_param": body}, "layout")
    assert layout["block._flat_param"] == [("block.a", (5, 6), 0), ("block.b", (5,), 32)]


def test_padding_may_be_as_large_as_the_number_of_ranks_and_a_layout_of_another_model_is_refused(tmp_path, with_layout):
    piece = StoredTensor(Storage("rank", "0", 4, "float32"), "float32", (1,), (1,))
    records = [ShardedTensorRecord((ShardRecord(piece, Box((rank,), (1,))),), (100,), ()) for rank in range(100)]
    ranks = [{"_flat_param": record} for record in records]
    store, options = open_store(str(tmp_path)), with_layout({"_flat_param": {"fqns": ["w"], "shapes": [[10, 3]]}})
    assert fsdp1_local.read(store, ["rank"], ranks, {}, None, options).tensors["w"].shape == (10, 3)
    for parts, shape in ((ranks[:20], [10, 3]), (ranks, [10, 11])):
        options = with_layout({"_flat_param": {"fqns": ["w"], "shapes": [shape]}})
        with pytest.raises(CorruptCheckpointError, match="belongs to another model"):
            fsdp1_local.read(store, ["rank"], parts, {}, None, options)


# --- systems with several directories


def test_nemo_automodel_and_oumi_directories_are_read(tmp_path, zoo):
    info = open_source(str(lay(tmp_path / "name--step=10", {"hf_weights": zoo / "hf_ref_llama_untied"}))).catalog.info
    assert (info.format, info.step) == ("nemo", 10)
    assert "hf_weights/config.json" in info.side_files
    auto = lay(tmp_path / "epoch_0_step_5", {
        "model": zoo / "hf_dcp_sharded_w2" / "ckpt",
        "optim": zoo / "lightrft_naive_optim_w2" / "global_step6" / "optim_states",
        "model/.hf_metadata/config.json": '{"tie_word_embeddings": true}',
    })  # fmt: skip
    catalog = open_source(str(auto)).catalog
    assert catalog.info.format == "automodel"
    assert catalog.info.extra["config"] == {"tie_word_embeddings": True}
    assert "optimizer.state.gain.exp_avg" in catalog.tensors
    assert catalog.tensors["embed.weight"].slices[0].path.startswith("model/shard-")
    dcps = zoo / "accelerate_fsdp2_sharded_llama_tied_w2" / "checkpoint"
    parts = {"model": dcps / "pytorch_model_fsdp_0", "optimizer": dcps / "optimizer_0"}
    oumi, same = open_source(str(lay(tmp_path / "oumi", parts))), open_source(str(dcps))
    assert oumi.catalog.info.format == "oumi"
    for role in (Role.MODEL, Role.OPTIMIZER):
        assert (
            contents(oumi.store, oumi.catalog.by_role(role)) == contents(same.store, same.catalog.by_role(role)) != {}
        )


REFUSED: list[Refusal] = [
    ("a file of a part is missing", "accelerate_fsdp2_sharded_llama_tied_w2/checkpoint",
     without("optimizer_0/__1_0.distcp"), IncompleteCheckpointError, r"optimizer_0/: __1_0\.distcp"),
    ("files of two saves", "accelerate_fsdp2_sharded_llama_tied_w2/checkpoint", written("pytorch_model_fsdp.bin", b""),
     CorruptCheckpointError, r"pytorch_model_fsdp(_0|\.bin) and pytorch_model_fsdp(_0|\.bin) are files of two saves"),
    ("a rank of local state is missing", "fsdp1_local_state_dict_nomesh_w2",
     without("pytorch_model_fsdp_rank1.bin"), IncompleteCheckpointError, r"pytorch_model_fsdp_rank1\.bin"),
    ("another backend of Megatron", "megatron_torch_dist_emulated",
     written("iter_0000010/metadata.json", '{"sharded_backend": "zarr"}'), UnsupportedFormatError, "zarr"),
]  # fmt: skip


@each(REFUSED)
def test_the_error_for_a_part_names_its_file_or_fault(tmp_path, zoo, refusal):
    assert_refused(zoo, refusal, tmp_path)
