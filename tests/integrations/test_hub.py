"""Pushing to a Hub repo, against a local server that speaks the Hub's upload protocol."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit import convert
from tests.cli.test_terminal import on_a_terminal
from tests.storage.hub import Hub, running_hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as made:
        yield made


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    save_file({"w": np.arange(8, dtype=np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def settings(hub: Hub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


def push(hub: Hub, *args: str, code: int = 0) -> str:
    """Run `ckptkit push` in a separate process, because huggingface_hub reads its endpoint at import.

    Check its exit code; return what it printed to stderr.
    """
    environment = {**os.environ, **settings(hub)}
    command = [sys.executable, "-m", "ckptkit", "push", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stderr


def test_a_push_uploads_every_visible_file_of_an_export_with_its_model_card(hub, zoo, tmp_path):
    convert(str(zoo / "hf_ref_llama_untied"), str(tmp_path / "out"), to="hf")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / ".hidden").write_text("secret")
    push(hub, str(tmp_path / "out"), "me/model")
    assert hub.files == expected
    assert b"library_name" in hub.files["README.md"]


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("request_of", ["/repos/create", "/preupload/", "/objects/batch", "/commit/"])
def test_a_push_retries_after_a_temporary_failure_of_the_hub(hub, export, request_of, status):
    hub.busy[request_of] = status
    push(hub, str(export), "me/model")
    assert sorted(hub.files) == ["config.json", "model.safetensors"]
    assert not hub.busy


def test_a_denied_push_exits_with_1(hub, export):
    hub.denied = True
    said = push(hub, str(export), "me/model", code=1)
    assert "me/model" in said and "Traceback" not in said and "hf_test" not in said


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_export_is_not_pushed(hub, zoo, tmp_path, damage):
    convert(str(zoo / "hf_ref_llama_untied"), str(tmp_path / "out"), to="hf", max_shard_size="20kB")
    first = min((tmp_path / "out").glob("*.safetensors"))
    data = first.read_bytes()
    first.unlink() if damage == "missing" else first.write_bytes(data[:-100])
    assert first.name in push(hub, str(tmp_path / "out"), "me/model", code=1) and not hub.files


def test_what_cannot_be_pushed_is_an_error(hub, export, tmp_path):
    (tmp_path / "empty").mkdir()
    push(hub, str(tmp_path / "empty"), "me/model", code=1)
    missing = push(hub, str(tmp_path / "exprot"), "me/model", code=1)
    assert missing == f"Error: {tmp_path}/exprot does not exist. Did you mean {tmp_path}/export?\n"
    push(hub, str(export), "not a repo!", code=2)  # wrong usage
    assert hub.files == {}


@pytest.mark.parametrize("quiet", [False, True])
def test_a_push_on_a_terminal_shows_progress_unless_quiet(hub, export, monkeypatch, quiet):
    save_file({"w": np.zeros(2_000_000, np.float32)}, export / "model.safetensors", metadata={"format": "pt"})
    for name, value in settings(hub).items():
        monkeypatch.setenv(name, value)
    command = ["push", str(export), "me/model", *(["--quiet"] if quiet else [])]
    code, screen = on_a_terminal(f"from ckptkit.cli.main import main\nmain({command!r})")
    assert code == 0, screen
    assert "pushed" in screen
    assert ("model.safetensors" in screen and "/8.00M" in screen) is not quiet, screen
