"""What a tired person types: each error says what to do next, and no mistake changes anything."""

import shlex
import shutil

import pytest

from ckptkit import CheckpointManager, convert, open_checkpoint, verify
from ckptkit.errors import UsageError
from tests.cli.commands import run

HF = "hf_ref_llama_untied"
REFUSED: dict[str, tuple[int, str, str]] = {  # the rule: exit code, command line, words of the error
    # Wrong usage.
    "a misspelt command gets a suggestion": (2, "converrt", "Did you mean 'convert'"),
    "a misspelt option gets a suggestion": (2, "inspect {hf} --tensor", "--tensors"),
    "a misspelt format gets a suggestion": (2, "convert a b --to hff", "Did you mean 'hf'?"),
    "a misspelt dtype gets a suggestion": (2, "convert a b --dtype bf15", "Did you mean 'bf16'?"),
    "an alias of a format gets a suggestion": (2, "convert {here} out --to safetensors", "Did you mean 'hf'?"),
    "a size is a number": (2, "convert {dcp} out --max-shard-size lots", "lots"),
    "a shard has a size": (2, "convert {root} out --max-shard-size 0", "5GB"),
    "only an export has a shard size": (2, "convert {dcp} out --to dcp --max-shard-size 1GB", "combined with --to dcp"),
    "a mesh fits the ranks": (2, "reshard {dcp} out --world-size 4 --mesh replicate=3,shard=2", "has 6 ranks, but"),
    "a key map exists": (2, "convert {dcp} out --key-map no-such-map", "no-such-map"),
    "a file of a key map exists": (2, "convert {dcp} out --key-map missing.toml", "missing.toml"),
    "a layout exists, even if it is not needed": (2, "verify {dcp} --layout gone.json", "gone.json does not exist"),
    "an adapter config exists": (2, "convert a b --adapter-config {here}/gone", "gone: No such file"),
    "an adapter config is JSON": (2, "convert a b --adapter-config {here}/broken.json", "json is not valid JSON"),
    "an adapter config is an object": (2, "convert a b --adapter-config {here}/list.json", "JSON object"),
    "an unknown tensor tells how to list names": (2, "inspect {dcp} --tensors nothing*", "--tensors '*'"),
    "an unknown tensor is also an error in JSON": (2, "inspect {dcp} --tensors nothing* --json", "no tensor matches"),
    "a glob that selects nothing": (2, "convert {dcp} out --include nothing*", "after --include 'nothing*'."),
    "a glob that selects nothing of two": (2, "diff {root} {root} --include nothing*", "nothing"),
    "a prefix that selects nothing": (2, "convert {dcp} out --strip-prefix net", "starts with 'net.'"),
    "a page of a reshard needs --html": (2, "inspect {root} --after {root}/100", "--html"),
    "a storage option is a pair": (2, "ls {root} --storage-option key", "--storage-option takes KEY=VALUE"),
    "forgetting the recorded rules is no policy": (2, "prune {root} --forget-recorded", "--max-num 3"),
    "a pin has a reason": (2, "pin {root}/300 --why ' '", "give a reason"),
    "a protocol has two slashes": (2, "inspect s3:/bucket/run", "Did you mean s3://bucket/run?"),
    "a metric exists": (2, "inspect {root}/best:acc:max", "Existing metrics: loss."),
    "a misspelt metric gets a suggestion": (2, "inspect {root}/best:los:min", "'loss'"),
    "a metric has a direction": (2, "inspect {root}/best:loss:mim", "best:METRIC:min"),
    "a name of a checkpoint is no destination": (
        2, "convert {root} {root}/200", "{root}/200 is a name of the checkpoint {root}/step_00000200",
    ),
    "the name best is no destination": (2, "copy {root}/100 {root}/best", "of the checkpoint {root}/step_00000100"),
    "a misspelt metric deletes nothing": (2, "prune {root} --max-num 1 --keep-best lss:min", "Did you mean 'loss'?"),
    # Nothing there, or something else.
    "an empty directory cannot be inspected": (1, "inspect {here}/empty", "{here}/empty"),
    "an empty directory cannot be listed": (1, "ls {here}/empty", "{here}/empty"),
    "a directory that is no checkpoint is described": (1, "inspect {here}/other", "notes.txt"),
    "a destination that exists is left alone": (1, "convert {dcp} {here}/other", "--overwrite"),
    "nothing is copied below a file": (1, "copy {root} {here}/list.json/a/out", "list.json is not a directory"),
    "an export has to be made before a push": (1, "push {root} user/repo", "ckptkit convert {root} EXPORT"),
    "a step by number is no run": (1, "ls {root}/200", "ckptkit ls {root}"),
    "one checkpoint is no run": (1, "ls {root}/step_00000100", "one checkpoint"),
    "the directory above a run is no run": (1, "ls {here}", "To list the run in it: ckptkit ls {root}\n"),
    "a file is no run": (1, "ls {root}/step_00000100/.metadata", "is a file"),
    "a link to nothing cannot be listed": (1, "ls dangling", "dangling is a symbolic link to nowhere, which does not"),
    "a link to nothing cannot be read": (1, "verify dangling", "dangling is a symbolic link to nowhere, which"),
    "a link to nothing cannot be pinned": (1, "pin dangling", "dangling is a symbolic link to nowhere, which does not"),
    "a file has no latest": (1, "verify {here}/list.json/latest", "list.json is a file, not the root of a run"),
    "latest of another system is a file": (
        1, "inspect {zoo}/deepspeed_zero2_bf16_w2/ckpt/latest", "newest step of another system",
    ),
    "a misspelt run gets a suggestion": (1, "ls {here}/RUM", "Did you mean {root}?"),
    "a misspelt run is not pinned": (1, "pin {here}/RUM", "RUM does not exist. Did you mean {root}?"),
    "a number without a checkpoint is not listed": (1, "ls {root}/999", "has no checkpoint '999'"),
    "latest of a missing run is not listed": (1, "ls {here}/nowhere/latest", "{here}/nowhere does not exist"),
    "a misspelt name gets a suggestion": (1, "inspect {root}/lates", "Did you mean {root}/latest?"),
    "an unknown name lists the newest": (1, "inspect {root}/lates", "step_00000300"),
    "a misspelt parent gets a suggestion": (
        1, "inspect {here}/RUM/step_00000100", "does not exist. Did you mean {root}/step_00000100?",
    ),
    "the parent that exists is named": (1, "inspect {here}/x/y", "does not exist (nor does {here}/x; {here} does)."),
    "another directory is not unpinned": (1, "unpin {here}/other", "other/checkpoint.json does not exist"),
    "a prune of something else deletes nothing": (
        1, "prune {here}/other --max-num 1", "Error: Nothing was deleted: {here}/other contains no ckptkit checkpoint.",
    ),
    "an option of another command is named as such": (
        1, "diff {zoo}/fsdp1_local_state_dict_nomesh_w2 {dcp}",
        "\n--layout is an option of convert, not of diff. Use it on the checkpoint first, then diff the result.\n",
    ),
    "a command to paste comes last": (1, "prune {here}/other --max-num 1", "ckptkit inspect {here}/other\n"),
}  # fmt: skip


@pytest.mark.parametrize("rule", REFUSED)
def test_a_mistake_is_refused_with_advice_and_changes_nothing(zoo, root, tmp_path, monkeypatch, rule):
    code, line, words = REFUSED[rule]
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "other"):
        (tmp_path / name).mkdir()
    for name, text in (("other/notes.txt", "hello"), ("broken.json", "{"), ("list.json", "[1]")):
        (tmp_path / name).write_text(text)
    (tmp_path / "dangling").symlink_to("nowhere")
    places = {"zoo": zoo, "root": root, "here": tmp_path, "hf": zoo / HF, "dcp": zoo / "dcp_fsdp2_uneven_w4" / "ckpt"}
    before = sorted(tmp_path.rglob("*"))
    result = run(*(word.format(**places) for word in shlex.split(line)))
    assert result.exit_code == code, result.output
    assert words.format(**places) in result.stderr
    assert sorted({*tmp_path.rglob("*")} - {root / ".ckptkit" / "pins"}) == before  # the directory of readers' pins


MISSING = (
    "inspect", "verify", "pin", "unpin", "ls", "prune", "convert OUT", "copy OUT", "reshard OUT --world-size 2",
    "diff nosuch", "push me/model", "merge OUT --last 2",
)  # fmt: skip


@pytest.mark.parametrize("line", MISSING)
def test_a_missing_path_is_one_message_and_exit_code_1(line, tmp_path):
    verb, *words = line.split()
    result = run(verb, tmp_path / "nosuch", *words)
    assert result.exit_code == 1, result.output
    assert f"{tmp_path}/nosuch does not exist" in result.stderr
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["77", "step_00000077", "latest~1"])
def test_an_unknown_name_in_a_run_of_one_checkpoint_names_that_checkpoint(root, name):
    for step in ("step_00000100", "step_00000200"):
        shutil.rmtree(root / step)
    result = run("inspect", root / name)
    assert result.exit_code == 1
    assert f"has no checkpoint '{name}'. It has only step_00000300." in result.stderr


def test_an_error_that_lists_many_names_shows_five_unless_verbose(zoo, tmp_path):
    words = ("convert", zoo / HF, tmp_path / "out", "--key-map", "torchtitan-llama3")
    short, long = run(*words).stderr, run(*words, "--verbose").stderr
    assert short.count("  no rule matches ") == 5
    assert short.endswith("\n  ... and 11 more of 16; --verbose lists them\n")
    assert long.count("  no rule matches ") == 16 and "more of" not in long


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "gs://"])
def test_a_url_without_a_bucket_is_wrong_usage(url):
    for command in (["ls"], ["verify"], ["inspect"], ["prune", "--max-num", "1"]):
        result = run(*command, url)
        assert result.exit_code == 2 and f"Error: {url} has no bucket. Write {url[:2]}://BUCKET/" in result.output


@pytest.mark.parametrize("line", [
    "inspect ''", "inspect file://", "inspect IN --html out --after ''", "verify ''", "ls ''",
    "prune '' --max-num 1", "pin ''", "unpin ''", "diff '' IN", "diff IN ''", "convert '' out",
    "convert IN ''", "convert IN out --base ''", "copy '' out", "copy IN ''",
    "reshard '' out --world-size 1", "reshard IN '' --world-size 1", "push '' me/model",
    "convert IN out --push ''", "convert IN out --key-map ''", "verify IN --layout ''",
    "convert IN out --include ''",
])  # fmt: skip
def test_an_empty_path_or_option_is_refused(zoo, tmp_path, line, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo / HF, tmp_path, dirs_exist_ok=True)  # an empty path would read the current directory
    result = run(*(zoo / HF if word == "IN" else word for word in shlex.split(line)))
    assert result.exit_code == 2 and "is empty. Is a shell variable not set?" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", [CheckpointManager, open_checkpoint, verify, lambda url: convert(url, "out")])
def test_an_empty_path_is_refused_in_python(call):
    with pytest.raises(UsageError, match="The path is empty"):
        call("")
