"""HTTPS, sessions and signatures: over plain HTTP a body's SHA-256 is signed, except to a server on this machine."""

import base64
import hashlib
import os
import ssl
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from aiobotocore.session import AioSession
from werkzeug.serving import make_ssl_devcert  # moto needs it anyway

from ckptkit.errors import StorageError
from ckptkit.storage.objects import RemoteStore
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of

PART = 5 << 20
UNSIGNED = "UNSIGNED-PAYLOAD"


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, dict[str, Any]]]:
    """An S3 server behind TLS, and storage options that trust it."""
    trusted, key = make_ssl_devcert(str(tmp_path_factory.mktemp("tls") / "server"), host="localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted, key)
    with servers.moto("tls") as near, proxy_of(near["endpoint_url"], tls=context) as proxy:
        url = proxy.url.replace("127.0.0.1", "localhost")
        yield proxy, {**near, "endpoint_url": url, "client_kwargs": {"verify": trusted}}


def _crc(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _bodies(proxy: Proxy) -> list[dict[str, str]]:
    return [headers for (method, _), headers in zip(proxy.seen, proxy.headers, strict=True) if method == "PUT"]


def test_bodies_over_tls_have_only_a_crc32(https, request):
    proxy, options = https
    store = RemoteStore("s3://tls/whole", storage_options=options)
    store.write("warm", b"up")
    data = os.urandom(3 * PART + 99)
    proxy.clear()
    with store.writer("x") as out:
        out.lend(memoryview(data), 0, 1 << 20, owner=data)
        out.write(data[1 << 20 :])
    (sent,) = _bodies(proxy)
    assert sent["x-amz-checksum-crc32"] == _crc(data)
    assert sent["x-amz-content-sha256"] == UNSIGNED  # TLS vouches for the rest: no SHA-256 of it is taken
    assert sent["content-length"] == str(len(data)) and "x-amz-trailer" not in sent
    assert sent["if-none-match"] == "*" and "expect" not in sent
    request.getfixturevalue("small_parts")
    proxy.clear()
    with store.writer("parts") as out:
        out.write(data)
    sent_parts = {headers["x-amz-checksum-crc32"]: headers["x-amz-content-sha256"] for headers in _bodies(proxy)}
    parts = [_crc(data[at : at + PART]) for at in range(0, len(data), PART)]
    assert sent_parts == dict.fromkeys(parts, UNSIGNED)
    assert store.read("x") == store.read("parts") == data


def test_an_untrusted_server_is_an_error(https, impatient):
    with pytest.raises(StorageError, match=r"(?i)certificate|ssl"):
        RemoteStore("s3://tls/x", storage_options={**https[1], "client_kwargs": {}}).read("y")


# --- sessions


def test_a_given_session_is_used_and_an_error_names_a_missing_profile(monkeypatch, impatient):
    for name, value in servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    session = AioSession()
    assert RemoteStore("s3://b/x", storage_options={"session": session}).fs.session is session
    with pytest.raises(StorageError, match="no-such-profile"):
        RemoteStore("s3://b/x", storage_options={"profile": "no-such-profile"}).read("y")


# --- signatures over plain HTTP


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, dict[str, Any]]]:
    """A server that checks signatures, and its storage options."""
    folder = tmp_path_factory.mktemp("rclone")
    with servers.rclone(folder, bucket="b") as options, proxy_of(options["endpoint_url"]) as proxy:
        yield proxy, {**options, "endpoint_url": proxy.url}


def _put(near: tuple[Proxy, dict[str, Any]], data: bytes, **settings: Any) -> list[dict[str, str]]:
    """Write `data`, read it back, and return the headers of each request that carried some of it."""
    proxy, options = near
    store = RemoteStore("s3://b/x", storage_options={**options, "config_kwargs": settings})
    proxy.clear()
    with store.writer(os.urandom(4).hex()) as out:
        out.write(data)
    return _bodies(proxy)


def test_a_body_to_this_machine_is_signed_on_request_or_without_a_checksum(near, request):
    (sent,) = _put(near, b"abc")
    assert sent["x-amz-content-sha256"] == UNSIGNED and "x-amz-checksum-crc32" in sent
    (sent,) = _put(near, b"abc", request_checksum_calculation="when_required")
    assert sent["x-amz-content-sha256"] == hashlib.sha256(b"abc").hexdigest()
    assert "x-amz-checksum-crc32" not in sent
    request.getfixturevalue("small_parts")
    data = os.urandom(2 * PART + 9)
    parts = [data[:PART], data[PART : 2 * PART], data[2 * PART :]]
    sent = _put(near, data, s3={"payload_signing_enabled": True})
    assert {item["x-amz-content-sha256"] for item in sent} == {hashlib.sha256(part).hexdigest() for part in parts}


HERE = ("http://localhost:9000", "http://127.0.0.2:9000", "http://[::1]:9000")
SIGNED = ("http://10.0.0.7:9000", "http://minio.internal", "http://localhost.example.org")
BY_BOTOCORE = ("https://s3.eu-west-1.amazonaws.com",)


@pytest.mark.parametrize("url", [*HERE, *SIGNED, *BY_BOTOCORE])
def test_bodies_to_other_machines_are_signed(url):
    options = {"key": "k", "secret": "s", "endpoint_url": url}
    found = RemoteStore("s3://b/x", storage_options=options).fs.config_kwargs.get("s3", {})
    assert ("payload_signing_enabled" in found) == (url in HERE)
