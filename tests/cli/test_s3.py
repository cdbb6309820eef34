"""On S3: `inspect` and `ls` read only metadata, counted in bytes, and checkpoint names resolve correctly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import Result

from ckptkit import reshard
from ckptkit.storage import open_store
from tests.cli.commands import run, save_run
from tests.offline.exports import write_model
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


SOURCES: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "safetensors": lambda state, place: write_model(place, state),
    "sharded": lambda state, place: reshard(
        write_model(place.with_name("base"), state), str(place / "step_00000001"), world_size=3
    ),
    "torch.pt": lambda state, place: torch.save({"model": state}, place),
    "dcp": lambda state, place: dcp.save(state, checkpoint_id=place, no_dist=True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_inspect_reads_only_metadata(server, tmp_path, monkeypatch, kind):
    place = tmp_path / kind
    SOURCES[kind]({f"model.layers.{i}.w": torch.full((1024, 1024), float(i)) for i in range(4)}, place)
    store = open_store("s3://looks", storage_options=server)
    store.fs.put(str(place), f"looks/{kind}", recursive=place.is_dir())
    answered: list[int] = []
    forward = proxies._Handler.forward

    def counting(self: Any, body: bytes, **changed: str) -> Any:
        answer = forward(self, body, **changed)
        answered.append(len(answer[2]))
        return answer

    monkeypatch.setattr(proxies._Handler, "forward", counting)
    with proxies.proxy_of(server["endpoint_url"]) as proxy:
        options = {**server, "endpoint_url": proxy.url}
        result = _run(options, "inspect", f"s3://looks/{kind}", "--json", "--tensors", "*")
    assert result.exit_code == 0, result.output
    assert sum(tensor["nbytes"] for tensor in json.loads(result.stdout)["tensors"]) == DATA
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
