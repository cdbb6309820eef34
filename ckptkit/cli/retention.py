"""Defines the retention-policy options of `ls` and `prune`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptkit.cli.options import Count

if TYPE_CHECKING:
    from ckptkit.checkpoint.retention import RetentionPolicy


F = TypeVar("F", bound=Callable[..., Any])

_STATED = "ckptkit.retention"


def _note(context: click.Context, option: click.Parameter, value: Any) -> None:
    context.meta.setdefault(_STATED, {})[option.name] = value


_rule = partial(click.option, expose_value=False, callback=_note)
# Each option is named after its field of RetentionPolicy.
_OPTIONS = [
    _rule("--max-num", type=Count(1), metavar="N", help="Keep the N newest."),
    _rule("--max-mem", metavar="SIZE", help="Keep the total at or below SIZE, for example 1TB (10^12) or 1TiB (2^40)."),
    _rule("--keep-every", type=Count(1), metavar="N", help="Keep each checkpoint whose step is a multiple of N."),
    _rule(
        "--keep-daily",
        type=Count(1),
        metavar="N",
        help="Keep the newest of each day (UTC), for the last N days that have a checkpoint.",
    ),
    _rule("--keep-best", metavar="METRIC:min|max[:N]", help="Keep the N best by a metric, for example val_loss:min:2."),
    click.option(
        "--forget-recorded",
        "recorded",
        is_flag=True,
        flag_value=False,
        default=True,
        help="If limits are given, ignore the --keep-... rules that the run recorded.",
    ),
]


def policy_options(function: F) -> F:
    """Add the retention options to a command, which receives only `recorded`; `stated_policy` reads the others."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def stated_policy() -> RetentionPolicy | None:
    """Return the policy that the command's options state; None if none of them was given.

    Raises:
        UsageError: A value is invalid.
    """
    stated = {name: value for name, value in click.get_current_context().meta[_STATED].items() if value is not None}
    if not stated:
        return None
    from ckptkit.checkpoint.retention import RetentionPolicy
    from ckptkit.errors import UsageError

    best = stated.get("keep_best")
    if best is not None:
        parts = best.split(":")
        if len(parts) not in (2, 3) or (len(parts) == 3 and not parts[2].isdigit()):
            raise UsageError(
                f"--keep-best {best}: expected METRIC:min or METRIC:max, optionally followed by :N, "
                "such as val_loss:min:2."
            )
        stated["keep_best"] = (parts[0], parts[1], int(parts[2]) if len(parts) == 3 else 1)
    return RetentionPolicy(**stated)
