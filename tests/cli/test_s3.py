"""On S3: `inspect` and `ls` read only metadata, counted in bytes, and checkpoint names resolve correctly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.numpy import save_file

from ckptkit.offline.reshard import reshard
from ckptkit.storage import open_store
from tests.cli.commands import run, save_run
from tests.storage import proxy as proxies
from tests.storage import servers

DATA = 16 << 20  # bytes of tensors in each source; requests are small compared with them


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, Any]]:
    with servers.moto() as options:
        open_store("s3://looks", storage_options=options).fs.mkdir("looks")
        yield dict(options)


def _run(options: dict[str, Any], *args: str | Path) -> Result:
    return run(*args, *(word for key, value in options.items() for word in ("--storage-option", f"{key}={value}")))


def _big(folder: Path) -> None:
    tensors = {f"model.layers.{i}.w": np.full((1024, 1024), i, np.float32) for i in range(4)}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == DATA


def sources(folder: Path) -> dict[str, Callable[[], object]]:
    """Return a function for each kind of source that creates it below `folder`, by name."""
    base = folder / "safetensors"
    import torch.distributed.checkpoint as torch_dcp

    state = {f"layers.{i}.w": torch.full((1024, 1024), float(i)) for i in range(4)}
    return {
        "safetensors": lambda: _big(base),
        "sharded": lambda: reshard(str(base), str(folder / "sharded" / "step_00000001"), world_size=3),
        "torch": lambda: torch.save({"model": state}, folder / "torch.pt"),
        "dcp": lambda: torch_dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["safetensors", "sharded", "torch", "dcp"])
def test_inspect_reads_only_metadata(server, tmp_path, monkeypatch, kind):
    made = sources(tmp_path)
    for name in dict.fromkeys(("safetensors", kind)):
        made[name]()
    place = next(path for path in (tmp_path / kind, tmp_path / f"{kind}.pt") if path.exists())
    store = open_store("s3://looks", storage_options=server)
    store.fs.put(str(place), f"looks/{place.name}", recursive=place.is_dir())
    answered: list[int] = []
    forward = proxies._Handler.forward

    def counting(self: Any, body: bytes, **changed: str) -> Any:
        answer = forward(self, body, **changed)
        answered.append(len(answer[2]))
        return answer

    monkeypatch.setattr(proxies._Handler, "forward", counting)
    with proxies.proxy_of(server["endpoint_url"]) as proxy:
        options = {**server, "endpoint_url": proxy.url}
        result = _run(options, "inspect", f"s3://looks/{place.name}", "--json", "--tensors", "*")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert sum(tensor["nbytes"] for tensor in document["tensors"]) == DATA
    assert sum(answered) < DATA // 20


@pytest.mark.parametrize(("name", "step"), [("latest~1", 200), ("best", 100), ("300", 300)])
def test_a_name_selects_a_checkpoint_of_a_run_on_s3(server, tmp_path, name, step):
    root = f"s3://looks/{step}"
    save_run(root, storage_options=server)
    url, chosen = f"{root}/{name}", f"step_{step:08d}"
    assert json.loads(_run(server, "inspect", url, "--json").stdout)["step"] == step
    assert chosen in _run(server, "verify", url).output
    assert chosen in _run(server, "diff", url, f"{root}/latest").output
    assert chosen in _run(server, "convert", url, tmp_path / "out", "--dry-run").output
    assert f"pinned {chosen}" in _run(server, "pin", url, "--why", "x").output
    assert _run(server, "unpin", url).exit_code == 0
