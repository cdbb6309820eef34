"""Writes an export's README.md, which says where the weights come from. Omits secrets and escapes all markup."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.entry import Catalog
from ckptkit.digests import SHA256, new_hasher
from ckptkit.formats.replaceable import marked
from ckptkit.units import format_count, format_size
from ckptkit.version import __version__

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~])")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The contents of a model card.

    Attributes:
        source: URL of the checkpoint. Only its last component is shown, because a URL may contain private bucket names.
        kind: "model" or "adapter".
        dtypes: Number of elements by dtype.
        notes: Decisions about key maps, casts and tied weights.
    """

    source: str
    kind: str
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    weights: str
    key_map: str
    base_repo: str | None
    notes: Sequence[str]


def model_card(catalog: Catalog, facts: CardFacts) -> str:
    """Return the text of README.md."""
    info = catalog.info
    library = "peft" if facts.kind == "adapter" else "transformers"
    front = [f"library_name: {library}"]
    if facts.base_repo and _REPO.fullmatch(facts.base_repo):
        front += ["base_model:", f"- {json.dumps(facts.base_repo)}"]
    front += ["tags:", "- ckptkit"]
    rows: list[tuple[str, Any]] = [
        ("Source", _last_part(facts.source)),
        ("Format", info.format),
        ("Written by", info.producer),
        ("Training step", info.step),
        ("Ranks that wrote it", info.world_size),
        (
            "Mesh",
            ", ".join(f"{n}={s}" for n, s in zip(info.mesh.names, info.mesh.shape, strict=False))
            if info.mesh
            else None,
        ),
        ("Weights", facts.weights),
        ("Parameters", f"{format_count(facts.parameters)} ({facts.parameters}), {format_size(facts.nbytes)}"),
        ("Dtypes", ", ".join(f"{name}: {format_count(n)}" for name, n in sorted(facts.dtypes.items()))),
        ("Names", facts.key_map),
        ("Source fingerprint", source_fingerprint(catalog)),
        ("Converted by", f"ckptkit {__version__}"),
    ]
    lines = ["---", *front, "---", "", f"# {_safe(_last_part(facts.source))}", ""]
    lines += ["| | |", "|---|---|", *(f"| {k} | {_safe(str(v))} |" for k, v in rows if v not in (None, ""))]
    if facts.notes:
        lines += ["", *(f"- {_safe(note)}" for note in facts.notes)]
    return marked("\n".join(lines) + "\n\n")


def source_fingerprint(catalog: Catalog) -> str | None:
    """Return a SHA-256 over the source's names, dtypes, shapes and digests. Returns None if there are no digests.

    Copies of the same checkpoint have the same SHA-256. Does not read the weights.
    """
    total = sum(len(entry.slices) for entry in catalog.tensors.values())
    digest = new_hasher(SHA256)
    algorithms: set[str] = set()
    for name in sorted(catalog.tensors):
        entry = catalog.tensors[name]
        if entry.slices.opaque or entry.slices.digests is None or entry.slices.algorithm is None:
            return None
        algorithms.add(entry.slices.algorithm)
        digest.update(json.dumps([name, entry.dtype, list(entry.shape)]).encode())
        digest.update(entry.slices.offsets.tobytes() + entry.slices.digests.tobytes())
    return f"{SHA256}:{digest.hexdigest()} over {total} {'/'.join(sorted(algorithms))} digests" if algorithms else None


def _last_part(url: str) -> str:
    path = url.split("?", 1)[0].split("#", 1)[0].partition("://")[2] or url.split("?", 1)[0]
    return path.rstrip("/").rpartition("/")[2].rpartition("@")[2] or "checkpoint"


def _safe(text: str) -> str:
    """Return the text, escaped so that it is shown literally on one line, without markdown or HTML."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _SPECIAL.sub(r"\\\1", html.escape(line, quote=False))[:2000]
