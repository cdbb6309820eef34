"""The life of a run on each server, with faults of the server; sources on the Hub."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CkptkitError
from ckptkit.offline.diff import diff
from ckptkit.offline.reshard import reshard
from ckptkit.storage import open_store
from tests.checkpoint import states
from tests.remote.hub import hub_of
from tests.remote.runs import Options, full, objects, run_cli, same, state_of, steps, top_names
from tests.storage import servers
from tests.storage.proxy import PASS, Proxy


@dataclass(frozen=True)
class Place:
    url: str
    options: Options

    def store(self) -> Any:
        return open_store(self.url, storage_options=self.options)

    def cli(self, *args: str) -> str:
        code, text = run_cli(*args, options=self.options)
        assert code == 0, (args, text)
        return text


@contextmanager
def _place(kind: str, folder: Path) -> Iterator[Place]:
    if kind == "rclone":
        made, scheme = servers.rclone(folder, bucket="servers"), "s3"
    elif kind == "moto":
        made, scheme = servers.moto("servers"), "s3"
    else:
        made, scheme = servers.fake_gcs("servers"), "gs"
    with made as options:
        yield Place(f"{scheme}://servers/run", options)


@pytest.fixture(params=["moto", "rclone", "gcs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with _place(request.param, tmp_path) as made:
        yield made


FOREIGN = {"notes/readme.txt": b"mine", "step_00000007/data.bin": b"another's", "loose.json": b"{}"}


def test_a_run_works_on_every_server_and_touches_nothing_foreign(place: Place) -> None:
    for path, data in FOREIGN.items():
        place.store().write(path, data)
    state = state_of(3)
    with CheckpointManager(place.url, retention=RetentionPolicy(max_num=2), storage_options=place.options) as manager:
        manager.save(1, state, metrics={"loss": 2.0})
        manager.save_async(2, state).result()
        manager.save(3, state, metrics={"loss": 1.0})
        assert [record.step for record in manager.list()] == [2, 3]
    _resume(place, full(state))
    _look(place)
    _change(place)
    assert {path: place.store().read(path) for path in FOREIGN} == FOREIGN
    assert place.store().unfinished_uploads() == []


def _resume(place: Place, expected: dict[str, torch.Tensor]) -> None:
    other = state_of(99)
    with CheckpointManager(place.url, retention=RetentionPolicy(max_num=2), storage_options=place.options) as manager:
        assert manager.load(other) is not None and manager.latest() == 3
        assert same(full(other), expected)
        manager.save(4, other)


def _look(place: Place) -> None:
    listed = json.loads(place.cli("ls", place.url, "--json"))
    assert [item["step"] for item in listed["checkpoints"] if item["state"] == "committed"] == [3, 4]
    assert "step_00000007" in [item["name"] for item in listed["checkpoints"] if item["state"] == "skipped"]
    assert json.loads(place.cli("inspect", f"{place.url}/latest", "--json"))["step"] == 4
    place.cli("verify", f"{place.url}/step_00000004")


def _change(place: Place) -> None:
    base = place.url.rpartition("/")[0]
    place.cli("reshard", f"{place.url}/step_00000004", f"{base}/two", "--world-size", "2")
    place.cli("convert", f"{base}/two", f"{base}/plain", "--to", "dcp")
    assert not diff(f"{base}/two", f"{base}/plain", storage_options=place.options).differs
    before = objects(place.url, place.options)
    place.cli("prune", place.url, "--max-num", "1", "--dry-run")
    assert objects(place.url, place.options) == before
    place.cli("prune", place.url, "--max-num", "1")
    assert steps(place.url, place.options) == [4]
    assert "step_00000003" not in top_names(place.url, place.options)


def test_a_checkpoint_is_resharded_from_bucket_to_bucket_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 5 << 20
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", part)
    monkeypatch.setattr("ckptkit.storage.connection._HELD_BYTES", 4 * part)
    # Memory that Python traces, without mapped memory.
    monkeypatch.setattr("ckptkit.storage.body._block", lambda: memoryview(bytearray(4 << 20)))
    with _place("rclone", tmp_path) as place:  # a process of its own: what it holds does not count
        _reshard(place, part)


def test_a_save_uploads_without_a_copy_of_the_model(tmp_path: Path) -> None:
    small, large = nn.Linear(1024, 8, bias=False), nn.Linear(2048, 6400, bias=False)  # 50 MiB, in two files
    with _place("rclone", tmp_path) as place, CheckpointManager(place.url, storage_options=place.options) as manager:
        manager.save(1, TrainState(model=small))  # imports, clients
        tracemalloc.start()  # of Python alone: the model's own memory is torch's
        try:
            before, _ = tracemalloc.get_traced_memory()
            manager.save(2, TrainState(model=large))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most - before < 1.25 * (16 << 20)  # 2 MiB in flight for each of 8 requests


def _reshard(place: Place, part: int) -> None:
    base = place.url.rpartition("/")[0]
    for name, rows in (("small", 8), ("large", 4096)):  # 64 MiB
        state = TrainState(model=nn.Linear(4096, rows, bias=False))
        states.save(f"{base}/{name}", state, storage_options=place.options)

    def halve(name: str) -> None:
        source, target = f"{base}/{name}/step_00000001", f"{base}/half-{name}"
        reshard(source, target, world_size=2, max_memory="8MB", workers=1, storage_options=place.options)

    tracemalloc.start()
    try:
        halve("small")  # imports, clients
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        halve("large")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - before < 1.25 * (8e6 + 7 * part)  # 4 parts on their way, two being filled, one being sent


# --- faults


@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_server_that_dies_during_a_save_keeps_the_previous_checkpoint(
    proxy: Proxy, options: Options, url: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "100ms")
    state = state_of(3)
    with CheckpointManager(url, storage_options=options) as manager:
        manager.save(1, state)
        proxy.clear()
        proxy.rule = lambda number, method, path: "reset" if number > after else "pass"
        with pytest.raises((CkptkitError, OSError)):
            manager.save(2, state)
        proxy.rule = PASS
        assert manager.latest() == 1
        manager.save(3, state)
        assert manager.load(state_of(99)) is not None and manager.latest() == 3
    assert "step_00000002" not in top_names(url, options)


def test_an_unreachable_server_is_one_error_of_each_command(
    s3: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "100ms")
    nobody = {**s3, "endpoint_url": f"http://127.0.0.1:{servers.free_port()}"}
    url = "s3://remote/run"
    for command in (
        ["ls", url],
        ["verify", url],
        ["prune", url, "--max-num", "1"],
        ["convert", url, str(tmp_path / "x")],
    ):
        code, text = run_cli(*command, options=nobody)
        errors = [line for line in text.splitlines() if line.startswith("Error")]
        assert code == 1 and len(errors) == 1 and "CKPTKIT_STORAGE_TIMEOUT" in errors[0], text
        assert "Traceback" not in text and s3["secret"] not in text
    assert list(tmp_path.iterdir()) == []


def test_missing_credentials_say_where_to_set_them(
    s3: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    code, text = run_cli("ls", "s3://remote/run", options={"endpoint_url": s3["endpoint_url"]})
    assert code == 1 and "AWS_ACCESS_KEY_ID" in text and "--storage-option" in text


def test_a_missing_s3fs_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("fsspec.registry")  # the package has a table of that name, too
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    code, text = run_cli("ls", "s3://remote/run")
    assert code != 0 and "pip install -e '.[s3]'" in text


# --- the Hub


def test_a_hub_repository_is_a_source(zoo: Path, tmp_path: Path) -> None:
    model = zoo / "hf_ref_llama_tied"
    with hub_of(model) as (endpoint, ranges):
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment["HF_HOME"] = str(tmp_path / "cache")
        command = [sys.executable, "-m", "ckptkit", "convert", "hf://me/model", str(tmp_path / "out"), "--to", "dcp"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not diff(str(model), str(tmp_path / "out")).differs
    assert "model.safetensors" in ranges  # read in place: no copy of the repo was made first
    assert not any((tmp_path / "cache").rglob("*.safetensors"))
