"""Killed at any point and run again: the same bytes, no leftovers. `benchmarks/faults/resumed.py` runs many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offline.resumes import kill_on_disk, kill_remote, make_source, objects, run_remote
from tests.storage import servers
from tests.storage.proxy import proxy_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("kills"), tensors=24, rows=64, ranks=8)


@pytest.mark.parametrize(("first", "second", "seeds"), [(1, 1, range(8)), (3, 2, range(2))])
def test_a_run_killed_at_any_file_operation_can_be_continued(source, tmp_path, first, second, seeds):
    for name in ("in", "m"):
        (tmp_path / name).symlink_to(source.parent / name)
    options = {"max_shard_size": "300kB", "workers": 1}
    found = [kill_on_disk(tmp_path / "in", tmp_path, first, second, options, seed) for seed in seeds]
    assert all(again is None or not again.taken or again.moved < again.whole for again in found)
    assert any(again is not None for again in found)


def test_an_upload_killed_at_any_request_can_be_continued(tmp_path: Path) -> None:
    from ckptkit.storage.open import open_store

    source = make_source(tmp_path, tensors=10, rows=1536, ranks=2)
    options = {"max_shard_size": "16MB", "workers": 1}
    with servers.moto() as s3, proxy_of(s3["endpoint_url"]) as proxy:
        through = {**s3, "endpoint_url": proxy.url}
        open_store("s3://resumed", storage_options=through).fs.mkdir("resumed")
        run_remote(source, "s3://resumed/whole", through, options)
        whole, expected = proxy.sent, objects("s3://resumed/whole", through)
        for nth in (12, 18):
            found = kill_remote(source, f"s3://resumed/{nth}", proxy, through, options, nth, carried_out=nth == 12)
            assert found is not None and (not found[0] or found[1] < whole)
            assert objects(f"s3://resumed/{nth}", through) == expected
