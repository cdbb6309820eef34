"""Refusals: their messages, what works without the permission, and that none looks like an empty run."""

from __future__ import annotations

import gc
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store
from tests.remote.runs import Options, loads, run_cli, save
from tests.storage import servers
from tests.storage.proxy import PASS, Answer, Proxy, Rule, proxy_of

_counter = itertools.count(50 << 20)


@dataclass(frozen=True)
class Page(Answer):
    """A portal in front of the store answers everything with its own page."""

    @property
    def body(self) -> bytes:
        return b"<html><body><h1>Please log in</h1></body></html>"


@dataclass(frozen=True)
class Said(Answer):
    text: bytes = b""

    @property
    def body(self) -> bytes:
        return self.text


@pytest.fixture
def options(options: Options) -> Options:
    """Options for a new connection, because redirects are remembered."""
    return {**options, "default_block_size": next(_counter)}


REFUSALS = [
    (Answer(301, "PermanentRedirect"), "AWS_DEFAULT_REGION="),  # botocore follows redirects in a loop
    (Answer(301, "PermanentRedirect", (("x-amz-bucket-region", "eu-west-1"),)), "AWS_DEFAULT_REGION=eu-west-1"),
    (Answer(400, "AuthorizationHeaderMalformed"), "another region"),
    (Answer(400, "ExpiredToken"), "token has expired"),
    (Answer(403, "RequestTimeTooSkewed"), "clock of this machine"),
    (Answer(403, "InvalidAccessKeyId"), "that the store accepts with AWS_ACCESS_KEY_ID"),
    (Answer(403, "SignatureDoesNotMatch"), "that the store accepts with AWS_ACCESS_KEY_ID"),
    (Answer(403, "AccessDenied"), "ListObjectsV2 is not allowed here"),
]


# botocore drops the connections of a redirect that it follows in circles
@pytest.mark.filterwarnings("ignore:Exception ignored in.*Connection.__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("answer", "advice"), REFUSALS, ids=[f"{i}-{item[0].code}" for i, item in enumerate(REFUSALS)])
def test_a_refusal_says_what_to_do(proxy: Proxy, options: Options, url: str, answer: Answer, advice: str) -> None:
    proxy.rule = lambda number, method, path: answer
    with pytest.raises(OSError, match=advice) as caught:
        open_store(url, storage_options=options).list()
    assert "recursion" not in str(caught.value) and options["secret"] not in str(caught.value)
    del caught
    gc.collect()


def test_an_html_page_instead_of_an_answer_is_an_error(proxy: Proxy, options: Options, url: str) -> None:
    store = open_store(url, storage_options=options)
    store.write("x", b"1")
    proxy.rule = lambda number, method, path: Page(200, "", (("Content-Type", "text/html"),))
    calls = (
        lambda: store.read("x"),
        lambda: store.info("x"),
        lambda: store.write("y", b"1", overwrite=True),
        lambda: store.delete(["x"]),
    )
    for call in calls:
        with pytest.raises(StorageError, match=r"answered with a web page \(text/html\)"):
            call()
    proxy.rule = PASS
    assert store.read("x") == b"1"


SAID = [
    (Said(403, "", ()), "Forbidden (HTTP 403)", "GetObject is not allowed here"),
    (Answer(405, "MethodNotAllowed"), "(HTTP 405)", "is the endpoint the right one"),
    (Answer(403, "QuotaExceeded"), "QuotaExceeded", "a quota is used up"),
    (Said(507, "", ()), "(HTTP 507)", "a quota is used up"),
    (Answer(400, "KMS.DisabledException"), "KMS.DisabledException", "key that encrypts"),
]


@pytest.mark.parametrize(("answer", "word", "advice"), SAID, ids=[word for _, word, _ in SAID])
def test_an_error_quotes_the_server_and_says_what_to_do(
    proxy: Proxy, options: Options, url: str, answer: Answer, word: str, advice: str
) -> None:
    proxy.rule = lambda number, method, path: answer
    with pytest.raises(OSError, match=advice) as caught:
        open_store(url, storage_options=options).read("x")
    said = str(caught.value)
    assert word in said and f"{url}/x" in said and "None" not in said


def test_a_truncated_answer_is_not_blamed_on_tokens(proxy: Proxy, options: Options, url: str, at_once: None) -> None:
    store = open_store(url, storage_options=options)
    store.write("x", b"1234")
    proxy.rule = lambda number, method, path: "cut"
    with pytest.raises(StorageError) as caught:
        store.read("x")
    assert "token" not in str(caught.value)


def test_an_html_page_instead_of_a_listing_is_not_an_empty_run(
    proxy: Proxy, options: Options, s3: Options, url: str
) -> None:
    save(url, s3, 1)
    proxy.rule = lambda number, method, path: Page(200, "")
    for step in (1, 2):
        with pytest.raises(StorageError, match="did not answer with an S3 listing"):
            loads(url, options, step)
    with pytest.raises(StorageError, match="did not answer with an S3 listing"):
        save(url, options, 2)


def test_an_html_page_instead_of_a_listing_is_not_an_empty_google_bucket() -> None:
    with servers.fake_gcs("bucket") as server, proxy_of(server["endpoint_url"]) as proxy:
        store = open_store("gs://bucket/run", storage_options={**server, "endpoint_url": proxy.url})
        assert store.list() == []
        for page in (b"{}", b"[]", b"null"):
            proxy.rule = lambda number, method, path, page=page: Said(200, "", (), page)
            with pytest.raises(StorageError, match="did not answer with a listing of Google"):
                store.list()
        proxy.rule = lambda number, method, path: Page(200, "")
        with pytest.raises(StorageError):
            store.list()


def denied(is_it: Any) -> Rule:
    return lambda number, method, path: Answer(403, "AccessDenied") if is_it(method, path) else "pass"


def test_without_permission_to_list_uploads_prune_works_with_a_warning(
    proxy: Proxy, options: Options, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.rule = denied(lambda method, path: method == "GET" and "?uploads" in path)
    for step in (1, 2):
        save(url, options, step)
    with caplog.at_level(logging.WARNING):
        code, text = run_cli(
            "prune", url, "--max-num", "1", options={name: options[name] for name in ("endpoint_url", "key", "secret")}
        )
    assert code == 0 and "step_00000001" in text
    assert any("does not list unfinished uploads" in record.getMessage() for record in caplog.records)
