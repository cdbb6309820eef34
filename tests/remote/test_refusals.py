"""Refusals: their messages, what works without the permission, and that none looks like an empty run."""

import logging

import pytest

from ckptkit.errors import StorageError
from tests.remote.runs import on
from tests.storage.proxy import PASS, Answer, always, only

PAGE = b"<html><body><h1>Please log in</h1></body></html>"  # of a portal in front of the store


def test_an_html_page_instead_of_an_answer_is_an_error(proxy, far):
    store = far.store
    store.write("x", b"1")
    proxy.rule = always(Answer(200, "", (("Content-Type", "text/html"),), PAGE))
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


def test_an_html_page_instead_of_a_listing_is_not_an_empty_run(proxy, far, near):
    near.save(1)
    proxy.rule = always(Answer(200, text=PAGE))
    for call in (far.loads, far.loads, far.save):
        with pytest.raises(StorageError, match="something that is not a listing of S3"):
            call(2)


@on("gcs")
@pytest.mark.parametrize("page", [b"{}", b"[]", b"null", PAGE])
def test_an_html_page_instead_of_a_listing_is_not_an_empty_google_bucket(proxy, far, page):
    assert far.store.list() == []
    proxy.rule = always(Answer(200, text=page))
    with pytest.raises(StorageError, match=None if page == PAGE else "did not answer with a listing of Google"):
        far.store.list()


def test_without_permission_to_list_uploads_prune_works_with_a_warning(proxy, far, caplog):
    proxy.rule = only(Answer(403, "AccessDenied"), lambda method, path: method == "GET" and "?uploads" in path)
    far.save(1, 2)
    with caplog.at_level(logging.WARNING):
        code, text = far.cli("prune", far.url, "--max-num", "1")
    assert code == 0 and "step_00000001" in text
    assert any("does not list unfinished uploads" in record.getMessage() for record in caplog.records)
