"""Completion in real shells, with the scripts that docs/getting-started.md names."""

import os
import shutil
import subprocess
import sys

import pytest

SHELLS = {
    "bash": """
        eval "$(_CKPTKIT_COMPLETE=bash_source ckptkit)"
        reply() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _ckptkit_completion ckptkit; echo "${COMPREPLY[@]}"
        }
        reply ckptkit con
        reply ckptkit convert --ba
        reply ckptkit convert a b --to ''
        compopt() { echo "compopt=$2"; }
        reply ckptkit inspect RUN/ste
    """,
    "fish": """
        _CKPTKIT_COMPLETE=fish_source ckptkit | source
        complete -C 'ckptkit con'
        complete -C 'ckptkit convert --ba'
        complete -C 'ckptkit convert a b --to '
        complete -C 'ckptkit inspect RUN/ste'
    """,
    "zsh": """
        autoload -Uz compinit && compinit -u
        eval "$(_CKPTKIT_COMPLETE=zsh_source ckptkit)"
        _describe() { print -r -- $completions_with_descriptions; }
        compadd() { print -r -- $completions; }
        _path_files() { print -r -- files }
        reply() { words=("$@"); CURRENT=$#; _ckptkit_completion; }
        reply ckptkit con
        reply ckptkit convert --ba
        reply ckptkit convert a b --to ''
        reply ckptkit inspect RUN/ste
    """,
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_choices_and_paths(shell, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ckptkit"
    command.write_text(f"#!{sys.executable}\nfrom ckptkit.cli.main import main\nmain()\n")
    command.chmod(0o755)
    (tmp_path / "RUN" / "step_00000100").mkdir(parents=True)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}
    quiet = {"bash": ["--norc"], "fish": ["--no-config"], "zsh": ["-f"]}[shell]
    done = subprocess.run(
        [program, *quiet, "-c", SHELLS[shell]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    for words in ("convert", "--base", "dcp", "torch"):
        assert words in done.stdout, done.stdout + done.stderr
    files = {"bash": "compopt=default", "fish": "RUN/step_00000100", "zsh": "files"}[shell]
    assert files in done.stdout, done.stdout + done.stderr
