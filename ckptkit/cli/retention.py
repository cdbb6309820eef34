"""The options that state a retention policy, for `ls` and `prune`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptkit.cli.options import Count

if TYPE_CHECKING:
    from ckptkit.checkpoint.retention import RetentionPolicy

__all__ = ["policy_from", "policy_options"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = [
    click.option("--max-num", type=Count(1), metavar="N", help="Keep the N newest."),
    click.option(
        "--max-mem", metavar="SIZE", help="Keep the total below SIZE, for example 1TB (10^12) or 1TiB (2^40)."
    ),
    click.option(
        "--keep-every", type=Count(1), metavar="N", help="Keep each checkpoint whose step is a multiple of N."
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
        help="With limits given: ignore the keep_every and keep_best that the run recorded.",
    ),
]


def policy_options(function: F) -> F:
    """Add the options to a command, which gets max_num, max_mem, keep_every, keep_best and recorded."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def policy_from(
    max_num: int | None, max_mem: str | None, keep_every: int | None, keep_best: str | None
) -> RetentionPolicy | None:
    """Return the policy that the options state, None where none was given. Raises UsageError."""
    if max_num is None and max_mem is None and keep_every is None and keep_best is None:
        return None
    from ckptkit.checkpoint.retention import RetentionPolicy
    from ckptkit.errors import UsageError

    best: Any = None
    if keep_best is not None:
        parts = keep_best.split(":")
        if len(parts) not in (2, 3) or (len(parts) == 3 and not parts[2].isdigit()):
            raise UsageError(
                f"--keep-best {keep_best}: expected METRIC:min or METRIC:max, optionally with :N, for example "
                "val_loss:min:2."
            )
        best = (parts[0], parts[1], int(parts[2]) if len(parts) == 3 else 1)
    return RetentionPolicy(max_num=max_num, max_mem=max_mem, keep_every=keep_every, keep_best=best)
