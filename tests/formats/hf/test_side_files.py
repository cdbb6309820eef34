"""Which side files an export copies, and what it notes about the others."""

from __future__ import annotations

from pathlib import Path

from ckptkit.formats.detect import open_source
from ckptkit.formats.hf.side_files import find_side_files
from ckptkit.storage.local import LocalStore
from tests.hostile.sources import safetensors


def test_a_side_file_with_an_unsafe_name_is_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": [1]}))
    for name in ("tokenizer.json", "tokenizer\x1b[31m.json", "tokenizer\\x.json", "NOTICE.", "nobody\nasked"):
        (tmp_path / name).write_text("{}")
    found = find_side_files(LocalStore(tmp_path))
    assert found.carried == ("tokenizer.json",)
    note = " ".join(found.notes)
    assert all(name in note for name in ("\\x1b[31m", "tokenizer\\\\x.json", "NOTICE."))
    assert "nobody" not in note  # the name does not make it a side file
    assert note in open_source(str(tmp_path)).catalog.info.notes


def test_safe_names_need_no_note(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "LICENSE", "modeling.py"):
        (tmp_path / name).write_text("{}")
    found = find_side_files(LocalStore(tmp_path))
    assert found.notes == ()
    assert found.code == ("modeling.py",)
