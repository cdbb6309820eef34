"""`ckptkit inspect`: show the contents of a checkpoint."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import click

from ckptkit.cli import options as shared
from ckptkit.cli.frame import StorageOptions, command_frame, is_quiet, json_option, note, print_json, storage_option
from ckptkit.errors import UsageError, command_line
from ckptkit.units import counted, first_few, format_count, format_size

if TYPE_CHECKING:
    from ckptkit.offline.inspect import InspectReport, TreeNode

_SIBLINGS = 20  # maximum lines for the modules of one parent


@click.command("inspect")
@click.argument("url")
@click.option("--tensors", metavar="GLOB", help="List the tensors that match, with every slice and its rank.")
@click.option(
    "--depth", type=shared.Count(0), metavar="N", default=2, show_default=True, help="Depth of the module tree."
)
@click.option("--html", "html", metavar="OUT.html", help="Write one self-contained page with the shard map.")
@click.option("--after", metavar="URL", help="With --html: also draw which bytes a reshard to this checkpoint moves.")
@shared.allow_pickle()
@shared.layout()
@json_option
@storage_option
@command_frame
def command(
    url: str,
    tensors: str | None,
    depth: int,
    html: str | None,
    after: str | None,
    layout: str | None,
    allow_pickle: bool,
    as_json: bool,
    storage_options: StorageOptions,
) -> None:
    """Show the contents of the checkpoint at URL: format, mesh, parameters and bytes by section, the largest tensors,
    and the module tree. Reads only metadata."""
    from ckptkit.formats.options import ReadOptions
    from ckptkit.offline.inspect import inspect

    if after and not html:
        raise UsageError("--after needs --html OUT.html.")
    reading = ReadOptions(layout=layout, allow_pickle=allow_pickle)
    report = inspect(url, tensors=tensors, depth=depth, storage_options=storage_options, options=reading)
    if tensors and not report.tensors:
        names = command_line("inspect", url, "--tensors", "*")
        raise UsageError(f"no tensor matches {tensors!r}. See the names with: {names}")
    if html:
        from ckptkit.offline.pictures.pages import write_inspect_page

        write_inspect_page(url, html, other=after, storage_options=storage_options, options=reading)
        note(f"wrote {html}")
    if as_json:
        print_json(report.to_json())
    else:
        click.echo("\n".join(_lines(report)))


def _lines(report: InspectReport) -> list[str]:
    facts = [report.format + (f" by {report.producer}" if report.producer not in ("", report.format) else "")]
    if report.step is not None:
        facts.append(f"step {report.step}")
    if report.world_size:
        facts.append(counted(report.world_size, "rank"))
    if report.mesh:
        facts.append("mesh " + " x ".join(f"{name}={size}" for name, size in report.mesh.items()))
    known = [size for size in report.files.values() if size >= 0]
    unknown = f" and {len(report.files) - len(known)} of unknown size" if len(known) < len(report.files) else ""
    facts.append(counted(len(report.files), "file") + (f", {format_size(sum(known))}{unknown}" if known else ""))
    notes = [f"  {report.note}"] if report.note and not is_quiet() else []
    lines = [report.url, *notes, "  " + " · ".join(facts), ""]
    for section in report.sections:
        kinds = ", ".join(f"{dtype} {format_size(n)}" for dtype, n in section.dtypes.items())
        noun = "tensor " if section.tensors == 1 else "tensors"
        unit = "element " if section.numel == 1 else "elements"
        lines.append(
            f"  {section.role:<10} {section.tensors:>6} {noun}  {format_count(section.numel):>9} {unit}  "
            f"{format_size(section.nbytes):>9}  ({kinds})"
        )
        if list(section.placements) != ["whole"]:
            cuts = [f"{cut} ({count})" for cut, count in sorted(section.placements.items(), key=lambda item: -item[1])]
            lines.append(f"  {'':<10} sharding: {first_few(cuts, 4)}")
    if report.objects:
        lines.append(f"  {'objects':<10} {len(report.objects):>6}  {first_few(report.objects, 4)}")
    lines += [f"  tied: {name} is {kept}" for name, kept in report.tied.items()]
    if report.tensors:
        lines.append("")
        for tensor in report.tensors:
            kind = f"{tensor.dtype}{list(tensor.shape)}"
            lines.append(f"  {tensor.name}  {kind}  {format_size(tensor.nbytes)}  {tensor.role}")
            for part in tensor.slices:
                box = ", ".join(f"{o}:{o + s}" for o, s in zip(part.offsets, part.sizes, strict=True))
                owner = f"rank {part.rank}" if part.rank >= 0 else "        "
                lines.append(f"    {owner:<8} [{box}]  {part.path} @ {part.start} + {part.nbytes}")
    else:
        if report.largest:
            lines += ["", "  largest"]
        for t in report.largest[:5]:
            lines.append(f"    {format_size(t.nbytes):>9}  {t.fqn or t.name}  {t.dtype}{list(t.shape)}")
        if report.tree is not None:
            lines += ["", "  modules", *_tree_lines(report.tree, "    ")]
    lines += [f"  not interpreted: {name} {why}" for name, why in report.uninterpreted.items()]
    return lines + [f"  note: {note}" for note in report.notes if not is_quiet()]


def _place(index: int, child: TreeNode) -> int | str:
    """Return a key for `groupby`. Modules whose names are consecutive numbers share a key. Other keys are unique."""
    number = _number(child)
    return child.name if number < 0 else number - index


def _number(child: TreeNode) -> int:
    """Return a module's name as a number. -1 if the name is not a number, or is longer than 18 digits."""
    return int(child.name) if child.name.isdecimal() and len(child.name) < 19 else -1


def _tree_lines(node: TreeNode, indent: str) -> list[str]:
    """Return one line per module. Modules of equal size with consecutive numbers (usually layers) share a line."""
    lines = []
    children = sorted(node.children, key=_number)
    runs = groupby(enumerate(children), lambda row: (_place(*row), row[1].nbytes))
    groups = [[child for _, child in run] for _, run in runs]
    for group in groups[:_SIBLINGS]:
        child, name = group[0], group[0].name
        if len(group) > 1:
            name = f"{name}-{group[-1].name} ({len(group)} modules, each)"
        lines.append(f"{indent}{name:<28} {format_count(child.numel):>9}  {format_size(child.nbytes):>9}")
        lines += _tree_lines(child, indent + "  ")
    if len(groups) > _SIBLINGS:
        lines.append(f"{indent}... {sum(map(len, groups[_SIBLINGS:]))} more; --json lists all")
    return lines
