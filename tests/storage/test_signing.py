"""Over plain HTTP a body's SHA-256 is signed, except to a server on this machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from ckptkit.storage.objects import RemoteStore
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of

PART = 5 << 20
UNSIGNED = "UNSIGNED-PAYLOAD"


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, dict[str, Any]]]:
    """A server that checks signatures, and its storage options."""
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "b").mkdir()
    with servers.rclone(folder) as options, proxy_of(options["endpoint_url"]) as proxy:
        yield proxy, {**options, "endpoint_url": proxy.url}


def _put(near: tuple[Proxy, dict[str, Any]], data: bytes, **settings: Any) -> list[dict[str, str]]:
    """Write `data`, read it back, and return the headers of each request that carried some of it."""
    proxy, options = near
    store = RemoteStore("s3://b/x", storage_options={**options, "config_kwargs": settings})
    proxy.clear()
    with store.writer(os.urandom(4).hex()) as out:
        out.write(data)
    sent = zip(proxy.seen, proxy.headers, strict=True)
    return [headers for (method, _), headers in sent if method == "PUT"]


def test_a_body_to_this_machine_has_only_a_crc32(near: tuple[Proxy, dict[str, Any]]) -> None:
    (sent,) = _put(near, b"abc")
    assert sent["x-amz-content-sha256"] == UNSIGNED and "x-amz-checksum-crc32" in sent


def test_a_body_is_signed_on_request(near: tuple[Proxy, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", PART)
    data = os.urandom(2 * PART + 9)
    parts = [data[:PART], data[PART : 2 * PART], data[2 * PART :]]
    sent = _put(near, data, s3={"payload_signing_enabled": True})
    assert {item["x-amz-content-sha256"] for item in sent} == {hashlib.sha256(part).hexdigest() for part in parts}


def test_a_body_without_a_checksum_is_signed(near: tuple[Proxy, dict[str, Any]]) -> None:
    (sent,) = _put(near, b"abc", request_checksum_calculation="when_required")
    assert sent["x-amz-content-sha256"] == hashlib.sha256(b"abc").hexdigest()
    assert "x-amz-checksum-crc32" not in sent


@pytest.mark.parametrize(
    ("url", "unsigned"),
    [
        ("http://10.0.0.7:9000", False),
        ("http://minio.internal", False),
        ("http://localhost.example.org", False),
        ("http://localhost:9000", True),
        ("http://127.0.0.2:9000", True),
        ("http://[::1]:9000", True),
        ("https://s3.eu-west-1.amazonaws.com", False),  # as botocore does it
    ],
)
def test_bodies_to_other_machines_are_signed(url: str, unsigned: bool) -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": url}
    found = RemoteStore("s3://b/x", storage_options=options).fs.config_kwargs.get("s3", {})
    assert ("payload_signing_enabled" in found) is unsigned
