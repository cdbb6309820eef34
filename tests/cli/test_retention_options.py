"""The options of `ls` and `prune` for a retention policy."""

from __future__ import annotations

import dataclasses

import click
import pytest

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.cli import ls, prune
from ckptkit.cli.retention import take_policy


@pytest.mark.parametrize("command", [ls.command, prune.command])
def test_each_retention_rule_has_an_option(command: click.Command) -> None:
    assert {field.name for field in dataclasses.fields(RetentionPolicy)} <= {param.name for param in command.params}


def test_the_options_make_a_policy() -> None:
    given = ["--max-num=3", "--max-mem=1GB", "--keep-every=10", "--keep-daily=7", "--keep-best=loss:min:2"]
    made = prune.command.make_context("prune", ["RUN", *given]).params
    assert take_policy(made) == RetentionPolicy(3, "1GB", 10, ("loss", "min", 2), 7)
    none = prune.command.make_context("prune", ["RUN"]).params
    assert take_policy(none) is None
    assert not {field.name for field in dataclasses.fields(RetentionPolicy)} & {*made, *none}
