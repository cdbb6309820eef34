"""Hook of mkdocs: links to files outside docs/ work on the code host; on the site they become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with links out of docs/ replaced by their text.

    A link to a file that does not exist stays, so that mkdocs reports it.
    """
    docs = Path(config["docs_dir"]).resolve()
    here = (docs / page.file.src_uri).parent

    def kept(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        return match[1] if target.exists() and not target.is_relative_to(docs) else match[0]

    return _LINK.sub(kept, markdown)
