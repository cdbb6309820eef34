"""Finds files that belong to no checkpoint or export, so that `--overwrite` does not delete them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

from ckptkit.digests import DIGEST, hex_digest_of
from ckptkit.errors import UNREADABLE, CheckpointExistsError
from ckptkit.formats.hf.side_files import is_code, is_side_file, read_json
from ckptkit.formats.own.record import MANIFEST_NAME, RECORD_NAME, find_record
from ckptkit.formats.state_names import WEIGHTS_NAMES
from ckptkit.storage.local import UNFINISHED
from ckptkit.storage.store import FileInfo, Store

_SHOWN = 3
_OURS = re.compile(r"\.ckptkit-(?:owner(?:-\d+)?\.json|done/.*|new/.*)", re.DOTALL)
_STATE = re.compile(r"state-\d{5,}-of-\d{5,}\.safetensors")  # FULL's additional files
_VARIANT = (
    r"(?:\.(?:fp16|bf16|fp32|fp8|int8|int4|ema|non_ema|\d+))?"  # any other suffix may mark a copy that somebody keeps
)
_WEIGHTS = re.compile(
    rf"(?:{WEIGHTS_NAMES}){_VARIANT}\.safetensors|"
    rf"(?:shard-\d+-)?(?:model|(?:diffusion_)?pytorch_model|consolidated|adapter_model){_VARIANT}-\d{{5,}}-of-\d{{5,}}"
    rf"{_VARIANT}\.(?:safetensors|bin)|.+\.(?:safetensors|bin)\.index\.json|"
    rf"(?:diffusion_)?pytorch_model(?:_fsdp)?(?:_\d+)?{_VARIANT}\.bin|adapter_model\.bin|"
    r"\.metadata|__\d+\.metadata|__\d+_\d+\.distcp|local_\d{5,9}\.safetensors"
)
_BESIDE = frozenset(
    [MANIFEST_NAME, RECORD_NAME, "objects.json", ".metadata.tmp", "SHA256SUMS", "adapter_config.json",
     "peft_config.json",
     ".gitattributes", "training_args.bin", "vocab.bpe", "encoder.json", "normalizer.json"]
)  # fmt: skip
_FOLDERS = ("additional_chat_templates", ".cache/huggingface")  # everything in these folders belongs to an export
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_OF_TORCH = re.compile(rb".+/(?:data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment)", re.DOTALL)
_MARK = f"<!-- ckptkit: {DIGEST} of the text above: "


def check_replaceable(store: Store, path: str = "", known: Collection[str] = ()) -> None:
    """Check that `path` does not exist, or holds exactly one checkpoint or one export.

    Args:
        known: Names of files that an interrupted command recorded as its own.

    Raises:
        CheckpointExistsError: `path` holds other files (the message names the first three), is a directory without a
            checkpoint or export, or is a file that neither torch.save nor safetensors wrote.
    """
    found = store.info(path)
    if found is None:
        return
    if found.kind == "directory":
        _check_directory(store.child(path) if path else store, known)
    elif not _is_weights_file(store, found):
        why = "it is not a file that torch.save or safetensors wrote."
        raise _refusal(f"{store.url}/{path}", why, "Choose another place.")


def _check_directory(store: Store, known: Collection[str]) -> None:
    foreign = list(itertools.islice((path for path in foreign_paths(store) if path not in known), _SHOWN + 1))
    if foreign:
        names = ", ".join(foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
        card = " README.md was edited, or ckptkit did not write it." * ("README.md" in foreign[:_SHOWN])
        why = f"it holds files that belong to no checkpoint and no export: {names}.{card}"
        raise _refusal(store.url, why, "Move it away, or choose another place.")
    if not known and not any(item.path == RECORD_NAME or _WEIGHTS.fullmatch(item.path) for item in store.list()):
        raise _refusal(store.url, "it holds neither a checkpoint nor an export.", "Empty it, or choose another place.")


def _refusal(place: str, why: str, instead: str) -> CheckpointExistsError:
    error = CheckpointExistsError(f"{place} is not overwritten: {why} Nothing was written. {instead}")
    error.reason = why
    return error


def _is_weights_file(store: Store, found: FileInfo) -> bool:
    if found.kind != "file" or not found.size:
        return found.kind == "file"
    head = store.read(found.path, 0, 1024)
    is_safetensors = head[8:9] == b"{" and int.from_bytes(head[:8], "little") < found.size
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]  # an archive's first member: APPNOTE.TXT 4.3.7
    is_torch_zip = head.startswith(b"PK\x03\x04") and _OF_TORCH.fullmatch(first) is not None
    from ckptkit.formats.pickles.legacy import is_legacy  # lazy, because it imports numpy

    return is_safetensors or is_torch_zip or is_legacy(head)


def foreign_paths(store: Store) -> Iterator[str]:
    """Yield the paths in a directory that belong to no checkpoint and no export. Paths of directories end in "/".

    If there is a commit record, only the files that the record lists belong to the checkpoint.
    """
    try:
        record = find_record(store)
    except UNREADABLE:
        record = None  # the record is damaged: judge by names
    files = None
    if record is not None:
        below = f"{record.data}/" if record.data else ""
        files = frozenset([RECORD_NAME, *(f"{below}{path}" for path in record.files)])
    folders = _FOLDERS if files is None else ()
    above = {folder[:at] for folder in (*folders, *(files or ())) for at, c in enumerate(folder) if c == "/"}
    pending = [""]
    # PEFT gives each adapter its own folder, except the first adapter.
    adapters = files is None and all(store.info(name) is not None for name in _ADAPTER[:2])
    for folder in pending:  # the list grows during the loop
        for item in store.list(folder):
            if item.kind == "directory":
                expected = item.path in above or f"{item.path}/".startswith(tuple(f"{name}/" for name in folders))
                if expected or (adapters and not folder and store.info(f"{item.path}/{_ADAPTER[0]}") is not None):
                    pending.append(item.path)
                elif not _OURS.fullmatch(f"{item.path}/"):
                    yield f"{item.path}/"
            elif not belongs(store, item, files):
                yield item.path


def may_be_saved(path: str) -> bool:
    """Return whether a file may be from a save by ckptkit, finished or unfinished, judging by its name.

    The file may be in any folder, because each of several models or adapters has its own folder.
    """
    name = path.rpartition("/")[2]
    if name in _BESIDE or is_side_file(path) or is_side_file(name):
        return True
    return any(pattern.fullmatch(name) for pattern in (_WEIGHTS, _STATE, UNFINISHED))


def marked(card: str) -> str:
    """Return a model card with a digest of its text at the end. With the digest, later edits can be detected."""
    return f"{card}{_MARK}{_digest(card)} -->\n"


def _is_unedited(card: bytes) -> bool:
    text, mark, end = card.decode("utf-8", "replace").rpartition(_MARK)
    return bool(mark) and end == f"{_digest(text)} -->\n"


def _digest(text: str) -> str:
    return hex_digest_of(text.encode())


def belongs(store: Store, item: FileInfo, files: Collection[str] | None = None) -> bool:
    """Return whether a file belongs to the export or the checkpoint in `store`.

    Args:
        files: The files that the commit record lists. None if there is no record.
    """
    path = item.path
    if _OURS.fullmatch(path):
        return True
    if files is not None:
        return path in files and item.kind == "file"
    if item.kind != "file":
        return False
    if "/" in path:
        return path.startswith(tuple(f"{name}/" for name in _FOLDERS)) or path.rpartition("/")[2] in _ADAPTER
    if path == "README.md":
        return item.size < 1 << 20 and _is_unedited(store.read(path))
    if is_code(path):
        config = read_json(store, "config.json")
        return isinstance(config, dict) and bool(config.get("auto_map"))
    return path in _BESIDE or is_side_file(path) or bool(_WEIGHTS.fullmatch(path))
