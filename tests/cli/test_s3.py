"""On S3 `inspect` reads only metadata, counted in bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import reshard
from ckptkit.storage import open_store
from tests.cli.commands import document
from tests.offline.exports import write_model
from tests.patches import after
from tests.storage import proxy as proxies
from tests.storage import servers

DATA = 16 << 20  # bytes of tensors in each source; requests are small compared with them


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, Any]]:
    with servers.moto("looks") as options:
        yield options


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
    after(monkeypatch, proxies._Handler, "forward", lambda answer, *_, **__: answered.append(len(answer[2])))
    with proxies.proxy_of(server["endpoint_url"]) as proxy:
        options = {**server, "endpoint_url": proxy.url}
        words = [word for key, value in options.items() for word in ("--storage-option", f"{key}={value}")]
        found = document("inspect", f"s3://looks/{kind}", "--tensors", "*", *words)
    assert sum(tensor["nbytes"] for tensor in found["tensors"]) == DATA
    assert sum(answered) < DATA // 20
