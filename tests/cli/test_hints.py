"""Every command line in a message works when it is pasted, also for paths with spaces."""

import itertools
import re
import shlex
import shutil
from pathlib import Path

import click
import fsspec
import pytest

import ckptkit
from ckptkit import CheckpointManager, RetentionPolicy
from ckptkit.cli.main import _COMMANDS, cli
from ckptkit.errors import CkptkitError, command_line
from ckptkit.storage import open_store
from tests.checkpoint.killed import state
from tests.checkpoint.states import save_steps
from tests.cli.commands import run

_NAMES = "|".join(_COMMANDS)
_TICKED = re.compile(rf"`(ckptkit (?:{_NAMES})\b[^`\n]*)`")
_BARE = re.compile(rf"(?<!`)\bckptkit (?:{_NAMES})\b[^`\n]*$", re.MULTILINE)  # to the end of its line
_WRITTEN = re.compile(rf"ckptkit (?:{_NAMES})\b[^`\"'\n]*(?:\{{|\"$)", re.MULTILINE)  # with a field, or continued
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")  # DST, EXPORT: a placeholder
_READING = ("ls", "inspect", "verify")


def hints(text: str) -> list[str]:
    return [*_TICKED.findall(text), *(match[0].strip() for match in _BARE.finditer(text))]


def check(hint: str) -> None:
    """Raise unless the command line parses: known options, and the right number of arguments."""
    for line in hint.split(" && "):
        _, name, *words = shlex.split(line)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if "--help" in words:
            continue
        try:
            command.make_context(name, words)
        except click.UsageError as error:
            raise AssertionError(f"{line!r} can't be pasted: {error.format_message()}") from error


def test_only_the_function_that_quotes_fields_puts_them_into_a_command_line():
    for path in sorted(Path(ckptkit.__file__).parent.rglob("*.py")):
        text = path.read_text()
        assert not _WRITTEN.search(text), path
        for hint in _TICKED.findall(text):
            if hint.count(" ") > 1:  # not the name of a command alone
                check(hint)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, zoo: Path) -> Path:
    """A run, a run with a damaged newest step, and a foreign checkpoint, in a directory with a space in its name."""
    place = tmp_path_factory.mktemp("hints") / "my runs"
    for name in ("run", "damaged"):
        save_steps(place / name, 1, 2, make=state, retention=RetentionPolicy(max_num=3))
    newest = place / "damaged" / "step_00000002"
    data = next(newest.glob("*.distcp"))
    data.write_bytes(bytes(byte ^ 255 for byte in data.read_bytes()))
    (place / "run" / "notes").mkdir()
    (place / "run" / "step_00000009").mkdir()
    shutil.copytree(place / "run" / "step_00000001", place / "run" / "a copy")
    shutil.copytree(zoo / "hf_ref_llama_untied", place / "hf model")
    shutil.copytree(zoo / "steps_dir_lightrft", place / "steps")
    (place / "empty").mkdir()
    return place


RUNS: dict[str, tuple[str, ...]] = {  # arguments, run in that directory
    "ls of one checkpoint": ("ls", "run/step_00000001"),
    "ls of latest": ("ls", "run/latest"),
    "ls of a step by number": ("ls", "run/2"),
    "ls of another system's": ("ls", "hf model"),
    "ls of an empty directory": ("ls", "empty"),
    "ls with other entries": ("ls", "run"),
    "verify of a damaged one": ("verify", "damaged"),
    "convert of a damaged one": ("convert", "damaged", "out"),
    "reshard of a damaged one": ("reshard", "damaged", "out", "--world-size", "2"),
    "inspect without a match": ("inspect", "run", "--tensors", "nothing*"),
    "diff without a match": ("diff", "run", "damaged/1", "--include", "nothing*"),
    "pin of an empty directory": ("pin", "empty"),
    "pin of another system's": ("pin", "hf model"),
    "prune of one checkpoint": ("prune", "run/step_00000001", "--max-num", "1"),
    "copy of a damaged one": ("copy", "damaged/latest", "out"),
    "copy of another system's run": ("copy", "steps", "out"),
    "push of no export": ("push", "run", "me/model"),
    "a name in a run without one": ("verify", "empty/latest"),
}
WITHOUT = {"a name in a run without one", "ls of an empty directory"}


def check_line(hint: str) -> None:
    check(hint)
    _, name, *words = shlex.split(hint.partition(" && ")[0])
    there = [word for word in words if not word.startswith("-") and not _PLACEHOLDER.fullmatch(word)]
    assert any(Path(word).exists() for word in there), f"{hint!r} names nothing that exists"
    if name in _READING:
        assert run(name, *words).exit_code in (0, 1)


@pytest.mark.parametrize("name", RUNS)
def test_commands_that_errors_propose_can_be_pasted(made, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    command, *words = RUNS[name]
    typed = [str(made / word) if (made / word.partition("/")[0]).exists() else word for word in words]
    result = run(command, *typed)
    found = hints(result.output)
    assert found or name in WITHOUT, result.output
    for hint in found:
        check_line(hint)


OPTIONS = ("use_listings_cache=false", "secret=hunter2", 'client_kwargs={"region_name": "eu", "api_key": "hunter2"}')


@pytest.mark.parametrize("command", [("ls",), ("inspect",), ("pin", "--why", "x"), ("prune", "--max-num", "1")])
def test_commands_that_errors_propose_repeat_storage_options_without_secrets(command):
    url = f"memory://bucket/{command[0]}/step_00000001"
    with fsspec.open(f"{url}/model.safetensors", "wb") as file:
        file.write(b"\x02\0\0\0\0\0\0\0{}")
    options = [word for option in OPTIONS for word in ("--storage-option", option)]
    more = ["--tensors", "nothing*"] if command[0] == "inspect" else []
    result = run(command[0], url, *command[1:], *more, *options)
    assert hints(result.output) and "hunter2" not in result.output
    for hint in hints(result.output):
        check(hint)
        given = [word for before, word in itertools.pairwise(shlex.split(hint)) if before == "--storage-option"]
        masked = 'client_kwargs={"region_name": "eu", "api_key": "***"}'
        assert given == ["use_listings_cache=false", "secret=***", masked], hint


def test_proposed_commands_keep_the_storage_options_of_two_urls_apart():
    open_store("s3://a/run", storage_options={"endpoint_url": "http://one"})
    open_store("s3://a/other", storage_options={"endpoint_url": "http://two"})
    line = command_line("copy", "s3://a/run/step_1", "s3://a/other/step_1")
    assert "--src-storage-option endpoint_url=http://one --dst-storage-option endpoint_url=http://two" in line
    assert command_line("ls", "s3://b/run") == "ckptkit ls s3://b/run"
    check(line)


def test_commands_that_a_load_proposes_can_be_pasted(made):
    with CheckpointManager(made / "damaged") as manager, pytest.raises(CkptkitError) as caught:
        manager.load(state(0))
    found = hints(str(caught.value))
    assert found
    for hint in found:
        check_line(hint)


@pytest.mark.parametrize("url", ["webdav://localhost:9/x", "dav://localhost:9/x", "sftp://localhost/x", "hdfs:x"])
@pytest.mark.parametrize("verb", ["inspect", "ls", "verify"])
def test_an_error_names_an_unusable_protocol_and_does_not_call_it_a_bug(url, verb):
    result = run(verb, url)
    assert result.exit_code in (1, 2)
    assert url.partition(":")[0] in result.output and "bug in ckptkit" not in result.output, result.output
