"""Defines the retention-policy options of `ls` and `prune`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptkit.cli.options import Count
from ckptkit.errors import UsageError

if TYPE_CHECKING:
    from ckptkit.checkpoint.retention import RetentionPolicy


F = TypeVar("F", bound=Callable[..., Any])

# Each option is named after its field of RetentionPolicy.
_OPTIONS = [
    click.option("--max-num", type=Count(1), metavar="N", help="Keep the N newest."),
    click.option(
        "--max-mem", metavar="SIZE", help="Keep the total at or below SIZE, for example 1TB (10^12) or 1TiB (2^40)."
    ),
    click.option(
        "--keep-every", type=Count(1), metavar="N", help="Keep each checkpoint whose step is a multiple of N."
    ),
    click.option(
        "--keep-daily",
        type=Count(1),
        metavar="N",
        help="Keep the newest of each day (UTC), for the last N days that have a checkpoint.",
    ),
    click.option(
        "--keep-best", metavar="METRIC:min|max[:N]", help="Keep the N best by a metric, for example val_loss:min:2."
    ),
    click.option(
        "--forget-recorded",
        "recorded",
        is_flag=True,
        flag_value=False,
        default=True,
        help="Ignore the --keep-... rules that the run recorded. Only with another of these options.",
    ),
]


def policy_options(function: F) -> F:
    """Add the retention options to a command. The command must call `take_policy`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def take_policy(options: dict[str, Any]) -> RetentionPolicy | None:
    """Remove the retention options from a command's options. Return them as a policy, or None if none was given.

    Raises:
        UsageError: A value is invalid, or only --forget-recorded was given.
    """
    names = ("max_num", "max_mem", "keep_every", "keep_daily", "keep_best")
    stated = {name: value for name in names if (value := options.pop(name)) is not None}
    if not stated:
        if not options["recorded"]:
            raise UsageError("--forget-recorded alone is no policy. Add one, for example --max-num 3.")
        return None
    from ckptkit.checkpoint.retention import RetentionPolicy

    if "keep_best" in stated:
        parts = stated["keep_best"].split(":")
        if len(parts) not in (2, 3) or (len(parts) == 3 and not parts[2].isdigit()):
            raise UsageError(
                f"--keep-best {stated['keep_best']}: expected METRIC:min or METRIC:max, optionally followed by :N, "
                "such as val_loss:min:2."
            )
        stated["keep_best"] = (parts[0], parts[1], int(parts[2]) if len(parts) == 3 else 1)
    return RetentionPolicy(**stated)
