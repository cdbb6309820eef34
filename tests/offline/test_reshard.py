"""Reshard: a checkpoint of one mesh loads, bit for bit, on any other."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from ckptkit import reshard, verify
from ckptkit.catalog.entry import Digest
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.errors import IncompleteCheckpointError, IntegrityError, UsageError
from ckptkit.formats.detect import open_source
from ckptkit.formats.own.record import read_record
from ckptkit.storage import open_store
from tests.checkpoint import jobs
from tests.checkpoint.states import linear, save
from tests.offline import reshard_jobs
from tests.offline.folders import copied, flip, refused

TYPES = ("sharded", "local")
TP_PLAN = {"up.*": 0, "down.weight": 1}


@pytest.fixture(scope="module")
def runs(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saved runs by (layout, world size), created once: (folder with "sharded" and "local", every value)."""

    @functools.cache
    def run(layout: str, world_size: int) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("run")
        return folder, ranks.run(reshard_jobs.save, world_size, str(folder), layout, TYPES)[0]

    return run


def at(folder: Path, kind: str) -> str:
    return str(folder / kind / "step_00000002")


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_every_world_size_loads_the_reshard_of_any_other(ranks, runs, tmp_path, saved, loaded):
    folder, numbers = runs("1d", saved)
    for source, kind in itertools.product(TYPES, TYPES):
        made = str(tmp_path / f"{source}-{kind}" / "step_00000002")
        reshard(at(folder, source), made, world_size=loaded, type=kind, verify=True)
        assert ranks.run(reshard_jobs.load, loaded, made, "1d") == [numbers] * loaded


MESHES = {"1d": None, "hsdp": "replicate=2,shard=2", "tp": "shard=2,tp=2"}


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(MESHES, 2), ("tp", "tp")])
def test_a_mesh_change_keeps_every_value(ranks, runs, tmp_path, before, after):
    folder, numbers = runs(before, 4)
    plan = TP_PLAN if after == "tp" and before != "tp" else None  # the source's placements are known
    for kind in TYPES:
        made = str(tmp_path / kind / "step_00000002")
        reshard(at(folder, kind), made, world_size=4, mesh=MESHES[after], type=kind, tp_plan=plan)
        assert ranks.run(reshard_jobs.load, 4, made, after) == [numbers] * 4


def test_an_error_names_a_missing_rank_file_and_its_rank(runs, tmp_path):
    copy = copied(Path(at(runs("1d", 3)[0], "local")), tmp_path / "step_00000002")
    (copy / "local_00001.safetensors").unlink()
    said = r"local_00001.safetensors \(written by rank 1\) is missing"
    refused(IncompleteCheckpointError, said, reshard, copy, tmp_path / "new", world_size=2)


@pytest.mark.parametrize("kind", TYPES)
def test_an_error_names_the_tensor_of_a_flipped_bit_in_the_source(runs, tmp_path, kind):
    copy = copied(Path(at(runs("1d", 3)[0], kind)), tmp_path / "step_00000002")
    part = next(s for s in open_source(str(copy)).catalog.tensors["model.up.weight"].slices if s.rank == 1)
    flip(copy / part.path, part.start + 5, bit=2)
    refused(IntegrityError, r"model\.up\.weight", reshard, copy, tmp_path / "new", world_size=2)


@pytest.mark.parametrize("kind", TYPES)
def test_the_result_passes_verify_and_keeps_the_fields_of_the_record(runs, tmp_path, kind):
    made = str(tmp_path / "step_00000002")
    reshard(at(runs("1d", 2)[0], "sharded"), made, world_size=3, type=kind)
    report = verify(made)
    assert report.ok and (report.unproved_bytes, report.unproved_files, report.algorithms) == (0, (), ("xxh3_64",))
    slices = [part for entry in open_source(made).catalog.tensors.values() for part in entry.slices]
    assert all(part.digest == Digest("xxh3_64", part.digest.value, part.start, part.nbytes) for part in slices)
    record = read_record(open_store(made))
    assert (record.metrics, record.client_state, record.world_size) == ({"loss": 0.5}, {"seen": 3}, 3)
    assert record.state_dict_type == kind


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_job_with_buffers_loads_the_local_reshard_of_an_unsharded_checkpoint(ranks, tmp_path, kind):
    saved = reshard_jobs.normed(sharded=False)
    save(tmp_path, saved, state_dict_type=kind)
    reshard(f"{tmp_path}/latest", f"{tmp_path}/local/step_00000001", world_size=2, type="local")
    expected = jobs.numbers(saved.model, saved.optimizer)
    assert ranks.run(reshard_jobs.load_normed, 2, f"{tmp_path}/local") == [expected] * 2


@pytest.mark.parametrize("beside", [True, False])
def test_a_reshard_is_listed_at_the_position_of_its_source_or_of_its_step(runs, tmp_path, beside):
    run = tmp_path / "run"
    for step in (1, 3):
        save(run, linear(), step)
    source = str(run / "step_00000001") if beside else at(runs("1d", 2)[0], "sharded")
    reshard(source, str(run / "new"), world_size=2)
    committed = list_checkpoints(open_store(str(run))).committed
    assert [item.name for item in committed] == ["step_00000001", "new", "step_00000003"]


@pytest.mark.parametrize("name", ["step_00000003", "3", "latest", "with space"])
def test_a_destination_name_of_another_step_is_refused(runs, tmp_path, name):
    source = at(runs("1d", 2)[0], "sharded")
    refused(UsageError, "step 3|refused", reshard, source, tmp_path / name, world_size=2)


@pytest.mark.parametrize(("plan", "said"), [(None, "--tp-plan"), ({"upp.*": 0}, "'upp")])
def test_a_tp_mesh_needs_a_plan_that_matches(runs, tmp_path, plan, said):
    options = {"world_size": 2, "mesh": "tp=2", "tp_plan": plan}
    refused(UsageError, said, reshard, at(runs("1d", 2)[0], "sharded"), tmp_path / "new", **options)


def test_per_rank_state_keeps_its_keys_and_plain_torch_finds_the_optimizer_settings(runs, tmp_path):
    made = str(tmp_path / "step_00000002")
    report = reshard(at(runs("1d", 3)[0], "local"), made, world_size=2)
    objects = open_source(made).catalog.objects
    assert {f"{kind}.{rank}" for kind in ("rng", "dataloader") for rank in range(3)} <= set(objects)
    assert any("rng_on_resize" in note for note in report.notes)
    known = FileSystemReader(made).read_metadata().state_dict_metadata
    assert {f"optimizer.param_groups.{key}" for key in ("0.lr", "1.params", "1.param_names")} <= set(known)
