"""The package as a whole: the cost of importing it, and its public names."""

import signal
import sys

import pytest

import ckptkit
from ckptkit.__main__ import main as command_line
from tests.lazy import modules_after

HEAVY = ("torch", "transformers", "lightning", "s3fs", "gcsfs", "botocore")


def run_cli(*args: str) -> str:
    lines = ["from ckptkit.cli.main import main", "try:", f"    main({list(args)!r})"]
    return "\n".join([*lines, "except SystemExit as e:", "    assert not e.code, e.code"])


def test_importing_ckptkit_imports_no_framework():
    assert not modules_after("import ckptkit, ckptkit.errors, ckptkit.units").intersection(HEAVY)


def test_help_imports_no_framework_and_no_numpy():
    assert not modules_after(run_cli("--help")).intersection({*HEAVY, "numpy"})


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        ckptkit.nothing  # noqa: B018


def test_an_interrupt_while_the_command_line_is_imported_ends_it_without_a_traceback(monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def find_spec(name, path, target=None):
            if name == "ckptkit.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ckptkit.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert command_line() == 130
        signal.raise_signal(signal.SIGINT)  # a second Ctrl-C has no effect
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "Interrupted. Nothing was changed.\n"
