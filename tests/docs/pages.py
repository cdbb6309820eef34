"""The pages of the repository and their code blocks."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the code blocks of a kind, each with its page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] == kind:
                line = text[: match.start()].count("\n") + 1
                yield f"{page.relative_to(ROOT)}:{line}", match[2]
