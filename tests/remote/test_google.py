"""Runs and conversions on Google Cloud Storage: conditions, killed writers, paged listings, error answers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed.tensor  # noqa: F401  once, not in each forked process

from tests.remote.runs import TWO, on
from tests.storage.proxy import Reply

pytestmark = on("gcs")


@pytest.fixture
def parts_of_a_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 1 << 20)


# --- conditions


def test_create_only_puts_send_a_condition(proxy, far, parts_of_a_mib):
    far.save(1)
    with far.store.writer("large") as out:
        out.write(bytes(3 << 20))
    posts = [path for method, path in proxy.seen if method == "POST" and "/upload/storage/" in path]
    begun = [path for path in posts if "upload_id" not in path]
    bare = [path for path in begun if "ifGenerationMatch=0" not in path]
    assert any("uploadType=resumable" in path for path in begun)
    assert len(begun) - len(bare) >= 4  # lease, record, files, the large one
    # What may be replaced: `latest`, and the lease when the attempt has ended and when it is given back.
    assert len(bare) <= 3, bare


# --- pages and answers


def test_a_run_with_paged_listings_is_seen_completely(near, proxy, far):
    pages: set[str] = set()

    def between(handler: Any, body: bytes) -> Reply:
        handler.path = handler.path.replace("maxResults=1000", "maxResults=3")
        pages.update(re.findall("pageToken=[^&]+", handler.path))
        return handler.forward(body)

    proxy.between = between
    far.save(1, 2, 3, retention=TWO)
    far.loads(3)
    assert pages
    far.prune()
    assert near.top() == {".ckptkit", "latest", "step_00000003"}
