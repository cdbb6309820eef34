"""Selects the files that accompany the weights in an export: config, tokenizer, chat template, licence."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptkit.formats.own.json import check_density
from ckptkit.formats.state_names import OPTIMIZER_FILE
from ckptkit.storage import FileInfo, Store
from ckptkit.storage.store import is_safe_name

if TYPE_CHECKING:
    from ckptkit.catalog.entry import CatalogInfo  # it imports numpy, which `ls` does without

_CARRIED = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "preprocessor_config.json",
    "processor_config.json",
    "*_preprocessor_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
_CODE = ("*.py",)
_STATE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", "trainer_state.json")
_NAMED = 16
_MAX_JSON_BYTES = 32 << 20
# The entries in a transformers config that concern weights: tied weights, and sizes that determine the shapes.
_CONFIG_KEYS = (
    "architectures",
    "model_type",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "transformers_version",
)


@dataclass(frozen=True, slots=True)
class SideFiles:
    """The side files of a checkpoint (config, tokenizer and the like).

    Attributes:
        carried: Files that an export copies, such as config.json and tokenizer files. Paths are relative to the store.
        code: Python files by the model's author. They are listed, but never run.
        config: Contents of config.json, or None if config.json is missing or can't be read.
        notes: Messages about files that could not be read.
    """

    carried: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def described_in(self, info: CatalogInfo) -> CatalogInfo:
        """Return `info` with these side files, the relevant entries of config.json, and the notes."""
        extra = {**self.extra, **info.extra}
        return replace(info, side_files=self.carried, notes=(*info.notes, *self.notes), extra=extra)

    @property
    def extra(self) -> dict[str, Any]:
        """The entries for `CatalogInfo.extra`."""
        found: dict[str, Any] = {}
        if self.config:
            found["config"] = {key: self.config[key] for key in _CONFIG_KEYS if key in self.config}
        if self.code:
            found["code_files"] = list(self.code)
        return found


def find_side_files(store: Store, directory: str = "") -> SideFiles:
    """Find the side files in `directory`. Reads only config.json."""
    entries = store.list(directory)
    templates = f"{directory}/additional_chat_templates" if directory else "additional_chat_templates"
    if any(entry.path == templates for entry in entries):
        entries += store.list(templates)
    # Files with unsafe names are not copied: another system may refuse such a name, or show it misleadingly.
    found = [entry.path for entry in entries if entry.kind in ("file", "symlink")]
    files = [path for path in found if is_safe_name(path.rpartition("/")[2])]
    notes = _unsafe(found, files, directory)
    carried = tuple(path for path in files if _matches(path, directory, _CARRIED))
    code = tuple(path for path in files if _matches(path, directory, _CODE))
    config_path = f"{directory}/config.json" if directory else "config.json"
    if config_path not in carried:
        return SideFiles(carried, code, None, notes)
    config = read_json(store, config_path)
    if not isinstance(config, dict):
        note = f"{config_path} could not be read as a JSON object; it was not used."
        return SideFiles(carried, code, None, (note, *notes))
    return SideFiles(carried, code, config, notes)


def _unsafe(found: Sequence[str], safe: Sequence[str], directory: str) -> tuple[str, ...]:
    """Return a note about the side files that are in `found` but not in `safe`."""
    left = sorted(set(found) - set(safe))
    names = [path for path in left if _matches(path, directory, (*_CARRIED, *_CODE))]
    if not names:
        return ()
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return (f"not copied, because their names are unsafe: {', '.join(f'{name!r:.80}' for name in names[:3])}{more}.",)


def is_side_file(path: str) -> bool:
    """Return whether a file at a checkpoint's root is a side file, judging by its name."""
    return _matches(path, "", _CARRIED)


def is_inner_side_file(path: str) -> bool:
    """Return whether a file in a folder of a checkpoint, such as "actor/config.json", is a side file, by its name."""
    parts = path.split("/")
    return not is_side_file(path) and any(is_side_file("/".join(parts[at:])) for at in range(1, len(parts)))


def is_code(path: str) -> bool:
    """Return whether a file at a checkpoint's root is Python code by the model's author, judging by its name."""
    return _matches(path, "", _CODE)


def unread_state(names: Iterable[str]) -> tuple[str, ...]:
    """Return notes about unread training state of the Trainer or accelerate.

    A directory with full weights may also contain such state. The optimizer is not read, because its states are
    numbered, and no file records the parameter of each number.
    """
    found = sorted(name for name in names if name.endswith(_STATE))
    optimizers = [name for name in found if OPTIMIZER_FILE.fullmatch(name)][:1]
    others = [name for name in found if name not in optimizers]
    more = f", ... ({len(others)} files)" * (len(others) > _NAMED)
    return (
        *(f"{name} is not read: it has no parameter names." for name in optimizers),
        *([f"not read: {', '.join(others[:_NAMED])}{more}."] if others else []),
    )


def read_json(store: Store, path: str) -> Any:
    """Return the parsed contents of a JSON file, or None if the file is missing, too large or invalid."""
    try:
        raw = store.read(path, 0, _MAX_JSON_BYTES + 1)
        check_density(raw, file=path)
        return json.loads(raw.decode("utf-8")) if len(raw) <= _MAX_JSON_BYTES else None
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def file_names(entries: Iterable[FileInfo]) -> list[str]:
    """Return the paths of readable files: regular files, and symlinks that the store may follow."""
    return [entry.path for entry in entries if entry.kind in ("file", "symlink")]


def _matches(path: str, directory: str, patterns: tuple[str, ...]) -> bool:
    name = path[len(directory) + 1 :] if directory else path
    # The wildcards of fnmatch also match "/": "tokenizer*" would match the file of a model "tokenizer".
    return any(fnmatch.fnmatchcase(name, p) and name.count("/") == p.count("/") for p in patterns)
