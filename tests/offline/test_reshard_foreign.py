"""A run of another system resumes under FSDP2: weights, masters, moments, settings, schedulers, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.catalog.entry import Role, TensorEntry
from ckptkit.errors import IntegrityError, UnsupportedFormatError
from ckptkit.formats.detect import Source, open_source
from ckptkit.offline.convert import convert
from ckptkit.offline.reshard import reshard
from tests.formats.readback import contents, contents_of_state_dict
from tests.offline import reshard_jobs
from tests.offline.exports import assert_same
from tests.offline.folders import copied, flip
from tests.test_package import modules_after

# Each with whether it stores the state of a torch scheduler.
SOURCES = {
    "deepspeed_zero1_odd_sizes_w3": False, "deepspeed_zero2_bf16_w2": False, "deepspeed_zero3_bf16_tied_w2": False,
    "accelerate_fsdp2_sharded_llama_tied_w2": False, "accelerate_fsdp2_nodcp_llama_untied_w2": False,
    "hf_trainer_fsdp2_sharded_w2": True, "lightning_trainer_fsdp_w2": True, "lightrft_naive_optim_w2": True,
    "dcp_torchtitan_like_w2": True, "dcp_appstate_w2": False, "verl_fsdp2_w2": False, "verl_fsdp1_nomesh_w2": False,
    "fsdp1_dcp_sharded_nomesh_w2": False,
}  # fmt: skip
TIED = {"lm_head.weight": "model.embed_tokens.weight", "head.weight": "embed.weight"}


def _by_fqn(source: Source, role: Role) -> dict[str, TensorEntry]:
    return {e.fqn + (f".{e.state}" if role is Role.OPTIMIZER else ""): e
            for e in source.catalog.tensors.values() if e.role is role and e.fqn}  # fmt: skip


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


def _equal(source: Source, entry: TensorEntry, found: torch.Tensor) -> bool:
    return contents(source.store, {"w": entry}) == contents_of_state_dict({"w": found})


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_of_another_system_continues_with_its_state(ranks: Any, zoo: Path, tmp_path: Path, name: str) -> None:
    source = open_source(str(zoo / name))
    made = str(tmp_path / "new")
    reshard(str(zoo / name), made, world_size=2, verify=True)
    groups = _groups(str(zoo / name), tmp_path)
    for weights, states, settings, loaded in ranks.run(reshard_jobs.go_on, 2, made, *_model(source), groups):
        model, moments = _by_fqn(source, Role.MODEL), _by_fqn(source, Role.OPTIMIZER)
        assert {fqn for fqn in model if not _equal(source, model[fqn], weights[fqn])} == set()
        assert moments.keys() <= states.keys()
        assert {key for key in moments if not _equal(source, moments[key], states[key])} == set()
        assert {key.rpartition(".")[2] for key in states} == {"step", "exp_avg", "exp_avg_sq"}
        assert all(group["lr"] != 123.0 for group in settings)
        assert "optimizer" in loaded
    assert ("scheduler" in open_source(str(tmp_path / "groups")).catalog.objects) is SOURCES[name]


def test_masters_of_lightrft_are_proved_to_belong_to_their_weights(ranks: Any, zoo: Path, tmp_path: Path) -> None:
    source = open_source(str(zoo / "lightrft_mp_optim_w2"))
    made = str(tmp_path / "new")
    report = reshard(source.url, made, world_size=3)
    assert "14 weights equal to the cast fp32 master" in report.proof()
    for _, states, _, _ in ranks.run(reshard_jobs.go_on, 3, made, *_model(source), _groups(source.url, tmp_path), True):
        masters, moments = _by_fqn(source, Role.MASTER), _by_fqn(source, Role.OPTIMIZER)
        assert {fqn for fqn in masters if not _equal(source, masters[fqn], states[f"{fqn}.master"])} == set()
        assert {key for key in moments if not _equal(source, moments[key], states[key])} == set()


@pytest.mark.parametrize("run", [partial(reshard, world_size=2), partial(convert, weights="master")])
def test_masters_that_do_not_match_the_weights_are_refused(run: Any, zoo: Path, tmp_path: Path) -> None:
    copy = copied(zoo / "lightrft_mp_optim_w2" / "global_step7", tmp_path / "global_step7")
    source = open_source(str(copy))
    part = next(iter(_by_fqn(source, Role.MASTER)["layers.0.norm.weight"].slices))
    flip(copy / part.path, part.start + 3, bit=6)
    with pytest.raises(IntegrityError, match=r"weights do not equal the fp32 master .* layers\.0\.norm\.weight"):
        run(str(copy), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_fsdp1_local_without_a_layout_is_refused_with_advice(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match="layout"):
        reshard(str(zoo / "fsdp1_local_state_dict_nomesh_w2"), str(tmp_path / "new"), world_size=2)


@pytest.mark.parametrize("name", ["verl_fsdp2_w2", "accelerate_fsdp2_nodcp_llama_untied_w2", "deepspeed_zero2_bf16_w2"])
def test_local_files_of_a_reshard_export_as_the_source_does(zoo: Path, tmp_path: Path, name: str) -> None:
    reshard(str(zoo / name), str(tmp_path / "local"), world_size=3, type="local")
    for source, target in ((str(zoo / name), "a"), (str(tmp_path / "local"), "b")):
        convert(source, str(tmp_path / target), to="torch")
    assert_same(*(torch.load(tmp_path / t / "pytorch_model.bin", weights_only=True) for t in "ab"))


def test_side_files_that_lead_out_or_are_too_large_are_named_and_not_copied(zoo: Path, tmp_path: Path) -> None:
    source = copied(zoo / "hf_ref_llama_untied", tmp_path / "source")
    (tmp_path / "secret").write_text("{}")
    (source / "vocab.json").symlink_to(tmp_path / "secret")
    with open(source / "tokenizer.model", "wb") as file:
        file.truncate(1 << 40)
    report = reshard(str(source), str(tmp_path / "new"), world_size=2)
    assert "vocab.json was not copied: it is a symlink" in report.notes
    assert any(note.startswith("tokenizer.model was not copied: more than") for note in report.notes)
    assert not {"vocab.json", "tokenizer.model"} & {path.name for path in (tmp_path / "new").iterdir()}


def test_skipped_objects_are_named_with_the_reason(zoo: Path, tmp_path: Path) -> None:
    report = reshard(str(zoo / "hf_trainer_fsdp2_sharded_w2"), str(tmp_path / "new"), world_size=2)
    assert any("rng_state_0" in note and "reseeded" in note for note in report.notes)
    assert open_source(str(tmp_path / "new")).catalog.objects["extra.trainer_state"].value["global_step"] == 2


def test_a_scheduler_of_another_system_loads_into_a_torch_scheduler(zoo: Path, tmp_path: Path) -> None:
    reshard(str(zoo / "hf_trainer_fsdp2_sharded_w2"), str(tmp_path / "new"), world_size=2)
    from ckptkit.checkpoint.state.values import decode

    tree = open_source(str(tmp_path / "new")).catalog.objects["scheduler"].value
    groups = [{"params": [torch.zeros(1)]} for _ in range(2)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups, lr=1.0), lambda step: 1.0)
    scheduler.load_state_dict(decode(tree, str))
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_a_reshard_does_not_import_torch(zoo: Path, tmp_path: Path, kind: str) -> None:
    source, made = str(zoo / "deepspeed_zero2_bf16_w2"), str(tmp_path / "new")
    call = f"reshard({source!r}, {made!r}, world_size=3, type={kind!r}, verify=True)"
    assert "torch" not in modules_after(f"from ckptkit.offline.reshard import reshard; {call}")
