"""What is opened for a URL: a file, a directory, the newest of many steps, or an error that lists what was found."""

import contextlib
import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import CheckpointManager, RetentionPolicy, reshard
from ckptkit.catalog.entry import Role
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from ckptkit.formats import detect
from ckptkit.formats.detect import identify, open_source
from ckptkit.formats.trainers.steps import ordered, parse_step
from ckptkit.storage import open_store
from ckptkit.storage.local import LocalStore
from tests.checkpoint.states import linear, save_steps
from tests.conftest import ZOO
from tests.formats.damages import lay
from tests.patches import refuse

DCP, VERL = ZOO / "dcp_threads2_w2" / "ckpt", ZOO / "verl_fsdp2_w2" / "global_step_4" / "actor"
HF = {"w": np.ones(3, np.float32)}
WEIGHTS = {"model": {"w": torch.ones(2)}}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
CIRCLE: dict[str, Any] = {"weight": torch.ones(2)}
CIRCLE["model"] = CIRCLE


STEPS: dict[str, int | None] = {
    "global_step10": 10, "global_step_4": 4, "checkpoint-2": 2, "step-10": 10, "iter_0000010": 10,
    "step_00001000": 1000, "epoch=0-step=3.ckpt": 3, "epoch_1_step_7": 7, "epoch_3": 0, "1200": 1200,
    "checkpoint-1,000": 1000, "checkpoint-1_000": 1000, "ckpt_3_512": 3, "step-10k": 10000, "step-1.5k": 1500,
    "step_1e4": 10000, "step=9-loss=0.10.ckpt": 9, "ckpt-7b": 7,
    "model_name--val_loss=1.2-step=30.0-consumed_samples=60.0": 30,
    **dict.fromkeys(("notes", "tensorboard", "last.ckpt", "hf_ref_qwen3moe", "v2-final", "step")),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_read_from_a_name(name):
    found = parse_step(name)
    assert (found and found.step) == STEPS[name]


ORDERED = {  # newest first
    "by number": ["global_step10", "global_step9", "global_step2"],
    "by epoch": ["epoch_10", "epoch_2"],
    "by the version that Lightning adds": [f"epoch=0-step=24{version}.ckpt" for version in ("-v10", "-v2", "-v1", "")],
    "by number before the version": ["step=25.ckpt", "step=24-v1.ckpt"],
    **{f"after the step in its place, with {nonce}": ["step_00000001", f"step_00000001.aside-{nonce}"]
       for nonce in ("4224e5ffbba6bee3", "ba61ffe000000000", "ba61234567890123", "0123456789012345")},
}  # fmt: skip


@pytest.mark.parametrize("names", ORDERED.values(), ids=ORDERED)
def test_steps_are_ordered(names):
    assert [step.name for step in ordered(names)] == names == [step.name for step in ordered(names[::-1])]


# The step of a checkpoint: the files, and the step that they tell.
TOLD: dict[str, tuple[dict[str, Any], int | None]] = {
    "an epoch alone": ({"epoch_3/model.safetensors": HF}, None),
    "an epoch and a step": ({"epoch_3_step_7/model.safetensors": HF}, 7),
    "a step above the weights": ({"step100/model_and_optim/model.safetensors": HF}, 100),
    "a number in the name of a run": ({"step100_b/actor/model.safetensors": HF}, None),
    "step 0": ({"step_0/model.safetensors": HF}, 0),
    "a negative step": ({"a.pt": {**WEIGHTS, "step": -1}}, None),
    "a number that the file calls its epoch": ({"checkpoint-3.pth.tar": {**WEIGHTS, "epoch": 3}}, None),
    "a step in the name beside an epoch in the file": ({"ckpt_step_3.pt": {**WEIGHTS, "epoch": 3}}, 3),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_checkpoint_has_a_step_only_if_its_name_or_content_says_so(tmp_path, case):
    files, step = TOLD[case]
    source = open_source(str(lay(tmp_path, files)))
    assert source.catalog.info.step == open_source(source.url).catalog.info.step == step


# What is in a directory, the files that are read, and a note.
READ: dict[str, tuple[list[str] | dict[str, Any], list[str], str]] = {
    "the only file": (["step_100.pt"], ["step_100.pt"], ""),
    "the only file, of another ending": (["weights.th"], ["weights.th"], ""),
    "the only file, of two endings": (["model_best.pth.tar"], ["model_best.pth.tar"], ""),
    "a model beside its optimizer": (["model.pt", "optim.pt"], ["model.pt"], "not read: optim.pt."),
    "nanochat": (["model_000010.pt", "optim_000010_rank0.pt", "optim_000010_rank1.pt"], ["model_000010.pt"],
                 "not read: optim_000010_rank0.pt, optim_000010_rank1.pt."),
    "skorch": (["params.pt", "criterion.pt", "train_optimizer.pt"], ["params.pt"],
               "not read: criterion.pt, train_optimizer.pt."),
    "torchtune with LoRA": (["epoch_1/model-00001-of-00001.bin", "epoch_1/adapter_model.pt"],
                            ["model-00001-of-00001.bin"], "not read: adapter_model.pt."),
    "colossalai": ({"step_3/modeling/model.safetensors": HF, "step_3/optimizer/pytorch_optim-00001.bin": b"PK"},
                   ["model.safetensors"], "not read: optimizer/."),
    "colossalai with a directory called model": (
        {"step_3/model/model.safetensors": HF, "step_3/optimizer/pytorch_optim-00001.bin": b"PK"},
        ["model/model.safetensors"], "not read: optimizer/."),
    **{f"a checkpoint beside {kind} files of data": (
        {**{f"{kind}_{number}.bin": b"tokens" for number in range(20)}, "ckpt.pt": WEIGHTS}, ["ckpt.pt"], "")
       for kind in ("train", "shard")},
    "a model beside an empty step": ({"model.safetensors": HF, "checkpoint-1/": None}, ["model.safetensors"], ""),
    **{f"the latest step, of {ending} files": (
        [f"epoch_{epoch}_checkpoint_{step}.{ending}" for epoch, step in ((0, 0), (0, 500), (1, 1000))],
        [f"epoch_1_checkpoint_1000.{ending}"], "") for ending in ("pt", "ckpt")},
    **{f"the latest step, of {ending} files, beside ranks of an older one": (
        [f"{name}.{ending}" for name in ("step_100_rank_0", "step_100_rank_1", "step_200")], [f"step_200.{ending}"], "")
       for ending in ("pt", "ckpt")},
    **{f"ranks of one step in {name}": (files := [name.format(rank) for rank in range(2)], files, "")
       for name in ("step_100_rank_{}.pt", "step_100_rank_{}.ckpt", "epoch_3_rank_{}.pt")},
    "ranks of the same model": ([f"{name}.pt" for name in ("model1_shard_0", "model2_shard_0", "model2_shard_1")],
                                ["model2_shard_0.pt", "model2_shard_1.pt"], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_among_several_files_the_model_is_read_and_the_others_are_named(tmp_path, case):
    there, read, note = READ[case]
    source = open_source(str(lay(tmp_path, there if isinstance(there, dict) else dict.fromkeys(there, WEIGHTS))))
    info = source.catalog.info
    assert [path for path in info.files if path != "config.json"] == read
    assert note in " ".join((source.note, *info.notes)) and source.catalog.by_role(Role.MODEL)


@pytest.mark.parametrize(("names", "target"), [
    (["train.bin"], "data.bin"), (["shard_0.bin", "shard_1.bin"], "data.bin"), (["adapter_model.bin"], "weights.pt"),
    (["model_rank_0.bin", "model_rank_1.bin"], "weights.pt"),
])  # fmt: skip
def test_a_link_to_a_file_outside_of_the_directory_is_refused_if_it_has_the_name_of_a_model(tmp_path, names, target):
    run = lay(tmp_path, {"data.bin": b"\x01" * 100, "weights.pt": WEIGHTS, "run/ckpt.pt": WEIGHTS}) / "run"
    for name in names:
        (run / name).symlink_to(tmp_path / target)
    refused = pytest.raises(CkptkitError, match=names[0])
    with refused if target == "weights.pt" else contextlib.nullcontext():
        assert open_source(str(run)).catalog.info.files.keys() == {"ckpt.pt"}


# What is there, and which of it is opened with which notes.
OPENED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "the newest step by number": (
        {f"step-{n}/model.safetensors": HF for n in (2, 9, 10)} | {"notes/": None, "latest": "step-9"},
        "/step-10", ["newest of 3", "latest says step-9"]),
    "the newest step file": ({f"step_{n}.pt": WEIGHTS for n in (9, 10, 2)}, "/step_10.pt", ["newest of 3 files"]),
    "the model of a step and not its optimizer": (
        {f"{kind}_step_{n}.pt": WEIGHTS for n in (9, 10) for kind in ("model", "optim")}, "/model_step_10.pt",
        ["newest of 2 files", "not read: optim_step_10.pt"]),
    "the model of a step and not its optimizer, in files of Lightning's ending": (
        {"model_step_9.ckpt": WEIGHTS, "optimizer_step_9.ckpt": OPTIMIZER}, "/model_step_9.ckpt",
        ["not read: optimizer_step_9.ckpt"]),
    "weights and not the recipe state of torchtune": (
        {"epoch_0/model.safetensors": HF, "recipe_state/recipe_state.pt": OPTIMIZER}, "/epoch_0",
        ["Not read: recipe_state/."]),
    "no unfinished step": (
        {"step-1": DCP, **{f"step-2/{name}": DCP / "__0_0.distcp" for name in ("__0_0.distcp", ".metadata.tmp")}},
        "/step-1", ["step-2"]),
    "what a pointer file names": (
        {"best/model.safetensors": HF, "last/model.safetensors": HF, "latest": "last\n"}, "/last", []),
    "the actor and not the critic": (
        {"global_step_4/actor": VERL, "global_step_4/critic": VERL, "global_step_4/data.pt": b"PK"},
        "global_step_4/actor", ["critic/"]),
    "weights and not the optimizer of NeMo-RL": (
        {"step_10/policy/weights/model": DCP, "step_10/policy/optimizer/optim": DCP}, "/step_10/policy/weights", []),
    "a recognized format before rank files": (
        {"step10/model_and_optim": DCP, **{f"step10/train/rank{rank}.pt": WEIGHTS for rank in range(2)}},
        "step10/model_and_optim", ["model_and_optim/ was chosen; not read: train/."]),
    "one directory of nanotron, whose others are deeper": (
        {"model/lm_head/model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors": HF, "model/decoder/0/b/c.txt": b""},
        "/model/lm_head", ["not read: decoder/."]),
}  # fmt: skip


@pytest.mark.parametrize("which", OPENED)
def test_among_several_checkpoints_the_right_one_is_opened_and_noted(tmp_path, which):
    files, url, notes = OPENED[which]
    lay(tmp_path, files)
    source = open_source(str(tmp_path))
    assert source.url.endswith(url) and source.catalog.by_role(Role.MODEL)
    assert source.catalog.info.step == (10 if url == "/step-10" else source.catalog.info.step)
    assert all(note in source.note for note in notes)


# What is there, and the error for it.
NOT_OPENED: dict[str, tuple[dict[str, Any] | None, type[CkptkitError], str]] = {
    "nothing": (None, CheckpointNotFoundError, "does not exist"),
    "an empty directory": ({}, CheckpointNotFoundError, "(?s)empty.*Expected"),
    "foreign files": ({"notes.txt": b"PK", "logs/x": b"PK"}, CheckpointNotFoundError, r"(?s)notes\.txt.*Expected"),
    "an unfinished checkpoint": ({"__0_0.distcp": b"PK"}, CkptkitError, r"\.metadata"),
    "a damaged newest step": (
        {"step-1": DCP, "step-2/.metadata": DCP / ".metadata", "step-2/__0_0.distcp": DCP / "__0_0.distcp"},
        IncompleteCheckpointError, r"__0_1\.distcp.*step-2"),
    "a damaged record, and a step without one": (
        {"step_00000005": DCP, "step_00000005/checkpoint.json": "{}", "step_00000009": DCP},
        CorruptCheckpointError, "step_00000005"),
    "names without numbers": (
        {"best/model.safetensors": HF, "last/model.safetensors": HF}, CheckpointNotFoundError, "best, last"),
    "two models": (
        {"netG_10.pth": WEIGHTS, "netD_10.pth": WEIGHTS}, CheckpointNotFoundError,
        r"2 torch\.save files: netD_10\.pth, netG_10\.pth\. Give .*: ckptkit inspect \S+/netD_10\.pth"),
    "a pointer that leads outside": (
        {"sub/": None, "latest": "../outside", "../outside/model.safetensors": HF}, CheckpointNotFoundError,
        "Expected"),
    "an archive of NeMo": (
        {"m.nemo": b"\x1f\x8b\x08" + bytes(600)}, UnsupportedFormatError, r"m\.nemo is a tar archive of NeMo.*tar -xf"),
    "an optimizer without weights": (
        {"optimizer.pt": OPTIMIZER}, IncompleteCheckpointError, r"optimizer\.pt, which has no weights"),
    "a Trainer's step without its weights": (
        {"optimizer.pt": OPTIMIZER, "scheduler.pt": OPTIMIZER}, IncompleteCheckpointError,
        r"no file that may hold weights, only optimizer\.pt, scheduler\.pt"),
    "safetensors of ranks": (
        {f"model_rank{rank}.safetensors": HF for rank in range(2)}, UnsupportedFormatError,
        r"model_rank0\.safetensors and 1 more are per-rank files"),
    "steps from 0 of two models, most of whose weights are frozen": (
        {f"{kind}checkpoint_{step}.pt": {"model": {"frozen": torch.ones(9), "head": torch.full((2,), float(step))}}
         for step in range(3) for kind in ("", "ema_")}, CheckpointNotFoundError, "has 6 torch"),
    **{f"tensor-parallel ranks with equal norms in {name}": (  # the first name is that of Meta's Llama weights
        {name.format(rank): {"wq": torch.full((4, 4), float(rank)), "norm": torch.ones(4)} for rank in range(2)},
        UnsupportedFormatError, "They are shards, and the files do not say how to join them")
       for name in ("consolidated.{:02d}.pth", "model_rank_{}.pt")},
    **{f"plain shards without a position in {name}": (
        {name.format(rank): {"w": torch.ones(4, 2) * rank, "step": torch.tensor(1)} for rank in range(2)},
        UnsupportedFormatError, "the ranks have different plain tensors")
       for name in ("weights_rank{}.pt", "model_world_size_2_rank_{}.pt", "pytorch_model_fsdp_rank{}.bin")},
    "ranks of a value that contains itself": (
        dict.fromkeys(("rank0.pt", "rank1.pt"), CIRCLE), CorruptCheckpointError, "contains itself"),
    **{f"a latest step without rank {missing}": (
        {f"step_{step}_rank_{rank}.pt": VERL / f"model_world_size_2_rank_{rank}.pt"
         for step in (100, 200) for rank in range(2) if (step, rank) != (200, missing)},
        IncompleteCheckpointError, "step_200_rank_") for missing in range(2)},
    **{f"an absurd rank or number of ranks in {names[-1]}": (dict.fromkeys(names, b"PK"), CkptkitError, ".")
       for names in (
        ["model_world_size_99999999999_rank_0.pt"], ["model_world_size_0_rank_0.pt"],
        [f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1, 5)], ["pytorch_model_fsdp_0_rank99999999999.bin"],
        ["zero_pp_rank_99999999999_mp_rank_00_model_states.pt"], ["model-99999999999-of-99999999999.safetensors"],
        ["shard-99999999999-model-00001-of-00001.safetensors"], ["weights_rank0.pt", "weights_rank9999999.pt"])},
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_OPENED)
def test_the_error_for_what_cannot_be_opened_says_what_was_found(tmp_path, what):
    files, error, text = NOT_OPENED[what]
    if files is not None:
        (tmp_path / "x").mkdir()
        lay(tmp_path / "x", files)
    with pytest.raises(error, match=text) as caught:
        open_source(str(tmp_path / "x"))
    assert files is not None or "Expected" not in str(caught.value)


def test_a_format_is_detected_by_its_own_files(tmp_path):
    lay(tmp_path, {"own/checkpoint.json": "{}", "x": DCP, "x/metadata.json": '{"author": "me"}'})
    assert identify(open_store(str(tmp_path / "own"))) == "ckptkit"
    assert identify(open_store(str(tmp_path / "x"))) == "dcp"  # its metadata.json is unlike that of Megatron


def test_opening_one_file_opens_the_whole_checkpoint(zoo):
    source = open_source(str(zoo / "lightrft_mp_optim_w2" / "global_step7" / ".metadata"))
    assert source.url.endswith("global_step7") and source.catalog.info.step == 7
    assert source.catalog.by_role(Role.MODEL)


def test_a_link_that_the_user_names_is_followed_and_a_slash_at_the_end_changes_nothing(tmp_path):
    lay(tmp_path, {"step-3/model.safetensors": HF})
    (tmp_path / "link").symlink_to(tmp_path / "step-3")
    assert open_source(str(tmp_path / "link")).catalog.tensors
    assert open_source(f"{tmp_path}/step-3/").catalog.info.step == 3


def test_data_in_many_bin_files_is_not_read(tmp_path, monkeypatch):
    lay(tmp_path, {f"train_{number:06}.bin": b"tokens" for number in range(40)})
    reads = []
    monkeypatch.setattr(LocalStore, "read", lambda store, path, *args: reads.append(path) or b"to")
    assert identify(open_store(str(tmp_path))) is None
    assert reads == []


@pytest.mark.parametrize("name", ["weights_rank{}.pt", "model_{}.pt", "checkpoint_{}.pt"])
def test_rank_files_of_an_unknown_system_are_joined(tmp_path, name):
    lay(tmp_path, {name.format(rank): VERL / f"model_world_size_2_rank_{rank}.pt" for rank in range(2)})
    if name.startswith("model_"):
        optimizers = {f"optimizer_{rank}.pt": VERL / f"optim_world_size_2_rank_{rank}.pt" for rank in range(2)}
        lay(tmp_path, {**optimizers, "metadata.pkl": b"\x80\x04}."})
    catalog = open_source(str(tmp_path)).catalog
    assert catalog.info.format == "rank-files"
    assert catalog.by_role(Role.MODEL).keys() == open_source(str(VERL)).catalog.by_role(Role.MODEL).keys()
    (tmp_path / name.format(1)).unlink()
    with pytest.raises(CkptkitError, match=r"only the part of rank 0|_(rank)?1\.pt|parts are in model_\*\.pt"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_dry_run_names_trainer_state_next_to_the_weights(tmp_path, weights):
    beside = ["custom_checkpoint_0.pkl", "random_states_0.pkl", "scheduler.bin"]
    source = lay(tmp_path / "in", {**{name: {"x": 1} for name in beside}, "optimizer.bin": OPTIMIZER,
                                   weights: HF if weights.endswith("safetensors") else WEIGHTS})  # fmt: skip
    notes = ("optimizer.bin is not read: it has no parameter names.", f"not read: {', '.join(beside)}.")
    assert open_source(str(source)).catalog.info.notes == notes
    report = reshard(str(source), str(tmp_path / "out"), world_size=2, dry_run=True)
    assert {*notes} < {*report.to_json()["notes"]} and {f"note: {note}" for note in notes} < {*report.plan_lines()}


def test_file_names_of_accelerate_before_0_25_are_known(tmp_path, zoo):
    now = zoo / "accelerate_fsdp2_sharded_llama_tied_w2" / "checkpoint"
    sharded = lay(tmp_path / "a", {"pytorch_model_0": now / "pytorch_model_fsdp_0", "optimizer_0": now / "optimizer_0"})
    paths = (zoo / "accelerate_fsdp2_nodcp_llama_untied_w2" / "checkpoint").glob("*_0_rank*.bin")
    older = {path.name.replace("_fsdp_0_", "_").replace("optimizer_0_", "optimizer_"): path for path in paths}
    for folder in (sharded, lay(tmp_path / "b", older)):
        catalog = open_source(str(folder)).catalog
        assert catalog.info.format == "accelerate"
        weights = catalog.by_role(Role.MODEL)
        assert {e.fqn for e in catalog.by_role(Role.OPTIMIZER).values() if e.state == "exp_avg"} <= set(weights)
        assert catalog.by_role(Role.OPTIMIZER) and "model.embed_tokens.weight" in weights


def test_a_replicated_model_with_a_different_buffer_per_rank_is_read_with_a_note(tmp_path):
    parts = [{"w": torch.ones(4, 4), "running_mean": torch.full((4,), float(rank))} for rank in range(2)]
    source = lay(tmp_path, {f"model_rank_{rank}.pt": part for rank, part in enumerate(parts)})
    catalog = open_source(str(source)).catalog
    assert list(catalog.tensors) == ["w", "running_mean"]
    assert catalog.info.notes == ("tensor 'running_mean' differs between rank 0 and rank 1; rank 0's is used.",)


@pytest.mark.parametrize(("model", "optimizer", "step", "differs"), [
    ("model", "optimizer", "step", True), ("policy", "optimizer_state", "iter", False)])  # fmt: skip
def test_if_each_rank_file_has_the_whole_model_all_of_one_file_is_read(tmp_path, model, optimizer, step, differs):
    weights = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    states = {
        "state": {i: {"exp_avg": w} for i, w in enumerate(weights.values())},
        "param_groups": [{"params": [0, 1]}],
    }
    saved = {model: weights, "net": {}, step: 7, "epoch": 1, optimizer: states}
    files = {f"rank{rank}.pt": {"rng": torch.arange(9) + rank * differs, **saved} for rank in range(2)}
    catalog = open_source(str(lay(tmp_path, files))).catalog
    assert (catalog.info.format, catalog.info.world_size, catalog.info.step) == ("rank-files", 2, 7)
    assert list(catalog.by_role(Role.MODEL)) == ["weight", "bias"]
    assert len(catalog.by_role(Role.OPTIMIZER)) == 2 and catalog.objects["epoch"].value == 1
    notes = ("each rank saved the whole model; rank0.pt was read.",)
    differ = ("not read: other ranks' values of rng, which differ from rank 0's.",)
    assert catalog.info.notes == notes + differ * differs


def test_rank_files_with_different_optimizer_states_are_not_taken_for_copies(tmp_path):
    """Each rank has the states of its own parameters, as with ZeroRedundancyOptimizer."""
    model, files = {"w": torch.ones(2), "v": torch.ones(3)}, {}
    for rank, weight in enumerate(model.values()):
        states = {"state": {rank: {"exp_avg": torch.full_like(weight, rank)}}, "param_groups": [{"params": [0, 1]}]}
        saved = {"model": model, "optimizer": states, "step": 3, "scaler": {"scale": 2.0}, "rank": rank}
        files[f"rank{rank}.pt"] = {"app": saved}
    catalog = open_source(str(lay(tmp_path, files))).catalog
    assert catalog.by_role(Role.OPTIMIZER).keys() == {"optimizer.state.w.exp_avg", "optimizer.state.v.exp_avg"}
    assert catalog.objects["scaler"].value == {"scale": 2.0}  # all ranks saved the same
    assert catalog.info.step == 3 and catalog.info.notes == ("not read: rank of rank*.pt.",)


@pytest.mark.parametrize("apart", [False, True])
def test_the_latest_of_several_steps_is_read_with_its_optimizer(tmp_path, apart):
    values = {f"model_step_{step}": WEIGHTS["model"] if apart else WEIGHTS for step in (100, 300, 200)}
    values |= dict.fromkeys(("optim_step_100", "optim_step_300") if apart else (), OPTIMIZER)
    files = {f"{name}_rank_{rank}.pt": value for name, value in values.items() for rank in range(2)}
    catalog = open_source(str(lay(tmp_path, files))).catalog
    assert catalog.info.step == 300 and bool(catalog.by_role(Role.OPTIMIZER)) == apart
    read = {path for entry in catalog.tensors.values() for path in entry.slices.paths}
    assert read == {f"{kind}_step_300_rank_0.pt" for kind in (("model", "optim") if apart else ("model",))}


def _ranks_of(model: dict[str, Any], states: Callable[[int], dict[int, Any]]) -> dict[str, Any]:
    """Return the files of two ranks with the whole model, and an optimizer with these states of each rank."""
    groups = [{"params": [*range(len(states(0)))]}]
    return {f"rank{rank}.pt": {"model": model, "optimizer": {"state": states(rank), "param_groups": groups}}
            for rank in range(2)}  # fmt: skip


def test_pieces_of_a_state_are_not_taken_for_the_state_of_a_parameter_with_their_shape(tmp_path):
    """Only "b" is trained, and each rank has a half of its moment."""
    model = {"a": torch.ones(6), "b": torch.ones(12)}
    files = _ranks_of(model, lambda rank: {0: {"exp_avg": torch.full((6,), float(rank))}})
    (entry,) = open_source(str(lay(tmp_path, files))).catalog.by_role(Role.OPTIMIZER).values()
    assert (entry.fqn, entry.shape, len(entry.slices)) == ("b", (12,), 2)


def test_the_states_of_replicas_that_differ_a_little_are_those_of_rank_0(tmp_path):
    model = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    files = _ranks_of(model, lambda rank: {i: {"exp_avg": w + rank * 1e-6} for i, w in enumerate(model.values())})
    catalog = open_source(str(lay(tmp_path, files))).catalog
    assert {entry.fqn for entry in catalog.by_role(Role.OPTIMIZER).values()} == {"a", "b"}
    assert all("differs between rank 0 and rank 1; rank 0's is used" in note for note in catalog.info.notes)


VALUES = [
    [], {}, {"module": 1}, {"module": {}, "param_shapes": 3}, {"module": {}, "param_shapes": [{"a": "b"}]},
    {"module": {"a": torch.ones(2)}, "buffer_names": 7, "param_shapes": [{}], "shared_params": [1]},
    {"module": {"a": torch.ones(2)}, "param_shapes": [{"a": torch.Size([2**40])}]},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "model_world_size_1_rank_0.pt", "pytorch_model_fsdp_0_rank0.bin"]
)
def test_values_of_unexpected_types_raise_only_ckptkit_errors(tmp_path, name, value):
    lay(tmp_path, {name: value})
    if name.startswith("mp_rank"):
        lay(tmp_path, {"zero_pp_rank_0_mp_rank_00_optim_states.pt": {"optimizer_state_dict": value}})
    with contextlib.suppress(CkptkitError):  # any other exception fails the test
        open_source(str(tmp_path))


# --- the root of a ckptkit run stands for its newest committed checkpoint, whatever else is in the run


def without_record(name):
    """Return a change that leaves a checkpoint of this name in which everything but the record was written."""
    return lambda root: shutil.copytree(root / "step_00000020", root / name, ignore=lambda *_: ["checkpoint.json"])


def resumed(which, step, **options):
    def change(root):
        with CheckpointManager(root) as manager:
            manager.load(linear(), which)
            manager.save(step, linear(), **options)

    return change


CHANGES = {
    "a killed save": without_record(".tmp-step_00000025-aaaaaaaaaaaaaaaa"),
    "a killed deletion": lambda root: (root / "step_00000010").rename(root / ".trash-step_00000010-ba2936b17940113e"),
    "a lost record": without_record("step_00000030"),
    "a rollback": resumed(10, 15),
    "a tag": resumed("latest", 30, tag="final"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_root_of_a_run_is_opened_as_latest(tmp_path, change):
    save_steps(tmp_path, 10, 20)
    CHANGES[change](tmp_path)
    assert open_source(str(tmp_path)).url == resolve_url(f"{tmp_path}/latest")


def test_a_record_that_the_store_does_not_return_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20)
    error = StorageError("no answer")
    refuse(monkeypatch, detect, "find_record", error, when=lambda store, path: path.startswith("step_00000010"))
    with pytest.raises(StorageError, match="no answer"):
        open_source(str(tmp_path))


def test_the_root_of_a_run_can_always_be_opened_while_a_job_saves_with_max_num_1(tmp_path):
    def read():
        return [open_source(str(tmp_path)).catalog.info.step for _ in range(100)]

    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1)) as manager, ThreadPoolExecutor(1) as pool:
        manager.save(1, linear())
        reading, steps = pool.submit(read), itertools.count(2)
        while not reading.done():
            manager.save(next(steps), linear())
    assert reading.result() == sorted(reading.result())
