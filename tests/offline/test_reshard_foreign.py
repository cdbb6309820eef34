"""A run of another system resumes under FSDP2, bit for bit; a reshard of a foreign DCP is a DCP with the same state."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckptkit import DCPReader, TrainState, convert, reshard, verify
from ckptkit.catalog.entry import Role, TensorEntry
from ckptkit.checkpoint.state.values import decode
from ckptkit.errors import CorruptCheckpointError, IntegrityError, UnsupportedFormatError
from ckptkit.formats.detect import Source, open_source
from tests.checkpoint.states import check_resumed, load, trained
from tests.formats.interop_cases import same
from tests.formats.readback import contents, contents_of_state_dict
from tests.offline import reshard_jobs
from tests.offline.exports import assert_same
from tests.offline.folders import copied, flip, names, refused

# Each with whether it stores the state of a torch scheduler.
SOURCES = {
    "deepspeed_zero1_odd_sizes_w3": False, "deepspeed_zero2_bf16_w2": False, "deepspeed_zero3_bf16_tied_w2": False,
    "accelerate_fsdp2_sharded_llama_tied_w2": False, "accelerate_fsdp2_nodcp_llama_untied_w2": False,
    "hf_trainer_fsdp2_sharded_w2": True, "lightning_trainer_fsdp_w2": True, "lightrft_naive_optim_w2": True,
    "dcp_torchtitan_like_w2": True, "dcp_appstate_w2": False, "verl_fsdp2_w2": True, "verl_fsdp1_nomesh_w2": False,
    "fsdp1_dcp_sharded_nomesh_w2": False,
}  # fmt: skip
TIED = {"lm_head.weight": "model.embed_tokens.weight", "head.weight": "embed.weight"}


def _by_fqn(source: Source, role: Role) -> dict[str, TensorEntry]:
    entries = [entry for entry in source.catalog.tensors.values() if entry.role is role and entry.fqn]
    return {entry.fqn + (f".{entry.state}" if role is Role.OPTIMIZER else ""): entry for entry in entries}


def _model(source: Source) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str], list[str]]:
    """Return names and shapes of a model, its tied names, and its buffers."""
    trained = {entry.fqn for entry in _by_fqn(source, Role.OPTIMIZER).values()}
    shapes = {fqn: (entry.dtype, entry.shape) for fqn, entry in _by_fqn(source, Role.MODEL).items()}
    loose = [fqn for fqn in shapes if fqn not in trained]
    tied = {fqn: TIED[fqn] for fqn in loose if TIED.get(fqn) in trained}
    return dict(sorted(shapes.items(), key=lambda item: item[0] in tied)), tied, [f for f in loose if f not in tied]


def _groups(source: str, place: Path) -> list[list[str]]:
    """Return the parameters of each group in a LOCAL result."""
    reshard(source, str(place / "groups"), world_size=1, type="local")
    tree = open_source(str(place / "groups")).catalog.objects["optimizer"].value
    return [group["params"] for group in tree["param_groups"]]


def _check(source: Source, role: Role, found: dict[str, torch.Tensor], *, suffix: str = "") -> None:
    """Assert that each tensor of a role was loaded bit for bit."""
    for name, entry in _by_fqn(source, role).items():
        assert contents(source.store, {"w": entry}) == contents_of_state_dict({"w": found[name + suffix]}), name


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_of_another_system_continues_with_its_state(ranks, zoo, tmp_path, name):
    source = open_source(str(zoo / name))
    made = str(tmp_path / "new")
    reshard(str(zoo / name), made, world_size=2, verify=True)
    groups = _groups(str(zoo / name), tmp_path)
    for weights, states, settings, loaded in ranks.run(reshard_jobs.go_on, 2, made, *_model(source), groups):
        _check(source, Role.MODEL, weights)
        _check(source, Role.OPTIMIZER, states)
        assert {key.rpartition(".")[2] for key in states} == {"step", "exp_avg", "exp_avg_sq"}
        assert all(group["lr"] != 123.0 for group in settings)
        assert "optimizer" in loaded
    assert ("scheduler" in open_source(str(tmp_path / "groups")).catalog.objects) is SOURCES[name]


def test_masters_of_lightrft_are_proved_to_belong_to_their_weights(ranks, zoo, tmp_path):
    source = open_source(str(zoo / "lightrft_mp_optim_w2"))
    made = str(tmp_path / "new")
    report = reshard(source.url, made, world_size=3)
    assert "14 weights equal to the cast fp32 master" in report.proof()
    for _, states, _, _ in ranks.run(reshard_jobs.go_on, 3, made, *_model(source), _groups(source.url, tmp_path), True):
        _check(source, Role.MASTER, states, suffix=".master")
        _check(source, Role.OPTIMIZER, states)


@pytest.mark.parametrize("run", [partial(reshard, world_size=2), partial(convert, weights="master")])
def test_masters_that_do_not_match_the_weights_are_refused(run, zoo, tmp_path):
    copy = copied(zoo / "lightrft_mp_optim_w2" / "global_step7", tmp_path / "global_step7")
    source = open_source(str(copy))
    part = next(iter(_by_fqn(source, Role.MASTER)["layers.0.norm.weight"].slices))
    flip(copy / part.path, part.start + 3, bit=6)
    said = r"weights do not equal the fp32 master .* layers\.0\.norm\.weight"
    refused(IntegrityError, said, run, copy, tmp_path / "new")


def test_fsdp1_local_without_a_layout_is_refused_with_advice(zoo, tmp_path):
    source = zoo / "fsdp1_local_state_dict_nomesh_w2"
    refused(UnsupportedFormatError, "layout", reshard, source, tmp_path / "new", world_size=2)


def test_side_files_that_lead_out_or_are_too_large_are_named_and_not_copied(zoo, tmp_path):
    source = copied(zoo / "hf_ref_llama_untied", tmp_path / "source")
    (tmp_path / "secret").write_text("{}")
    (source / "vocab.json").symlink_to(tmp_path / "secret")
    (source / "tokenizer.model").touch()
    os.truncate(source / "tokenizer.model", 1 << 40)
    report = reshard(str(source), str(tmp_path / "new"), world_size=2)
    assert "vocab.json was not copied: it is a symlink" in report.notes
    assert any(note.startswith("tokenizer.model was not copied: more than") for note in report.notes)
    assert not {"vocab.json", "tokenizer.model"} & {*names(tmp_path / "new")}


def test_a_scheduler_of_another_system_loads_into_a_torch_scheduler_and_skipped_objects_are_named(zoo, tmp_path):
    report = reshard(str(zoo / "hf_trainer_fsdp2_sharded_w2"), str(tmp_path / "new"), world_size=2)
    objects = open_source(str(tmp_path / "new")).catalog.objects
    assert any("rng_state_0" in note and "reseeded" in note for note in report.notes)
    assert objects["extra.trainer_state"].value["global_step"] == 2
    groups = [{"params": [torch.zeros(1)]} for _ in range(2)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups, lr=1.0), lambda step: 1.0)
    scheduler.load_state_dict(decode(objects["scheduler"].value, str))
    assert scheduler.last_epoch == 2


DCPS = (
    "dcp_appstate_w2", "dcp_dtensor_2d", "dcp_fsdp2_uneven_w4", "dcp_hsdp_2x2", "dcp_threads2_w2",
    "dcp_torchtitan_like_w2", "dcp_zstd_w2", "fsdp1_dcp_sharded_nomesh_w2", "lightning_real_mp_w2",
    "lightning_trainer_fsdp_w2", "megatron_torch_dist_emulated", "torchtitan_llama3_names_w2",
)  # fmt: skip


def loaded_by_torch(url: str) -> dict[str, Any]:
    """Return everything that torch loads from a checkpoint, by key."""
    reader = dcp.FileSystemReader(url)
    state: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        state[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _contains(made: str, source: str) -> None:
    """Assert that torch loads from the first checkpoint all that it loads from the second."""
    found, wanted = loaded_by_torch(made), loaded_by_torch(source)
    assert wanted and [key for key in wanted if key not in found or not same(wanted[key], found[key])] == []


BESIDE = {  # systems whose model and optimizer are two DCPs
    "accelerate_fsdp2_sharded_llama_tied_w2": ("pytorch_model_fsdp_0", "optimizer_0"),
    "lightrft_naive_optim_w2": ("",),
}


@pytest.mark.parametrize("name", [*DCPS, *BESIDE])
@pytest.mark.parametrize("ranks", [1, 3])
def test_torch_loads_the_same_values_from_source_and_result(zoo, tmp_path, name, ranks):
    source, made, again = open_source(str(zoo / name)).url, str(tmp_path / "made"), str(tmp_path / "again")
    reshard(source, made, world_size=ranks, verify=True)
    assert verify(made).ok
    reshard(made, again, world_size=2)
    for result in (made, again):
        for part in BESIDE.get(name, ("",)):
            _contains(result, f"{source}/{part}".rstrip("/"))
        paths = [dcp.FileSystemReader(url).read_metadata().planner_data for url in (source, result) if name in DCPS]
        assert not paths or paths[0].items() <= paths[1].items()


def _nested(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "net": {"up.weight": torch.randn(7, 5), "up.bias": torch.randn(7).bfloat16(), "count": torch.tensor(seed)},
        "optim": {
            "state": {"up.weight": {"exp_avg": torch.randn(7, 5), "step": 3 + seed}},
            "param_groups": [{"lr": 0.1 + seed, "betas": (0.9, 0.99), "params": ["up.weight"], "note": None}],
        },
        "step": 40 + seed, "name": f"run {seed}", "raw": bytes([seed, 1, 2]), "ratio": float("nan") if seed else 0.5,
        "list": [1, torch.randn(3), {"deep": "text"}], "scheduler": {"last_epoch": 4, "_last_lr": [0.1]},
    }  # fmt: skip


@pytest.mark.parametrize("mesh", [None, "replicate=2,shard=2"])
def test_a_nested_state_keeps_its_values(tmp_path, mesh):
    source, made = str(tmp_path / "any"), str(tmp_path / "made")
    dcp.save(_nested(1), checkpoint_id=source, no_dist=True)
    reshard(source, made, world_size=4, mesh=mesh)
    for reader in (dcp.FileSystemReader(made), DCPReader(made)):
        state = _nested(0)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert same(state, _nested(1))


def test_the_step_comes_from_the_checkpoint_or_its_name_or_is_reported_unknown(tmp_path):
    cases = {
        "any": ({"step": 12}, 12), "train": ({"train_state": {"step": torch.tensor(7)}}, 7), "step-31": ({}, 31),
        "script": ({"iter_num": 5}, 5), "unknown": ({}, 0),
    }  # fmt: skip
    for name, (state, step) in cases.items():
        dcp.save({"w": torch.ones(4), **state}, checkpoint_id=str(tmp_path / name), no_dist=True)
        report = reshard(str(tmp_path / name), str(tmp_path / f"{name}_made"), world_size=1)
        assert f"committed as step {step} of 1 rank" in report.proof()
        assert any("does not record its step" in note for note in report.notes) is (name == "unknown")


def test_a_flipped_bit_in_a_value_is_found_before_the_commit(tmp_path):
    source = tmp_path / "any"
    dcp.save({"w": torch.ones(4), "name": "a" * 400}, checkpoint_id=str(source), no_dist=True)
    (file,) = source.glob("*.distcp")
    flip(file, file.read_bytes().index(b"a" * 100) + 50)
    said = r"'name': member .* does not match its CRC-32"
    refused(CorruptCheckpointError, said, reshard, source, tmp_path / "made", world_size=1)


@pytest.mark.parametrize("widths", [(3, 4, 2), (3, 3, 3)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_numbered_optimizer_keeps_its_state_if_order_and_shapes_prove_the_names(tmp_path, widths, frozen, tied):
    """With a frozen layer, layers of equal shapes cannot be told apart. The optimizer lists a tied weight where it
    occurs first."""
    proved = not (frozen and widths == (3, 3, 3))

    def job(steps: int) -> TrainState:
        layers = torch.nn.Linear(*widths[:2]), torch.nn.Linear(*widths[1:]), torch.nn.BatchNorm1d(widths[2])
        model = torch.nn.Sequential(*layers)
        if tied:
            model.again = torch.nn.Identity()
            model.again.weight = model[frozen].weight
        groups = [
            {"params": [p for p in model[frozen:].parameters() if (p.ndim > 1) is decay], "weight_decay": 0.1 * decay}
            for decay in (True, False)
        ]
        return trained(model, params=groups, lr=0.25, steps=steps)

    saved, live = job(steps=1), job(steps=0)
    optimizer = saved.optimizer.state_dict()
    optimizer["state"][0] = {**optimizer["state"][0], "step": 1}  # older versions of torch count in plain numbers
    content = {"state_dict": saved.model.state_dict(), "optimizer_states": [optimizer], "step": 3}
    torch.save(content, tmp_path / "a.ckpt")
    report = reshard(str(tmp_path / "a.ckpt"), str(tmp_path / "run" / "step_00000003"), world_size=2)
    said = "matched to the model's by order and shape" if proved else "do not prove which is which"
    assert any(said in note for note in report.notes)
    load(tmp_path / "run", live, optimizer="restore" if proved else "skip")
    assert_same(live.model.state_dict(), saved.model.state_dict())
    if proved:
        check_resumed(live, saved)


def linear(*, prefix: str | None = None, **options: Any) -> TrainState:
    """Return a linear model with a trained AdamW; with a prefix, the optimizer knows the names, with this prefix."""
    model = torch.nn.Linear(3, 2)
    named = [(f"{prefix}{name}", parameter) for name, parameter in model.named_parameters()]
    return trained(model, params=None if prefix is None else named, **options)


def check_continues(run: Path, saved: TrainState, url: str = "latest") -> Any:
    """Load into a fresh job; assert that it has the weights and moments of the saved one. Return its optimizer."""
    live = linear(steps=0)
    load(run, live, url)
    check_resumed(live, saved)
    return live.optimizer


def test_a_job_continues_from_a_state_with_custom_names(tmp_path):
    saved = linear(lr=0.25)
    weights, moments = get_state_dict(saved.model, saved.optimizer)
    dcp.save({"model": weights, "optim": moments, "step": 9}, checkpoint_id=str(tmp_path / "src"), no_dist=True)
    for kind, ranks in (("sharded", 2), ("local", 1)):
        made = str(tmp_path / kind / "step_00000009")
        reshard(str(tmp_path / "src"), made, world_size=ranks, type=kind)
        assert check_continues(tmp_path / kind, saved).param_groups[0]["lr"] == 0.25
    assert {"model.weight", "optimizer.state.weight.exp_avg"} <= open_source(made).catalog.tensors.keys()  # of "local"


@pytest.mark.parametrize("prefix", [None, "module."])
def test_the_prefix_of_ddp_is_stripped(tmp_path, prefix):
    saved = linear(prefix=prefix)
    weights = {f"module.{name}": value for name, value in saved.model.state_dict().items()}
    torch.save({"state_dict": weights, "optimizer": saved.optimizer.state_dict()}, tmp_path / "a.pt")
    for kind in ("sharded", "local"):
        made = reshard(str(tmp_path / "a.pt"), str(tmp_path / kind), world_size=1, type=kind).dst
        check_continues(tmp_path / "run", saved, made)


def test_lists_of_tensors_in_the_state_of_an_optimizer_stay_lists(tmp_path):
    saved = linear()
    for state in saved.optimizer.state.values():
        state["GG"] = [torch.randn(20, 20), [torch.randn(2), 3]]  # as in SOAP
    torch.save({"state_dict": saved.model.state_dict(), "optimizer": saved.optimizer.state_dict()}, tmp_path / "a.ckpt")
    reshard(str(tmp_path / "a.ckpt"), str(tmp_path / "run" / "step_00000003"), world_size=2)
    check_continues(tmp_path / "run", saved)
