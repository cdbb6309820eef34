"""The digests that a reshard records for every slice, object and file, and the damage that they find."""

import json
from typing import Any

import pytest
import torch.distributed as dist
import xxhash

from ckptkit import convert, open_checkpoint, reshard
from ckptkit.catalog.entry import Digest
from ckptkit.checkpoint.run.pins import list_pins
from ckptkit.formats.detect import open_source
from ckptkit.offline import reading
from ckptkit.storage import open_store
from tests.checkpoint import killed
from tests.checkpoint.states import save


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_every_slice_object_and_file_has_the_digest_of_its_bytes(zoo, tmp_path, kind):
    reshard(str(zoo / "dcp_fsdp2_uneven_w4"), str(tmp_path / "new"), world_size=3, type=kind)
    files = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    catalog = open_source(str(tmp_path / "new")).catalog
    slices = [part for entry in catalog.tensors.values() for part in entry.slices]
    objects = [entry for entry in catalog.objects.values() if entry.encoding == "torch_save"]
    assert slices and (objects or kind == "local")
    for part in (*slices, *objects):
        data = files[part.path][part.start : part.start + part.nbytes]
        assert part.digest == Digest("xxh3_64", xxhash.xxh3_64_intdigest(data), part.start, part.nbytes)
    record = json.loads(files["checkpoint.json"])
    digests = {name: xxhash.xxh3_64_hexdigest(data) for name, data in files.items() if name != "checkpoint.json"}
    assert {name: item["xxh3_64"] for name, item in record["files"].items()} == digests


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
