"""Defines click options that --help lists in groups, and choices that suggest the right spelling after an error."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_LAST = "Output"


class _GroupedOption(click.Option):
    """An option. --help lists it under the heading `group`."""

    def __init__(self, *args: Any, group: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def grouped(group: str) -> Callable[..., Callable[[F], F]]:
    """Return a variant of `click.option`. --help lists its options under the heading `group`."""

    def option(*names: str, **settings: Any) -> Callable[[F], F]:
        return click.option(*names, cls=_GroupedOption, group=group, **settings)

    return option


def allow_pickle(group: str = "") -> Callable[[F], F]:
    """Return the option --allow-pickle."""
    return grouped(group)(
        "--allow-pickle",
        is_flag=True,
        help="Read torch.save files that name unknown classes. Omits the objects of these classes; runs no code.",
    )


def layout(group: str = "") -> Callable[[F], F]:
    """Return the option --layout. A missing file is refused even if the checkpoint's format needs no layout."""

    def existing(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        if value and "://" not in value and not os.path.exists(value):
            raise click.BadParameter(f"{value} does not exist.")
        return value

    return grouped(group)(
        "--layout",
        metavar="FILE",
        callback=existing,
        help="File with the names and shapes of flat parameters (FSDP1 LOCAL).",
    )


def warn_of_pickles() -> None:
    """Print a red warning that says what --allow-pickle omits."""
    click.secho(
        (
            "Warning: --allow-pickle reads files whose pickles name classes unknown to ckptkit. It runs "
            "none of their code and omits their values, so the result may be incomplete. A program that "
            "loads such a file with torch.load(weights_only=False) does run that code."
        ),
        fg="red",
        err=True,
    )


class GroupedCommand(click.Command):
    """A command whose --help lists options under group headings. Groups keep their order, but "Output" comes last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", _LAST), []).append(row)
        groups[_LAST] = groups.pop(_LAST, [])
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Count(click.IntRange):
    """An integer of at least `min`. Error messages call it a "whole number"."""

    name = "whole number"


class OneOf(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """A choice whose error message suggests the closest spelling.

    Args:
        hidden: Values that are accepted, but not listed in messages and help.
        meant: The choice to suggest for each known wrong value.
    """

    def __init__(
        self, choices: Sequence[str], *, hidden: Sequence[str] = (), meant: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(choices)
        self._hidden = frozenset(hidden)
        self._meant = meant or {}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._hidden or value in self.choices:
            return value
        near = (
            [self._meant[value]] if value in self._meant else difflib.get_close_matches(str(value), self.choices, n=1)
        )
        hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(map(str, self.choices))}."
        return self.fail(f"{value!r} is unknown. {hint}", param, ctx)
