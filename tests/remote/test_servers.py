"""The life of a run on each server, with faults of the server; sources on the Hub."""

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable

import pytest
from torch import nn

from ckptkit import TrainState, diff
from tests.checkpoint import states
from tests.remote.runs import TWO, Place, on, run_cli, state_of
from tests.storage import servers
from tests.storage.hub import running_hub


def printed(place: Place, *args: str) -> str:
    code, text = place.cli(*args)
    assert code == 0, (args, text)
    return text


FOREIGN = {"notes/readme.txt": b"mine", "step_00000007/data.bin": b"another's", "loose.json": b"{}"}


@on("s3", "gcs", "rclone", "versioned")
def test_a_run_works_on_every_server_and_touches_nothing_foreign(near, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path / "empty")
    for path, data in FOREIGN.items():
        near.store.write(path, data)
    with near.manager(retention=TWO) as manager:
        manager.save(1, state_of(3), metrics={"loss": 2.0})
        manager.save_async(2, state_of(3)).result()
        manager.save(3, state_of(3), metrics={"loss": 1.0})
        assert [record.step for record in manager.list()] == [2, 3]
    near.loads(3)
    near.save(4, retention=TWO)
    listed = json.loads(printed(near, "ls", near.url, "--json"))
    assert [item["step"] for item in listed["checkpoints"] if item["state"] == "committed"] == [3, 4]
    assert "step_00000007" in [item["name"] for item in listed["checkpoints"] if item["state"] == "skipped"]
    assert json.loads(printed(near, "inspect", f"{near.url}/latest", "--json"))["step"] == 4
    printed(near, "verify", f"{near.url}/step_00000004")
    two, plain = near.beside("two").url, near.beside("plain").url
    printed(near, "reshard", f"{near.url}/step_00000004", two, "--world-size", "2")
    printed(near, "convert", two, plain, "--to", "dcp")
    assert not diff(two, plain, storage_options=near.options).differs
    before = near.objects()
    printed(near, "prune", near.url, "--max-num", "1", "--dry-run")
    assert near.objects() == before
    printed(near, "prune", near.url, "--max-num", "1")
    assert near.steps() == [4]
    assert "step_00000003" not in near.top()
    code, text = near.cli("verify", f"{near.url}/step_00000003")
    assert code == 1 and ("step_00000003 does not exist" in text or near.url.startswith("s3://versioned"))
    near.save(3)  # the name is free again
    near.loads(3)
    assert FOREIGN.items() <= near.objects().items()
    assert near.store.unfinished_uploads() == []
    assert list((tmp_path / "empty").iterdir()) == []  # also conversions make no local file


def traced(first: Callable[[], object], then: Callable[[], object]) -> int:
    """Return how many bytes a call allocates at most in Python, after a call that imports and makes clients."""
    tracemalloc.start()
    try:
        first()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        then()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@on("rclone")  # a process of its own: what it holds does not count
def test_a_checkpoint_is_resharded_from_bucket_to_bucket_in_bounded_memory(near, small_parts, monkeypatch):
    part = 5 << 20
    monkeypatch.setattr("ckptkit.storage.connection._HELD_BYTES", 4 * part)
    # Memory that Python traces, without mapped memory.
    monkeypatch.setattr("ckptkit.storage.body._block", lambda: memoryview(bytearray(4 << 20)))
    for name, rows in (("small", 8), ("large", 4096)):  # 64 MiB
        state = TrainState(model=nn.Linear(4096, rows, bias=False))
        states.save((near / name).url, state, storage_options=near.options)

    def halve(name: str) -> None:
        (near / name / "step_00000001").reshard(near / f"half-{name}", world_size=2, max_memory="8MB", workers=1)

    most = traced(lambda: halve("small"), lambda: halve("large"))
    assert most < 1.25 * (8e6 + 7 * part)  # 4 parts on their way, two being filled, one being sent


@on("rclone")
def test_a_save_uploads_without_a_copy_of_the_model(near):
    small = TrainState(model=nn.Linear(1024, 8, bias=False))
    large = TrainState(model=nn.Linear(2048, 6400, bias=False))  # 50 MiB of torch's memory, in two files
    with near.manager() as manager:
        most = traced(lambda: manager.save(1, small), lambda: manager.save(2, large))
    assert most < 1.25 * (16 << 20)  # 2 MiB in flight for each of 8 requests


# --- faults


@pytest.mark.parametrize("command", ["ls", "verify", "prune --max-num 1", "convert {}/x"])
def test_an_unreachable_server_is_one_error_of_each_command(near, impatient, tmp_path, command):
    nobody = near.by(endpoint_url=f"http://127.0.0.1:{servers.free_port()}")
    name, *rest = command.format(tmp_path).split()
    code, text = nobody.cli(name, near.url, *rest)
    errors = [line for line in text.splitlines() if line.startswith("Error")]
    assert code == 1 and len(errors) == 1 and "CKPTKIT_STORAGE_TIMEOUT" in errors[0], text
    assert "Traceback" not in text and near.options["secret"] not in text
    assert list(tmp_path.iterdir()) == []


def test_missing_credentials_say_where_to_set_them(s3, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    code, text = run_cli("ls", "s3://bucket/run", options={"endpoint_url": s3["endpoint_url"]})
    assert code == 1 and "AWS_ACCESS_KEY_ID" in text and "--storage-option" in text


# --- the Hub


def test_a_hub_repository_is_a_source(zoo, tmp_path):
    model = zoo / "hf_ref_llama_tied"
    with running_hub(**{path.name: path.read_bytes() for path in model.iterdir()}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment["HF_HOME"] = str(tmp_path / "cache")
        command = [sys.executable, "-m", "ckptkit", "convert", "hf://me/model", str(tmp_path / "out"), "--to", "dcp"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not diff(str(model), str(tmp_path / "out")).differs
    assert "model.safetensors" in hub.ranges  # read in place: no copy of the repo was made first
    assert not any((tmp_path / "cache").rglob("*.safetensors"))
