"""Over HTTPS: the headers of a body, and round trips."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of
from tests.storage.tls import certificate

PART = 5 << 20


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, dict[str, Any]]]:
    """An S3 server behind TLS, and storage options that trust it."""
    context, trusted = certificate(tmp_path_factory.mktemp("tls"))
    with servers.moto() as near, proxy_of(near["endpoint_url"], tls=context) as proxy:
        open_store("s3://tls", storage_options=near).fs.mkdir("tls")  # type: ignore[attr-defined]
        yield proxy, {**near, "endpoint_url": proxy.url, "client_kwargs": {"verify": str(trusted)}}


def _crc(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _bodies(proxy: Proxy) -> list[dict[str, str]]:
    return [headers for (method, _), headers in zip(proxy.seen, proxy.headers, strict=True) if method == "PUT"]


def test_a_body_over_tls_has_only_a_crc32(https: tuple[Proxy, dict[str, Any]]) -> None:
    proxy, options = https
    store = RemoteStore("s3://tls/whole", storage_options=options)
    store.write("warm", b"up")
    data = os.urandom(3 << 20)
    proxy.clear()
    with store.writer("x") as out:
        out.lend(memoryview(data), 0, 1 << 20, owner=data)
        out.write(data[1 << 20 :])
    (sent,) = _bodies(proxy)
    assert sent["x-amz-checksum-crc32"] == _crc(data)
    assert sent["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"  # TLS vouches for the rest: no SHA-256 of it is taken
    assert sent["content-length"] == str(len(data)) and "x-amz-trailer" not in sent
    assert sent["if-none-match"] == "*" and "expect" not in sent
    assert store.read("x") == data


def test_parts_over_tls_have_only_a_crc32(https: tuple[Proxy, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", PART)
    proxy, options = https
    store = RemoteStore("s3://tls/parts", storage_options=options)
    data = os.urandom(3 * PART + 99)
    proxy.clear()
    with store.writer("x") as out:
        out.write(data)
    sent = {headers["x-amz-checksum-crc32"]: headers["x-amz-content-sha256"] for headers in _bodies(proxy)}
    parts = [_crc(data[at : at + PART]) for at in range(0, len(data), PART)]
    assert sent == dict.fromkeys(parts, "UNSIGNED-PAYLOAD")
    assert store.read("x") == data


def test_an_untrusted_server_is_an_error(https: tuple[Proxy, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    _, options = https
    strict = {**options, "client_kwargs": {}}
    with pytest.raises(StorageError, match=r"(?i)certificate|ssl"):
        RemoteStore("s3://tls/x", storage_options=strict).read("y")


_GCS = """
import os, sys
from ckptkit.storage.objects import RemoteStore
store = RemoteStore("gs://tls/run", storage_options={"endpoint_url": sys.argv[1], "token": "anon", "project": "test"})
data = os.urandom(3 << 20)
with store.writer("x") as out:
    out.write(data)
assert store.read("x") == data and [item.path for item in store.list()] == ["x"]
try:
    store.write("x", b"other")
except FileExistsError:
    print("whole")
"""


def test_a_file_round_trips_on_gcs_over_tls(tmp_path: Path) -> None:
    context, trusted = certificate(tmp_path)
    with servers.fake_gcs() as near, proxy_of(near["endpoint_url"], tls=context) as proxy:
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported
        open_store("gs://tls", storage_options=near).fs.mkdir("tls")  # type: ignore[attr-defined]
        # aiohttp reads what to trust once, when it is imported.
        environment = {**os.environ, "SSL_CERT_FILE": str(trusted), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", _GCS, proxy.url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "whole\n", done.stderr
    assert proxy.count >= 4
