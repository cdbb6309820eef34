"""The session of an S3 client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiobotocore.session import AioSession

from ckptkit.errors import StorageError
from ckptkit.storage.objects import RemoteStore
from tests.storage import servers
from tests.storage.proxy import Answer, proxy_of
from tests.storage.tls import certificate


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield


def test_a_given_session_is_used() -> None:
    session = AioSession()
    assert RemoteStore("s3://b/x", storage_options={"session": session}).fs.session is session


def test_an_error_names_a_missing_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    with pytest.raises(StorageError, match="no-such-profile"):
        RemoteStore("s3://b/x", storage_options={"profile": "no-such-profile"}).read("y")


@pytest.mark.parametrize("known", [True, False])
def test_a_redirect_from_http_to_tls_is_verified(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    tls, trusted = certificate(tmp_path)
    with (
        servers.moto() as options,
        proxy_of(options["endpoint_url"], tls=tls) as far,
        proxy_of(options["endpoint_url"]) as near,
    ):
        bucket = f"sent-on-{known}".lower()
        RemoteStore(f"s3://{bucket}", storage_options=options).fs.mkdir(bucket)
        near.rule = lambda number, method, path: Answer(307, "Moved", (("Location", far.url + path),))
        more = {"client_kwargs": {"verify": str(trusted)}} if known else {}
        store = RemoteStore(f"s3://{bucket}/x", storage_options={**options, **more, "endpoint_url": near.url})
        with pytest.raises(OSError, match=r"." if known else r"(?i)certificate"):
            store.read("y")  # the client does not sign for the target of a redirect
        assert bool(far.seen) is known
