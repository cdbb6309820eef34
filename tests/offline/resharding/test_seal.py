"""The digests that a reshard records for every slice, object and file, and the damage that they find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import xxhash

from ckptkit import convert, open_checkpoint, reshard, verify
from ckptkit.catalog.entry import Digest
from ckptkit.checkpoint.run.pins import list_pins
from ckptkit.formats.detect import open_source
from ckptkit.offline import reading
from ckptkit.storage.open import open_store
from tests.checkpoint import killed
from tests.checkpoint.states import save


def made(zoo: Path, tmp_path: Path, kind: str = "sharded", **options: Any) -> Path:
    reshard(str(zoo / "dcp_fsdp2_uneven_w4"), str(tmp_path / "new"), world_size=3, type=kind, **options)
    return tmp_path / "new"


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_every_slice_and_file_has_the_digest_of_its_bytes(zoo, tmp_path, kind):
    folder = made(zoo, tmp_path, kind)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    slices = [part for entry in open_source(str(folder)).catalog.tensors.values() for part in entry.slices]
    assert slices
    for part in slices:
        data = files[part.path][part.start : part.start + part.nbytes]
        assert part.digest == Digest("xxh3_64", xxhash.xxh3_64_intdigest(data), part.start, part.nbytes)
    record = json.loads(files["checkpoint.json"])
    digests = {name: xxhash.xxh3_64_hexdigest(data) for name, data in files.items() if name != "checkpoint.json"}
    assert {name: item["xxh3_64"] for name, item in record["files"].items()} == digests


def test_every_object_has_a_digest(zoo, tmp_path):
    folder = made(zoo, tmp_path)
    objects = open_source(str(folder)).catalog.objects
    records = [entry for entry in objects.values() if entry.encoding == "torch_save"]
    assert records
    for entry in records:
        data = (folder / entry.path).read_bytes()[entry.start : entry.start + entry.nbytes]
        assert entry.digest is not None and entry.digest.value == xxhash.xxh3_64_intdigest(data)


def converts_what_rank_0_chose(run: str, target: str) -> list[str]:
    """Convert and reshard the run while rank 1 chooses another step as the latest."""
    real = reading.resolve_url

    def outdated(url: str, **options: Any) -> str:
        return f"{run}/step_00000001" if url == run and dist.get_rank() else real(url, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "resolve_url", outdated)
        hf = convert(run, f"{target}/hf", max_shard_size=60)
        dcp = reshard(run, f"{target}/step_00000002", world_size=2)
    return [hf.opened, dcp.opened]


def test_ranks_of_torchrun_read_the_checkpoint_that_rank_0_has_chosen(ranks, tmp_path):
    run = str(tmp_path / "run")
    for step in (1, 2):
        save(run, killed.state(step), step)
    found = ranks.run(converts_what_rank_0_chose, 2, run, str(tmp_path))
    assert found == [[f"{run}/step_00000002"] * 2] * 2
    assert (open_checkpoint(f"{tmp_path}/hf")["weight"].numpy() == killed.content(2, 0)).all()
    assert (open_checkpoint(f"{tmp_path}/step_00000002")["model.weight"].numpy() == killed.content(2, 0)).all()
    assert list_pins(open_store(run)) == []


def test_a_reshard_can_write_to_an_object_store(zoo):
    target = "memory://reshard-seal/step_00000000"
    reshard(str(zoo / "dcp_fsdp2_uneven_w4"), target, world_size=3, verify=True)
    assert verify(target).ok
    assert open_source(target).catalog.info.world_size == 3
