"""Builds the HTML page around the pictures, and basic SVG elements."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptkit.redact import printable, without_known_secrets, without_secrets
from ckptkit.storage.store import is_safe_name

PAGE = 1100.0  # with its headings, a picture of this height (at a width of 1100) fits on an A4 or letter sheet

_STYLE = """
:root { --ink: #1c2330; --soft: #5b6575; --line: #d5dae2; --paper: #ffffff; --panel: #f7f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #3a4252; --paper: #14181f; --panel: #1c222c; }
}
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --panel: #fff; }
  @page { margin: 12mm; }
  body { padding: 0; }
  section { padding: 8px; }
  section:not(.long), svg { break-inside: avoid-page; }
  h2, p { break-after: avoid-page; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1180px; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
h1 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 2px; }
p { margin: 0 0 10px; color: var(--soft); }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 16px; margin: 16px 0; }
summary { cursor: pointer; }
summary h2 { display: inline; }
details[open] > summary { margin-bottom: 8px; }
dl { display: flex; flex-wrap: wrap; gap: 4px 28px; margin: 12px 0 0; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
@media screen and (max-width: 900px) {
  body { padding: 10px; }
  section { padding: 10px; overflow-x: auto; }
  svg { min-width: 860px; }
}
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg text.soft { fill: var(--soft); }
svg text.on { fill: #10151d; }
svg rect.slice { stroke: var(--panel); stroke-width: 0.6; }
svg rect:hover, svg circle:hover, svg path.ribbon:hover, svg g > path:hover { opacity: 0.7; }
svg path.line { fill: none; stroke: var(--soft); stroke-width: 1.2; }
svg path.limit { stroke: var(--soft); stroke-dasharray: 4 3; }
svg g.equal { stroke: var(--line); }
svg rect.gone { fill: none; stroke: #9aa4b5; stroke-dasharray: 4 3; }
footer { color: var(--soft); font-size: 12px; }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture, with a heading and a sentence that says how to read it.

    Attributes:
        picture: The SVG. A picture that is taller than a sheet of paper (`PAGE` user units) consists of several SVG
            elements.
        behind: Text next to the heading of a folded panel. "" if the panel is not folded.
    """

    heading: str
    explanation: str
    picture: str
    behind: str = ""


def page(
    title: str, panels: Iterable[Panel], *, facts: Sequence[tuple[str, str]] = (), source: str = "metadata alone"
) -> str:
    """Return the whole HTML document, including its styles and pictures. It loads nothing from the network.

    `source` says in the footer what the page was made from.
    """
    title = without_secrets(title)
    shown = "".join(f"<div><dt>{escaped(k)}</dt><dd>{escaped(without_secrets(v))}</dd></div>" for k, v in facts)
    body = "".join(map(_section, panels))
    return without_known_secrets(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escaped(title)}</h1><dl>{shown}</dl>{body}"
        f"<footer>Made by ckptkit from {escaped(source)}.</footer></body></html>\n"
    )


def _section(panel: Panel) -> str:
    long = ' class="long"' * (panel.picture.count("<svg ") > 1)
    heading, body = f"<h2>{escaped(panel.heading)}</h2>", f"<p>{escaped(panel.explanation)}</p>{panel.picture}"
    if panel.behind:
        body = f"<details><summary>{heading} {escaped(panel.behind)}</summary>{body}</details>"
    else:
        body = heading + body
    name = panel.heading.lower().replace(" ", "-")
    anchor = escaped(name) if is_safe_name(name) else "panel"
    return f'<section id="{anchor}"{long}>{body}</section>'


def escaped(words: str) -> str:
    """Return `words` escaped for HTML: tags, quotes and invisible characters."""
    return html.escape(printable(words))


def svg(width: float, height: float, content: str) -> str:
    """Return an SVG element with this size in user units, scaled to the page."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'font-family="system-ui, sans-serif">{content}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, *, fill: str = "", title: str = "", kind: str = "") -> str:
    """Return a rectangle. `title` is shown on hover. `kind` is the CSS class, for rectangles without `fill`."""
    inside = f"<title>{escaped(title)}</title>" if title else ""
    kind = kind or ("slice" if width > 2 else "thin")  # thin rectangles have no outline, because it would hide the fill
    filled = f' fill="{fill}"' if fill else ""
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
        f"{filled}>{inside}</rect>"
    )


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text with its baseline at y."""
    cls = f' class="{kind}"' if kind else ""
    return f'<text{cls} x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escaped(words)}</text>'


def label(words: str, width: float) -> str:
    """Return `words`, shortened in the middle to fit into `width` user units at a font size of 11 px."""
    room = max(1, int(width / 6.1))
    if len(words) <= room:
        return words
    if room < 5:
        return ""
    head = (room - 1) // 3
    return f"{words[:head]}…{words[len(words) - (room - 1 - head) :]}"


def colour(index: int, count: int) -> str:
    """Return the colour of rank `index` of `count` ranks. Neighbouring ranks differ in hue and lightness."""
    if index < 0:
        return "#9aa4b5"
    hue = (index * 137.508 + 212) % 360 if count > 12 else (212 + index * 360 / max(count, 1)) % 360
    return f"hsl({hue:.0f} 58% {(70, 62, 76)[index % 3]}%)"
