"""The session that a client of S3 is made of: quicker than botocore's own, and the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.exceptions import UnknownServiceError

from ckptkit.errors import StorageError
from ckptkit.storage.connection import quick_session
from ckptkit.storage.objects import RemoteStore
from tests.storage import servers
from tests.storage.proxy import Answer, proxy_of
from tests.storage.tls import certificate


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield


def _loader(session: Any) -> Any:
    return session.get_component("data_loader")


@pytest.mark.parametrize(
    ("service", "kind"), [("s3", "service-2"), ("s3", "endpoint-rule-set-1"), ("sts", "service-2")]
)
def test_it_has_the_models_of_botocore(service: str, kind: str) -> None:
    ours, theirs = _loader(quick_session({})), _loader(AioSession())
    assert ours.load_service_model(service, kind) == theirs.load_service_model(service, kind)


def test_it_knows_no_services_that_are_not_there() -> None:
    with pytest.raises(UnknownServiceError, match="no-service"):
        _loader(quick_session({})).load_service_model("no-service", "service-2")


def test_a_session_that_is_given_is_used() -> None:
    session = AioSession()
    assert RemoteStore("s3://b/x", storage_options={"session": session}).fs.session is session


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    with pytest.raises(StorageError, match="no-such-profile"):
        RemoteStore("s3://b/x", storage_options={"profile": "no-such-profile"}).read("y")


def test_over_plain_http_no_certificates_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    monkeypatch.setattr(AIOHTTPSession, "_build_ssl_contexts", lambda self, proxy_url: parsed.append(proxy_url))
    with servers.moto() as options:
        RemoteStore("s3://plain-http/x", storage_options=options).fs.mkdir("plain-http")
    assert not parsed


@pytest.mark.parametrize("known", [True, False])
def test_what_is_sent_on_from_plain_http_to_tls_is_verified(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            store.read("y")  # the client does not sign for a place that it was sent on to
        assert bool(far.seen) is known
