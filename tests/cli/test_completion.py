"""Completion in real shells, with the scripts that docs/getting-started.md names."""

import os
import shutil
import subprocess
import sys

import pytest

TYPED = ("ckptkit con", "ckptkit convert --ba", "ckptkit convert a b --to ''", "ckptkit inspect RUN/ste")
SHELLS = {  # the start of a script, whose `reply` prints the completions of the words that follow
    "bash": """
        eval "$(_CKPTKIT_COMPLETE=bash_source ckptkit)"
        compopt() { echo "compopt=$2"; }
        reply() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _ckptkit_completion ckptkit; echo "${COMPREPLY[@]}"
        }
    """,
    "fish": """
        _CKPTKIT_COMPLETE=fish_source ckptkit | source
        function reply; complete -C "$argv"; end
    """,
    "zsh": """
        autoload -Uz compinit && compinit -u
        eval "$(_CKPTKIT_COMPLETE=zsh_source ckptkit)"
        _describe() { print -r -- $completions_with_descriptions; }
        compadd() { print -r -- $completions; }
        _path_files() { print -r -- files }
        reply() { words=("$@"); CURRENT=$#; _ckptkit_completion; }
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
    script = "\n".join([SHELLS[shell], *(f"reply {line}" for line in TYPED)])
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run([program, *quiet, "-c", script], cwd=tmp_path, env=env, **options)
    for words in ("convert", "--base", "dcp", "torch"):
        assert words in done.stdout, done.stdout + done.stderr
    files = {"bash": "compopt=default", "fish": "RUN/step_00000100", "zsh": "files"}[shell]
    assert files in done.stdout, done.stdout + done.stderr
