"""No credential reaches a message, log, traceback, page, card, JSON or file, wherever it was given."""

import json
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ckptkit import CheckpointManager, TrainState, convert, redact
from ckptkit.errors import CheckpointNotFoundError, CkptkitError, StorageError, UsageError
from ckptkit.integrations.hub import push_folder
from ckptkit.redact import without_secrets
from ckptkit.storage import open_store
from tests.checkpoint import states
from tests.cli import commands
from tests.formats.damages import lay
from tests.hostile import sources
from tests.patches import failing

HUSH = "S3CRET"
PASSWORDS = [
    word.format(HUSH) for word in ("{}", "a/{}/b", "p@{}@x", "p%40{}%2Fx", "p:{}", "p#{}?x", "wJalr+{}/K7MDENG/b==")
]
URLS = [
    *(f"s3://AKIA:{password}@bucket/run" for password in PASSWORDS),
    f"sftp://me:{HUSH}@host/run",
    f"https://{HUSH}@host/run",
    f"https://host/run?X-Amz-Algorithm=AWS4&X-Amz-Credential={HUSH}&X-Amz-Signature={HUSH}",
    f"https://a.blob.core.windows.net/c/run?sv=2024-01-01&se=2030&sp=r&sig={HUSH}%3D",
    f"https://host/run?token={HUSH}",
    f"hf://user:hf_{HUSH}@org/repo",
    f"hf://x/y?token=hf_{HUSH}",
    f"abfs://c:{HUSH}@a.dfs.core.windows.net/run",
]
PLAIN_URLS = [
    "s3://bucket/run@v1/step_00000001", "abfs://container@account.dfs.core.windows.net/run", "hf://org/repo@main/x",
    "s3://bucket/x?versionId=3", "gs://bucket/token/secret", "memory://a/b", "file:///a/b@c",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/run/x",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/run@v1", "s3://bucket/2026-01-31T12:00/step_00000001@0123456789abcdef",
    "file:///data/run:1@x", "file://data/x@y",
]  # fmt: skip
OPTIONS = {
    "key": "AKIAIOSFODNN7S3CRET",
    "secret": "wJalrXUtnFEMI/K7MDENG/S3CRET",
    "password": "S3CRET",
    "client_kwargs": {"aws_session_token": "FwoGZXIvYXdzE S3CRET", "headers": [{"Authorization": "Bearer S3CRET-x"}]},
    "token": {"type": "service_account", "private_key": "-----BEGIN-----\nMIIS3CRET\n-----END-----\n"},
    "connection_string": "DefaultEndpointsProtocol=https;AccountKey=S3CRET==;EndpointSuffix=x",
    "config_kwargs": {"proxies": {"https": "http://me:S3CRET@proxy:3128"}},
    "sas_token": "?sv=1&sig=S3CRET%3D",
}  # fmt: skip
FLAGS = [part for key, value in OPTIONS.items() for part in (
    "--storage-option", f"{key}={value if isinstance(value, str) else json.dumps(value)}")]  # fmt: skip


class _Leaky(MemoryFileSystem):
    """Fails with a message that contains its arguments, as libraries do."""

    protocol = "leaky"

    def _fail(self, *_: Any, **__: Any) -> Any:
        cause = ValueError(f"https://host/x?X-Amz-Signature={HUSH}&X-Amz-Date=1 AWS_SECRET_ACCESS_KEY={HUSH}")
        options = {name: value for name, value in self.storage_options.items() if name in OPTIONS}
        quoted = f"{options!r} {json.dumps(options)} {quote(str(options))}"
        raise OSError(5, f"denied: {quoted} http://a:{HUSH}@h/") from cause

    info = ls = cat_file = pipe_file = _open = mkdir = makedirs = exists = find = _fail


@pytest.fixture(autouse=True)
def _setting(monkeypatch):
    monkeypatch.setattr(redact, "_known", {})
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    fsspec.register_implementation("leaky", _Leaky, clobber=True)
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def _clean(*texts: object) -> None:
    for text in texts:
        assert HUSH not in str(text), str(text)[:2000]


def _remote_files() -> dict[str, bytes]:
    return {name: bytes(file.getbuffer()) for name, file in MemoryFileSystem.store.items()}


# --- masking of text


@pytest.mark.parametrize("url", URLS)
def test_a_url_with_a_login_is_shown_without_it(url):
    _clean(without_secrets(url), without_secrets(f"GET {url}: 403"), without_secrets(f"('{url}', None)"))
    assert without_secrets(url).startswith(url.partition("://")[0])


@pytest.mark.parametrize("url", PLAIN_URLS)
def test_a_url_without_a_login_is_accepted_and_shown_unchanged(url):
    open_store(url)
    assert without_secrets(url) == url
    assert open_store("file:///data/x?token=1").url == "/data/x?token=1"  # in a path, "?" begins no query


@pytest.mark.parametrize("text", [
    "token=S3CRET", "aws_secret_access_key=S3CRET", 'header {"Authorization": "Bearer S3CRET"}',
    "Authorization: Bearer S3CRET", "{'secret_key': 'S3CRET'}", "x.password=S3CRET&y", "account_key=S3CRET;",
])  # fmt: skip
def test_a_value_after_the_name_of_a_secret_is_not_shown(text):
    _clean(without_secrets(text))


@pytest.mark.parametrize("text", [
    "'model.embed_tokens.weight': shape [4]", "cls_token: 1 of 3", "tokenizer.json: it is a fifo", "{'cls_token': 'F32'}",
    "--include 'key.*'", "max_tokens=5", "key_map=hf", "the keys: a, b", "step=3", "file:///a/b: no", "/a/b@c=d",
])  # fmt: skip
def test_ordinary_words_are_not_masked_even_if_they_contain_a_short_secret(text):
    redact.keep_secret({"secret": "test"})
    assert without_secrets(text) == text
    assert without_secrets("pytest: test=test1") == "pytest: ***=test1"


@pytest.mark.parametrize(
    "name", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "AZURE_STORAGE_SAS", "MY_PASSWORD", "WANDB_API_KEY"]
)
def test_no_message_shows_secrets_of_the_environment(name, monkeypatch):
    monkeypatch.setenv(name, f"value/{HUSH}")
    _clean(CkptkitError(f"it said: value/{HUSH}, also value%2F{HUSH}"), StorageError(5, f"value/{HUSH}"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "something long")
    assert str(CkptkitError("something long")) == "something long"


# --- the library


def test_a_failing_storage_without_secrets_is_shown_with_its_cause():
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(5, "cable cut")

    kind = type("_Fails", (MemoryFileSystem,), {"protocol": "fails", "cat_file": fail, "info": fail})
    fsspec.register_implementation("fails", kind, clobber=True)
    with pytest.raises(StorageError) as caught:
        open_store("fails://bucket/run").read("x")
    assert isinstance(caught.value.__cause__, OSError)


def test_logs_and_tracebacks_hold_no_credentials(caplog):
    redact.keep_secret(OPTIONS)
    try:
        raise ValueError(f"https://me:{HUSH}@host")
    except ValueError:
        logging.getLogger("ckptkit.test").exception("it fails at %s", OPTIONS["secret"])
    _clean(caplog.text)
    assert "ValueError" in caplog.text


def test_a_saved_run_holds_no_storage_options(caplog, capfd):
    caplog.set_level("DEBUG", logger="ckptkit")
    model = torch.nn.Linear(2, 2)
    for kind in ("sharded", "full", "local"):
        with CheckpointManager(f"memory://runs/{kind}", storage_options=OPTIONS, state_dict_type=kind) as manager:
            report = manager.save(1, TrainState(model=model, step=1), metrics={"loss": 1.0})
            _clean(report, manager.load(TrainState(model=model)), repr(manager))
    files = _remote_files()
    assert sum(name.endswith("checkpoint.json") for name in files) == 3
    assert not [name for name, data in files.items() if HUSH.encode() in data]
    _clean(caplog.text, *capfd.readouterr())


def test_the_error_of_a_hub_failure_holds_no_token(tmp_path, monkeypatch):
    import huggingface_hub

    error = OSError(f"401: Bearer hf_{HUSH} https://user:hf_{HUSH}@huggingface.co/x")
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", failing(error))
    sources.hf(tmp_path)
    with pytest.raises(StorageError) as caught:
        push_folder(str(tmp_path), "me/model", token=f"hf_{HUSH}")
    _clean(caught.value)


def test_a_base_url_with_a_login_is_in_no_message(tmp_path):
    sources.hf(tmp_path)
    with pytest.raises((UsageError, CheckpointNotFoundError)) as caught:
        convert(str(tmp_path), str(tmp_path / "dst"), base=f"https://me:{HUSH}@host/base")
    _clean(caught.value)


# --- the command line


COMMANDS = (
    "inspect {url}", "inspect {url} --json", "inspect {url} --html {folder}/page.html", "verify {url}", "verify {url} --json",
    "ls {url}", "ls {url} --json", "ls {url} --html {folder}/ls.html", "diff {url} {url}", "diff {url} {url} --json",
    "diff {url} {url} --html {folder}/diff.html", "convert {url} {folder}/hf", "convert {url} {folder}/json --json",
    "convert {url} {folder}/dcp --to dcp", "convert {url} {folder}/x.pt --to torch", "convert {folder}/src {url}/out --json",
    "reshard {url} {folder}/w2 --world-size 2 --json", "reshard {url} {folder}/l2 --world-size 2 --type local",
    "prune {url} --max-num 5 --json", "pin {url} --why x --json", "unpin {url} --json",
)  # fmt: skip


def _run(command: str, url: str, *options: str, folder: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Run a command, and search its output, log and files for the secret."""
    lay(folder, {"src/model.safetensors": sources.safetensors({"a": [1]})})
    result = commands.run(*(word.format(url=url, folder=folder) for word in command.split()), *options)
    _clean(result.output, result.stderr, caplog.text)
    local = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert not [name for name, data in {**_remote_files(), **local}.items() if HUSH.encode() in data or HUSH in name]
    return result


@pytest.mark.parametrize("command", COMMANDS)
def test_a_successful_command_shows_no_storage_options(command, tmp_path, caplog):
    states.save("memory://run", TrainState(model=torch.nn.Linear(2, 2), step=1), storage_options=OPTIONS)
    place = "memory://run" if command.startswith(("ls", "prune")) else "memory://run/step_00000001"
    result = _run(command, place, "--verbose", *FLAGS, folder=tmp_path, caplog=caplog)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_failing_command_shows_no_storage_options(command, tmp_path, caplog):
    result = _run(command, "leaky://bucket/run", "--debug", *FLAGS, folder=tmp_path, caplog=caplog)
    assert result.exit_code == 1
    assert "denied" in result.output and ("Traceback" in result.stderr or "verify" in command)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_url_with_a_login_without_showing_it(command, tmp_path, caplog):
    for url in URLS:
        result = _run(command, url, "--debug", folder=tmp_path, caplog=caplog)
        assert result.exit_code in (1, 2), url
        assert "put the login into the environment or storage options" in " ".join(result.output.split()), url
