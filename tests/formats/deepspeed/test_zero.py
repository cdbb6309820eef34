"""DeepSpeed checkpoints, written by DeepSpeed 0.19.8 on the CPU, with its own in-memory values as the reference."""

import itertools
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.catalog.entry import Role
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsafePickleError, UnsupportedFormatError
from ckptkit.formats.deepspeed.experts import parts_of
from ckptkit.formats.detect import open_source
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.trainers.master_check import check_masters
from tests.formats.damages import Refusal, assert_refused, each, edited, lay, replaced, rezipped, without, written
from tests.formats.readback import contents, contents_of_file, tensor_bytes
from tests.hostile.sources import deepspeed_classes

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
EXPECTED = FIXTURES / "zero1_frozen_w2" / "EXPECTED.safetensors"
# round_robin: DeepSpeed's accessor returns the values of other parameters; the bf16 copies of the module are right.
EXACT = [path.name for path in sorted(FIXTURES.iterdir()) if "round_robin" not in path.name]


def _catalog(name: str):
    return open_source(str(FIXTURES / name / "ckpt")).catalog


@pytest.mark.parametrize("name", EXACT)
def test_weights_and_moments_equal_those_of_the_job(name):
    source = open_source(str(FIXTURES / name / "ckpt"))
    expected = contents_of_file(FIXTURES / name / "EXPECTED.safetensors")
    assert contents(source.store, source.catalog.by_role(Role.MODEL)) == expected
    if (moments := FIXTURES / name / "EXPECTED_exp_avg.safetensors").exists():
        entries = source.catalog.by_role(Role.OPTIMIZER).values()
        found = contents(source.store, {entry.fqn: entry for entry in entries if entry.state == "exp_avg"})
        assert found == contents_of_file(moments)


def test_round_robin_groups_follow_shapes_and_not_recorded_fragments():
    folder = FIXTURES / "zero2_round_robin_tied_w3"
    source = open_source(str(folder / "ckpt"))
    for name, weight in load_file(folder / "EXPECTED.safetensors").items():
        entry = source.catalog.by_role(Role.MODEL)[name]
        master = torch.frombuffer(bytearray(tensor_bytes(source.store, entry)), dtype=getattr(torch, entry.dtype))
        assert torch.equal(master.reshape(entry.shape).to(weight.dtype), weight), name


def test_frozen_parameters_have_no_master_and_each_subgroup_has_its_own_step_count():
    catalog = _catalog("zero3_subgroups_frozen_w2")
    assert catalog.by_role(Role.MODEL)["frozen.weight"].dtype == "bfloat16"
    assert "frozen.weight" not in catalog.by_role(Role.MASTER)
    entries = catalog.by_role(Role.OPTIMIZER).values()
    places = {entry.fqn: entry.slices[0].start for entry in entries if entry.state == "step"}
    assert places["l.0.weight"] == places["head.weight"]
    assert len({places["emb.weight"], places["l.0.weight"], places["l.0.bias"]}) == 3


@pytest.mark.parametrize("shapes", ["one dict per subgroup", "a single dict"])
def test_parameter_groups_name_the_parameters_of_all_their_subgroups(tmp_path, shapes):
    folder = _copy(tmp_path, "zero3_subgroups_frozen_w2")
    for file in folder.glob("*model_states.pt") if shapes == "a single dict" else ():  # as older versions write it
        value = torch.load(file, weights_only=True)
        value["param_shapes"] = {name: shape for group in value["param_shapes"] for name, shape in group.items()}
        torch.save(value, file)
    objects = open_source(str(folder)).catalog.objects
    assert objects["optimizer.param_groups.1.weight_decay"].value == 0.0
    assert [objects[f"optimizer.param_groups.{group}.params"].value for group in (0, 1)] == [
        ["emb.weight", "l.0.weight", "l.1.weight", "head.weight"], ["l.0.bias", "l.1.bias", "n.weight", "n.bias"],
    ]  # fmt: skip


def _rewritten(tmp_path: Path, change: Callable[[int, dict[str, Any]], None]) -> str:
    """Copy a checkpoint of two ranks, and call `change` with each rank and the content of its optimizer file."""
    folder = _copy(tmp_path, "zero1_frozen_w2")
    for rank, file in enumerate(sorted(folder.glob("*optim_states.pt"))):
        with deepspeed_classes():
            inner = torch.load(file, weights_only=False)["optimizer_state_dict"]
        change(rank, inner)
        kept = ("partition_count", "single_partition_of_fp32_groups", "base_optimizer_state")
        torch.save({"optimizer_state_dict": {key: inner[key] for key in kept}}, file)
    return str(folder)


def test_a_file_of_another_save_is_recognized_by_its_weights_if_the_optimizer_has_no_steps(tmp_path):
    def changed(rank, inner):
        for state in inner["base_optimizer_state"]["state"].values():
            del state["step"]
        for weights in inner["single_partition_of_fp32_groups"] if rank else ():
            weights.data.mul_(2)

    with pytest.raises(CorruptCheckpointError, match=r"rank_1_.* and mp_rank_00_.* are from different saves"):
        open_source(_rewritten(tmp_path, changed))


@pytest.mark.parametrize("fixture", ["zero1_frozen_w2", "zero3_subgroups_frozen_w2"])
@pytest.mark.parametrize("changed", [("weights",), ("global_steps",), ("weights", "global_steps")], ids="+".join)
def test_a_model_file_of_another_save_is_refused_or_noted(tmp_path, fixture, changed):
    folder = _copy(tmp_path, fixture)
    for file in folder.glob("*mp_rank_00_model_states.pt"):
        with deepspeed_classes():
            value = torch.load(file, weights_only=False)
            for weight in value["module"].values() if "weights" in changed else ():
                weight.data.mul_(2)
            value["global_steps"] += 5 * ("global_steps" in changed)
            torch.save(value, file)
    if len(changed) == 2 and "zero1" in fixture:
        with pytest.raises(
            CorruptCheckpointError, match=r"are from different saves.* counted 2 steps, but mp_.* says 7\."
        ):
            open_source(str(folder))
    else:
        notes = " ".join(open_source(str(folder)).catalog.info.notes)
        # In stage 3, the model files have no weights.
        assert ("have different weights" in notes) is ("weights" in changed and "zero1" in fixture)
        assert ("has counted 2 steps" in notes) is ("global_steps" in changed)


def test_states_of_the_whole_flat_vector_do_not_hide_the_weights(tmp_path):
    """LAMB keeps a trust ratio of shape [1], and 8-bit optimizers one scale per block."""

    def changed(rank, inner):
        for state in inner["base_optimizer_state"]["state"].values():
            state.update(trust=torch.full((1,), float(rank)), absmax=torch.zeros(3))

    source = open_source(_rewritten(tmp_path, changed))
    assert contents(source.store, source.catalog.by_role(Role.MODEL)) == contents_of_file(EXPECTED)
    states = {entry.state for entry in source.catalog.by_role(Role.OPTIMIZER).values()}
    assert states == {"exp_avg", "exp_avg_sq", "step", "trust"}
    assert [note.partition(":")[0] for note in source.catalog.info.notes] == [
        "the optimizer's 'trust' differs between rank 0 and rank 1; rank 0's is used.",
        "the optimizer's 'absmax' was not read",
    ]


def _copy(tmp_path: Path, name: str) -> Path:
    shutil.copytree(FIXTURES / name / "ckpt" / "global_step2", tmp_path / "x")
    return tmp_path / "x"


def test_zero2_without_optimizer_files_gives_the_weights_of_the_model_file(tmp_path):
    folder = _copy(tmp_path, "zero2_elastic_w2")
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    catalog = open_source(str(folder)).catalog
    assert catalog.by_role(Role.MODEL)["emb.weight"].dtype == "bfloat16"
    assert any("no *_optim_states.pt" in note for note in catalog.info.notes)


def _another_step(raw: bytes) -> bytes:
    """Return an optimizer file with step 7 in place of 2."""
    step = {struct.pack("<f", 2.0): struct.pack("<f", 7.0)}
    return rezipped(raw, lambda name, data: [(name, step.get(data, data))])


def _another_count(folder: Path) -> None:
    path = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "global_steps": 4}, path)


def _other_experts(folder: Path) -> None:
    """Give experts 0 and 1 of a layer each other's weights."""
    paths = [folder / f"layer_0_expert_{i}_mp_rank_00_model_states.pt" for i in (0, 1)]
    made = []
    for i, path in enumerate(paths):
        old, new = f"experts.{i}.".encode(), f"experts.{1 - i}.".encode()
        made.append(rezipped(path.read_bytes(), lambda name, data, old=old, new=new: [(name, data.replace(old, new))]))
    for path, data in zip(paths, reversed(made), strict=True):
        path.write_bytes(data)


def _split_layers(folder: Path) -> None:
    for path in folder.glob("layer_*"):
        shutil.copy(path, folder / f"{path.name[:8]}-model_01-model_states.pt")
        path.rename(folder / f"{path.name[:8]}-model_00-model_states.pt")


MOE = "moe_groups_in_any_order_w4"  # two layers with experts over 2 and over 4 ranks
PIPELINE = "pipeline_zero1_tied_w2"
MODEL = EXPECTED.parent / "ckpt" / "global_step2" / "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
REFUSED: list[Refusal] = [
    *((f"an optimizer file of {name[:5]} is {fault}", name, *rest)
      for name in ("zero1_frozen_w2", "zero3_subgroups_frozen_w2") for fault, *rest in (
        ("missing", without(OPTIM.format(1)), IncompleteCheckpointError, "zero_pp_rank_1_mp_rank_00_optim_states"),
        ("another rank's", replaced(OPTIM.format(1), OPTIM.format(0)), CorruptCheckpointError,
         f"{OPTIM.format(1)} and {OPTIM.format(0)} contain the same"))),
    ("no optimizer file of stage 3", "zero3_subgroups_frozen_w2", without("*optim_states.pt"),
     IncompleteCheckpointError, r"optim_states\.pt files are missing"),
    ("two world sizes", "zero1_frozen_w2", replaced(OPTIM.format(2), OPTIM.format(1)), CorruptCheckpointError,
     "they are from two saves"),
    ("optimizer files of different steps", "zero1_frozen_w2", edited(OPTIM.format(1), _another_step),
     CorruptCheckpointError, f"{OPTIM.format(1)} and {OPTIM.format(0)} are from different saves"),
    ("model files of different steps", "zero3_subgroups_frozen_w2", _another_count, CorruptCheckpointError,
     r"zero_pp_rank_1_.* and zero_pp_rank_0_.*model_states\.pt are from different saves"),
    ("the last model file of stage 3 is missing", "zero3_fp32_tied_w3",
     without("zero_pp_rank_2_*_model_states.pt"), IncompleteCheckpointError, "zero_pp_rank_2_mp_rank_00_model_states"),
    ("optimizer files of another model", "zero2_round_robin_tied_w3", replaced(MODEL.name, MODEL),
     CorruptCheckpointError, "parameter group 0 has 4 parameters"),
    ("tensor parallelism", "zero1_frozen_w2", written("mp_rank_01_model_states.pt", b"PK"), UnsupportedFormatError,
     "ds_to_universal"),
    *((f"{file} is missing", MOE, without(file), IncompleteCheckpointError, file)
      for file in (EXPERT.format(1, 5), EXPERT.format(0, 1))),
    ("the file of an expert is another's", MOE, replaced(EXPERT.format(1, 4), EXPERT.format(1, 3)),
     CorruptCheckpointError, "layer_1_expert_4_mp.* not a weight of expert 4"),
    ("experts that do not match the ranks", "moe_data_first_w4", _other_experts, CorruptCheckpointError,
     "deepspeed_experts.*expert_0_mp_rank.*Are all files from one save"),
    ("a layer of a pipeline is missing", PIPELINE, without("layer_02-model_states.pt"), IncompleteCheckpointError,
     r"layer_02-model_states\.pt is missing, or lacks '2\.a\.weight'"),
    ("a stage of a pipeline is missing", PIPELINE, without("mp_rank_01_model_states.pt"), IncompleteCheckpointError,
     "mp_rank_01_model_states.pt"),
    ("an optimizer file of a pipeline is missing", PIPELINE, without("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
     IncompleteCheckpointError, r"zero_pp_rank_0_mp_rank_01_optim_states\.pt is missing"),
    ("a pipeline with tensor parallelism", PIPELINE, _split_layers, UnsupportedFormatError,
     r"model_01-model_states\.pt.*ds_to_universal"),
]  # fmt: skip


@each(REFUSED)
def test_damaged_or_unsupported_checkpoints_are_refused_by_file(tmp_path, refusal):
    fault, name, *expected = refusal
    assert_refused(FIXTURES, (fault, f"{name}/ckpt/global_step2", *expected), tmp_path)


def test_a_trainers_checkpoint_has_the_config_next_to_the_tag(tmp_path):
    files = {"": EXPECTED.parent / "ckpt", "/config.json": "{}", "/trainer_state.json": '{"global_step": 2}'}
    source = open_source(str(lay(tmp_path, {f"checkpoint-2{name}": content for name, content in files.items()})))
    assert source.url.endswith("checkpoint-2")
    assert source.catalog.info.side_files == ("config.json",)
    assert contents(source.store, source.catalog.by_role(Role.MODEL)) == contents_of_file(EXPECTED)


class Settings:
    """A user's class, as in a client state."""


def _with_client_state(folder: Path, **state: object) -> Path:
    """Add values to the model file, as `engine.save_checkpoint(client_state=...)` does."""
    for path in folder.glob("*_model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), **state}, path)
    return folder


def test_tensors_in_the_client_state_are_kept(tmp_path):
    ema = torch.arange(6.0)
    state = {"ema": {"emb.weight": ema, "decay": 0.9}, "loops": {"epoch": 3}, "emb.weight": ema + 1}
    source = open_source(str(_with_client_state(_copy(tmp_path, "zero2_elastic_w2"), **state)))
    tensors, objects = source.catalog.tensors, source.catalog.objects
    assert tensor_bytes(source.store, tensors["ema.emb.weight"]) == ema.numpy().tobytes()
    assert tensors["emb.weight"].role is Role.MODEL
    assert tensor_bytes(source.store, tensors["client_state.emb.weight"]) == (ema + 1).numpy().tobytes()
    assert {tensors[name].role for name in ("ema.emb.weight", "client_state.emb.weight")} == {Role.OTHER}
    assert objects["ema.decay"].value == 0.9
    assert objects["loops"].value == {"epoch": 3}
    assert objects["global_steps"].value == source.catalog.info.step == 2


def test_a_users_class_in_the_client_state_needs_allow_pickle(tmp_path):
    folder = str(_with_client_state(_copy(tmp_path, "zero2_elastic_w2"), settings=Settings(), note="kept"))
    with pytest.raises(UnsafePickleError, match=r"Settings.*--allow-pickle"):
        open_source(folder)
    source = open_source(folder, options=ReadOptions(allow_pickle=True))
    assert source.catalog.objects["note"].value == "kept"
    assert source.catalog.by_role(Role.MODEL).keys() == _catalog("zero2_elastic_w2").by_role(Role.MODEL).keys()


def _beside(folder: Path, *names: str, engine: str = "global_step2") -> Path:
    """Copy a checkpoint, and add such files as the Trainer or accelerate writes beside DeepSpeed's directory."""
    files = {name: '{"global_step": 2}' if name.endswith(".json") else {"last_epoch": 2} for name in names}
    return lay(folder, {engine: EXPECTED.parent / "ckpt" / "global_step2", "latest": engine, **files})


def test_weights_beside_deepspeeds_files_have_their_optimizer_and_masters(tmp_path):
    names = ("trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")
    folder = _beside(tmp_path / "checkpoint-2", *names)
    weights = {name: weight.bfloat16() for name, weight in load_file(EXPECTED).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(str(folder))
    catalog, whole = source.catalog, _catalog("zero1_frozen_w2")
    assert contents(source.store, catalog.by_role(Role.MODEL)) == contents_of_file(folder / "model.safetensors")
    for role in (Role.MASTER, Role.OPTIMIZER):
        assert catalog.by_role(role).keys() == whole.by_role(role).keys()
    assert {"scheduler", "rng_state_0", "rng_state_1", "trainer_state"} <= catalog.objects.keys()
    assert catalog.info.notes == ()
    assert torch.bfloat16 in {weight.dtype for weight in weights.values()}

    (folder / "global_step2" / MODEL.name).unlink()
    rest = open_source(str(folder)).catalog
    assert rest.by_role(Role.MODEL).keys() == weights.keys()
    assert any("the optimizer was not read: global_step2" in note for note in rest.info.notes)


LORA = {"unet.lora.down.weight": np.ones((2, 2), np.float32)}
OWN_FILES: list[tuple[str, str, dict[str, Any]]] = [  # of a script: beside which file, and what is in them
    ("adapter_model.safetensors", "trainer_state.json", {}),
    ("adapter_model.safetensors", "trainer_state.json", {"emb.weight": np.ones(0, np.float32)}),
    ("value_head.safetensors", "trainer_state.json", LORA),
    ("pytorch_lora_weights.safetensors", "random_states_0.pkl", LORA),
    ("model.safetensors", "random_states_0.pkl", LORA),
]


@pytest.mark.parametrize(("name", "beside", "tensors"), OWN_FILES)
def test_a_scripts_own_weights_do_not_hide_those_of_deepspeed(tmp_path, name, beside, tensors):
    engine = "global_step2" if beside == "trainer_state.json" else "pytorch_model"  # the Trainer's name, accelerate's
    folder = lay(_beside(tmp_path / "checkpoint-2", beside, engine=engine), {name: tensors})
    source = open_source(str(folder))
    assert contents(source.store, source.catalog.by_role(Role.MODEL)) == contents_of_file(EXPECTED)
    assert tensors is not LORA or f"not read: {name}." in source.catalog.info.notes


def test_accelerates_state_lies_beside_deepspeeds_directory(tmp_path):
    names = ("scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl")
    folder = _beside(tmp_path / "state", *names, engine="pytorch_model")
    one = open_source(str(folder)).catalog
    assert {"scheduler", "random_states_0", "custom_checkpoint_0"} <= one.objects.keys()
    assert one.info.producer == "accelerate, deepspeed 0.19.8"
    assert one.by_role(Role.OPTIMIZER).keys() == _catalog("zero1_frozen_w2").by_role(Role.OPTIMIZER).keys()

    shutil.copytree(folder / "pytorch_model", folder / "pytorch_model_1")  # of the second model
    (folder / "latest").write_text("pytorch_model_1")
    two = open_source(str(folder)).catalog
    weights = one.by_role(Role.MODEL).keys()
    assert two.by_role(Role.MODEL).keys() == {*weights, *(f"model_1.{name}" for name in weights)}
    assert len(two.by_role(Role.OPTIMIZER)) == 2 * len(one.by_role(Role.OPTIMIZER))
    assert two.objects.keys() >= {"optimizer.param_groups.0.lr", "optimizer_1.param_groups.0.lr"}


def test_moments_of_experts_have_the_positions_of_their_masters():
    catalog = _catalog(MOE)
    masters = catalog.by_role(Role.MASTER)
    moments = {(e.fqn, e.state): e for e in catalog.by_role(Role.OPTIMIZER).values()}
    assert len(masters) == 47
    for (fqn, master), state in itertools.product(masters.items(), ("exp_avg", "exp_avg_sq")):
        found = [(part.rank, part.box) for part in moments[fqn, state].slices]
        assert found == [(part.rank, part.box) for part in master.slices], fqn
    last = "layers.1.moe.deepspeed_moe.experts.deepspeed_experts.7.2.bias"
    assert last in catalog.objects["optimizer.param_groups.2.params"].value


LAYER = "m.deepspeed_moe.experts.deepspeed_experts."


def test_a_split_parameter_group_counts_all_experts_of_its_rank():
    """DeepSpeed splits large groups into several."""
    params = {f"{LAYER}1.w": (2,)}
    parts = parts_of(params, partitions=1, world_size=2, data_first=False, counts={LAYER: 6})
    assert [list(part.renamed(params)) for part in parts] == [[f"{LAYER}1.w"], [f"{LAYER}4.w"]]


@pytest.mark.parametrize(("partitions", "experts"), [(1, 3), (2, 3), (2, 0)])
def test_groups_that_do_not_divide_over_the_ranks_are_refused(partitions, experts):
    error, text = (CorruptCheckpointError, r"\[3\] exp") if experts else (UnsupportedFormatError, "ds_to_universal")
    name, counts = (f"{LAYER}0.w", {LAYER: 3}) if experts else ("w", {})
    with pytest.raises(error, match=text):
        parts_of({name: (2,)}, partitions=partitions, world_size=4, data_first=False, counts=counts)


def test_experts_without_zero_are_read_and_the_rest_is_reported(tmp_path):
    """Without ZeRO the model file has no shapes, and each expert-parallel rank has an optimizer file."""
    folder = _copy(tmp_path, MOE)
    for path in folder.glob("*zero_pp*"):
        path.unlink()
    shutil.copy(FIXTURES / "zero0_bf16_w3" / "ckpt" / "global_step2" / "mp_rank_00_model_states.pt", folder)
    (folder / "expp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    catalog = open_source(str(folder)).catalog
    assert "layers.1.moe.deepspeed_moe.experts.deepspeed_experts.7.2.bias" in catalog.by_role(Role.MODEL)
    assert any("expp_rank_0_mp_rank_00_optim_states.pt" in note for note in catalog.info.notes)


def test_without_zero_the_optimizer_and_its_masters_are_read_from_the_model_file():
    source = open_source(str(FIXTURES / "zero0_bf16_w3" / "ckpt"))
    catalog, masters = source.catalog, source.catalog.by_role(Role.MASTER)
    assert len(masters) == 10 and check_masters(source.store, catalog) == []
    assert {e.fqn for e in catalog.by_role(Role.OPTIMIZER).values() if e.state == "exp_avg"} == set(masters)
    assert catalog.objects["optimizer.param_groups.1.weight_decay"].value == 0.0


def test_masters_in_another_order_than_the_models_are_not_assigned_by_shape(tmp_path):
    """The group lists norm.bias before norm.weight, and both have 10 elements."""
    path = _copy(tmp_path, "zero0_bf16_w3") / "mp_rank_00_model_states.pt"
    values = torch.load(path, weights_only=False)
    optimizer = values["optimizer"]
    for swapped, one in ((optimizer["fp32_groups"][1], 2), (optimizer["optimizer_state_dict"]["state"], 7)):
        swapped[one], swapped[one + 1] = swapped[one + 1], swapped[one]
    torch.save(values, path)
    catalog = open_source(str(path.parent)).catalog
    assert not catalog.by_role(Role.MASTER) and not catalog.by_role(Role.OPTIMIZER)
    for skipped in ("the masters were", "the optimizer in mp_rank_00_model_states.pt was"):
        assert any(f"{skipped} skipped" in note for note in catalog.info.notes)


def test_a_module_shared_by_layers_is_one_tied_parameter(tmp_path):
    folder = _copy(tmp_path, PIPELINE)
    shutil.copy(folder / "layer_00-model_states.pt", folder / "layer_05-model_states.pt")  # of the tied module
    catalog = open_source(str(folder)).catalog
    model = catalog.by_role(Role.MODEL)
    assert list(model["0.weight"].slices) == list(model["5.weight"].slices)
    assert "5.weight" in catalog.by_role(Role.MASTER)
    assert [e.fqn for e in catalog.by_role(Role.OPTIMIZER).values() if e.state == "exp_avg"].count("0.weight") == 1
    assert catalog.objects["optimizer.param_groups.0.params"].value[:2] == ["0.weight", "1.a.weight"]
    assert len(catalog.objects["optimizer.param_groups.0.params"].value) == 9


def test_a_pipeline_without_zero_says_that_its_optimizer_was_not_read():
    notes = _catalog("pipeline_zero0_w2").info.notes
    assert any("mp_rank_00_model_states.pt was not read: it is from a pipeline" in note for note in notes)
