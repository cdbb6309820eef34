"""Pages with untrusted names: an HTML parser finds only tags, attributes and scripts of our own."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from ckptkit import CheckpointManager, TrainState
from ckptkit.checkpoint.run.pins import pin_forever
from ckptkit.redact import printable
from tests.cli import commands
from tests.formats.damages import lay
from tests.hostile.sources import header

NAMES = [
    "<script>alert(1)</script>", "</title></svg><script>alert(2)</script>", '" onmouseover="alert(3)', "' onload='alert(4)",
    "<!--", "-->", "]]>", "<![CDATA[", "&lt;b&gt;", "&#60;b&#62;", "</style><style>*{background:url(//x)}", "javascript:alert(5)",
    "a\u2028b\u2029c", "a\u202eb", "\x1b[31m", "a\nb", "<img src=x onerror=alert(6)>", "\uff1cscript\uff1e", "${alert(7)}", "{{7*7}}",
    "<svg/onload=alert(8)>", "`x`", "\\u003cscript\\u003e", "<" * 300, "x" * 2000, "\x00", "\ufeff", "\U000e0001",
    "model.embed.weight",
]  # fmt: skip
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "dl", "dt", "dd", "div", "section", "footer",
    "svg", "rect", "text", "g", "path", "circle", "details", "summary",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "name", "content", "http-equiv", "id", "class", "x", "y", "width", "height", "fill",
    "viewbox", "xmlns", "role", "font-family", "text-anchor", "transform", "d", "fill-opacity", "cx", "cy", "r",
    "stroke", "stroke-width",
}  # fmt: skip


class _Reader(HTMLParser):
    """Collects every tag, attribute and text of a page; titles within pictures are collected separately."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data!r}")


def read(path: Path) -> _Reader:
    """Parse a page strictly, and check that every part is ours."""
    page = path.read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert reader.tags <= TAGS, reader.tags - TAGS
    assert reader.attributes <= ATTRIBUTES, reader.attributes - ATTRIBUTES
    assert "default-src 'none'" in page
    assert not {c for c in page if (ord(c) < 32 and c != "\n") or c in "\u2028\u2029\u202e\x7f"}
    return reader


def run(*arguments: str) -> None:
    result = commands.run(*arguments)
    assert result.exit_code in (0, 1) and "bug in ckptkit" not in result.output, result.output


def tensors(path: Path, value: int) -> None:
    """Write tensors with hostile names, alone and as parts of layer names."""
    names = [form for name in NAMES for form in (name, f"layers.{name}.weight", f"{name}.0.weight")]
    entries = {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}
    path.mkdir()
    (path / "model.safetensors").write_bytes(header(entries) + bytes([0, 0, value, 63]) * len(names))


@pytest.mark.parametrize("kind", ["inspect", "diff"])
def test_tensor_names_are_escaped_on_a_page(kind, tmp_path):
    tensors(tmp_path / "a", 0)
    tensors(tmp_path / "b", 128)
    a, b, page = str(tmp_path / "a"), str(tmp_path / "b"), tmp_path / "page.html"
    run(*(("inspect", a, "--after", b) if kind == "inspect" else ("diff", a, b)), "--html", str(page))
    shown = "\n".join(read(page).texts)
    # The page inserts no line break into a name, but a title may have several lines.
    missing = [name for name in NAMES if printable(name).replace("\x00", "") not in shown and "\n" not in name]
    assert missing == []


def test_names_reasons_and_paths_of_a_run_are_escaped_on_a_page(tmp_path):
    root = tmp_path / "<script>alert(1)<!--\u2028&amp; 'run\""
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, TrainState(model=torch.nn.Linear(1, 1), step=step), metrics={"</script><b>": 1.0})
    for why in NAMES:
        pin_forever(str(root / "step_00000001"), why)
    lay(root, {"step_00000005/checkpoint.json": '{"x": "<script>"}', "<img src=x>/": None, "step_<b>/": None})
    run("ls", str(root), "--all", "--html", str(tmp_path / "page.html"))
    assert any("<script>alert(1)<!--" in text for text in read(tmp_path / "page.html").texts)


def test_the_parser_of_these_tests_recognizes_an_attack(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<html><body><script>alert(1)</script></body></html> default-src 'none'")
    with pytest.raises(AssertionError, match="script"):
        read(page)
