"""Which format is at a URL: an ordered list of marks, and the newest step where the URL is a run's directory."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.catalog.entry import Catalog
from ckptkit.collector import collector_paused
from ckptkit.errors import CheckpointNotFoundError, CkptkitError, CorruptCheckpointError, UnsafePathError
from ckptkit.formats.format_list import (
    FORMATS,
    RECORD,
    TORCH_ENDINGS,
    UNNAMED,
    Format,
    Place,
    format_of,
    open_torch,
    reader,
    refuse_packed,
)
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.steps import ordered, parse_step
from ckptkit.storage import Store, open_store
from ckptkit.storage.store import split_url

__all__ = ["Source", "identify", "nearest", "open_source"]

_MAX_DEPTH = 3
_MAX_CHILDREN = 32  # directories without a step in their name that are looked into
_MAX_STEPS = 64  # newest step directories that are looked into
_POINTERS = ("latest", "latest_checkpointed_iteration.txt", "LATEST", "latest_universal", "LATEST.txt")
# Directories of a step that hold a model of their own: verl and SkyRL.
_MEMBERS = ("actor", "policy", "model", "critic", "ref", "reward")
_ASIDE = ("optim", "rng", "dataloader")  # directories that lie beside a model
_DATA = re.compile(r"__\d+_\d+\.distcp|\.metadata\.tmp")
_EXPECTED = (
    "a checkpoint of ckptkit, torch DCP (.metadata), Hugging Face (*.safetensors, pytorch_model*.bin), DeepSpeed, "
    "verl, accelerate, Lightning, LightRFT, Megatron, NeMo or Oumi, a torch.save file, or a directory of steps of one "
    "of them"
)


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint.

    Attributes:
        store: Its root; the catalog's paths count from here.
        url: What was really opened.
        note: Why, where it is not what was asked for; "" otherwise.
    """

    store: Store
    catalog: Catalog
    url: str
    note: str = ""


_Found = tuple[Place, str, Format, str]


def identify(store: Store) -> str | None:
    """Return the name of the format at the store's root; None where it is no checkpoint. Reads names only,
    and a small marker file where names do not tell."""
    place = Place(store)
    found = format_of(place) or format_of(place, UNNAMED)
    return found.name if found is not None else None


@collector_paused()
def open_source(
    url: str, *, storage_options: Mapping[str, Any] | None = None, options: ReadOptions | None = None
) -> Source:
    """Open the checkpoint at `url`: a file, a directory, or a directory of steps, whose newest is taken.

    Steps are compared as numbers (10 is newer than 9); `latest` files are hints that are only reported. Where
    a directory has checkpoints that ckptkit committed, nothing else in it counts.

    Raises:
        CheckpointNotFoundError: There is nothing, or nothing that is a checkpoint; it says what was found.
        CkptkitError: What the reader of the format raises.
    """
    options = options or ReadOptions()
    url = _real(url)
    file = _as_file(url, storage_options)
    if file is not None:
        return _open_file(*file, url, options)
    place = Place(open_store(url, storage_options=storage_options))
    if not place.listing:
        _refuse_empty(place.store, url)
    found = _resolve(place, url, 0)
    if found is None:
        raise _unknown(place, url)
    place, url, form, note = found
    try:
        catalog = form.open(place.store, options)
    except CkptkitError as error:
        told = type(error)(f"{error} This is {url}: {note}") if note else error
        if isinstance(told, CorruptCheckpointError):
            told.checkpoint = url
        if told is error:
            raise
        raise told from error
    return Source(place.store, _with_step(catalog, url), url, note)


def _with_step(catalog: Catalog, url: str) -> Catalog:
    """The catalog with the step that the directory's name tells, where nothing else does."""
    named = parse_step(url.rpartition("/")[2])
    if catalog.info.step is not None or named is None:
        return catalog
    return replace(catalog, info=replace(catalog.info, step=named.step))


# --- what the URL is


def _real(url: str) -> str:
    """The URL without a slash at its end. A link that the user names is followed; links inside are not."""
    protocol, rest = split_url(url)
    if protocol in ("file", "local"):
        full = os.path.abspath(os.path.expanduser(rest))
        return os.path.realpath(full) if os.path.islink(full) else full
    return url.rstrip("/")


def _as_file(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Store, str] | None:
    """The store of the parent and the name, where the URL is a file."""
    parent, separator, name = url.rpartition("/")
    if not separator or not name or parent.endswith((":", ":/")):
        return None
    store = open_store(parent or "/", storage_options=storage_options)
    try:
        info = store.info(name)
    except (UnsafePathError, FileNotFoundError):
        return None
    return (store, name) if info is not None and info.kind == "file" else None


def _open_file(store: Store, name: str, url: str, options: ReadOptions) -> Source:
    if name in ("checkpoint.json", ".metadata", "meta.pt") or name.endswith((".distcp", ".index.json", ".metadata")):
        parent = url.rpartition("/")[0]
        form = format_of(Place(store))
        if form is not None:
            return Source(store, form.open(store, options), parent, f"{name} is a part of the checkpoint in {parent}.")
    if name.endswith(".safetensors"):
        return Source(store, reader("safetensors").open_file(store, name), url)
    return Source(store, open_torch(store, name, options), url)


def _refuse_empty(store: Store, url: str) -> None:
    if store.local_root is not None and os.path.isdir(store.local_root):
        raise CheckpointNotFoundError(f"{url} is an empty directory. Expected {_EXPECTED}.")
    if store.local_root is not None:
        raise CheckpointNotFoundError(f"{url} does not exist. {nearest(store.local_root)}")
    raise CheckpointNotFoundError(f"{url} does not exist, or holds nothing. Expected {_EXPECTED}.")


def nearest(path: str) -> str:
    """Return how far a path that does not exist does, and what was probably meant."""
    missing, parent = path, os.path.dirname(path)
    while not os.path.isdir(parent) and parent != os.path.dirname(parent):
        missing, parent = parent, os.path.dirname(parent)
    with contextlib.suppress(OSError):
        near = difflib.get_close_matches(os.path.basename(missing), sorted(os.listdir(parent)), n=1)
        if near:
            return f"Did you mean {os.path.join(parent, near[0])}{path[len(missing) :]}?"
    return "Its directory exists." if missing == path else f"Nor does {missing}; {parent} does."


def _unknown(place: Place, url: str) -> CkptkitError:
    names = [f"{n}/" if item.kind == "directory" else n for n, item in place.listing.items()]
    shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
    refuse_packed(place.files)
    if place.any_file(_DATA.pattern):
        reader("dcp").open_catalog(place.store)  # raises: it says what is missing
    return CheckpointNotFoundError(f"{url} holds no checkpoint. Found: {shown}. Expected {_EXPECTED}.")


# --- what a directory is


def _resolve(place: Place, url: str, depth: int) -> _Found | None:
    """What to open for a directory: itself, its newest step, the model in it, or what a pointer names."""
    form = format_of(place)
    if form is not None:
        return place, url, form, ""
    if depth < _MAX_DEPTH:
        for look in (_newest_step, _member, _pointed_at, _only_child):
            found = look(place, url, depth)
            if found is not None:
                return found
    form = format_of(place, UNNAMED)
    return (place, url, form, "") if form is not None else None


def _enter(place: Place, url: str, name: str, depth: int) -> _Found | None:
    """What to open for the child `name`."""
    return _resolve(Place(place.store.child(name)), f"{url}/{name}", depth + 1)


def _newest_step(place: Place, url: str, depth: int) -> _Found | None:
    steps = [step.name for step in ordered(place.directories)]
    resolved: list[tuple[str, _Found]] = []
    skipped: list[str] = []
    for name in steps[:_MAX_STEPS]:
        found = _enter(place, url, name, depth)
        if found is None:
            skipped.append(name)
            continue
        resolved.append((name, found))
        if found[2].name == "ckptkit" or not _committed_elsewhere(place, steps, name):
            break
    if not resolved:
        return None
    # Where ckptkit committed checkpoints, a directory without a record is an unfinished save.
    name, (inner, inner_url, form, note) = resolved[-1]
    skipped += [other for other, _ in resolved[:-1]]
    text = f"the newest of {len(steps)} steps" if len(steps) > 1 else "the only step"
    notes = [f"{name} is {text} in {url}.", *([note] if note else []), *_skipped(skipped), *_disagreeing(place, name)]
    return inner, inner_url, form, " ".join(notes)


def _committed_elsewhere(place: Place, steps: Sequence[str], name: str) -> bool:
    older = steps[steps.index(name) + 1 :][:_MAX_STEPS]
    return any(place.store.info(f"{step}/{RECORD}") is not None for step in older)


def _skipped(names: Sequence[str]) -> list[str]:
    return [f"Skipped as no finished checkpoint: {', '.join(names[:4])}."] if names else []


def _disagreeing(place: Place, name: str) -> list[str]:
    """A pointer file that names another step: said, not followed."""
    for pointer, target in _pointers(place):
        step, chosen = parse_step(target), parse_step(name)
        if step is not None and chosen is not None and step.step != chosen.step:
            return [f"{pointer} says {target}."]
    return []


def _pointers(place: Place) -> list[tuple[str, str]]:
    found = []
    for pointer in _POINTERS:
        if pointer in place.files and place.listing[pointer].kind == "file" and place.listing[pointer].size < 1024:
            found.append((pointer, place.store.read(pointer).decode("utf-8", "replace").strip()))
    return found


def _member(place: Place, url: str, depth: int) -> _Found | None:
    """The model to take in a step that has several: actor before critic."""
    there = [name for name in _MEMBERS if name in place.directories]
    for name in there:
        found = _enter(place, url, name, depth)
        if found is not None:
            others = [f"{other}/" for other in there if other != name]
            note = f"{name}/ was taken" + (f"; {', '.join(others)} lie beside it." if others else ".")
            return found[0], found[1], found[2], " ".join(filter(None, (note, found[3])))
    return None


def _pointed_at(place: Place, url: str, depth: int) -> _Found | None:
    """Where the names have no numbers, the directory that a pointer file names."""
    for pointer, target in _pointers(place):
        if target in place.directories:
            found = _enter(place, url, target, depth)
            if found is not None:
                return found[0], found[1], found[2], f"{pointer} says {target}. {found[3]}".strip()
    return None


def _only_child(place: Place, url: str, depth: int) -> _Found | None:
    """The one directory, or numbered file, that is a checkpoint."""
    files = _numbered_files(place)
    if files:
        single = _single_file(files[0])
        return place, f"{url}/{files[0]}", single, f"{files[0]} is {_among(len(files))} in {url}."
    if len(place.directories) > _MAX_CHILDREN:
        return None
    likely = [name for name in place.directories if not name.startswith(_ASIDE)] or place.directories
    found = [(name, child) for name in likely if (child := _enter(place, url, name, depth))]
    # What has the marks of a format is a checkpoint; files of ranks beside it may be states of its data loader.
    marked = [(name, child) for name, child in found if child[2] in FORMATS]
    if len(found) > 1 and len(marked) == 1:
        others = ", ".join(f"{name}/" for name, _ in found if name != marked[0][0])
        name, (inner, inner_url, form, note) = marked[0]
        return inner, inner_url, form, f"{name}/ was taken; beside it: {others}. {note}".strip()
    if len(found) > 1 and depth == 0:
        names = ", ".join(name for name, _ in found[:8])
        raise CheckpointNotFoundError(f"{url} has {len(found)} checkpoints: {names}. Give the one you mean.")
    if len(found) != 1:
        return None
    name, (inner, inner_url, form, note) = found[0]
    return inner, inner_url, form, f"{name}/ is the only checkpoint in {url}. {note}".strip()


def _numbered_files(place: Place) -> list[str]:
    """Files that are a step each, newest first. Of other endings than .ckpt only where the newest step has one file:
    else model and optimizer may be two of them."""
    steps = ordered(n for n in place.files if n.endswith(".ckpt"))
    if not steps:
        steps = ordered(n for n in place.files if n.endswith(TORCH_ENDINGS))
        if len(steps) > 1 and (steps[0].step, steps[0].epoch) == (steps[1].step, steps[1].epoch):
            return []
        if steps and reader("rank_directory").are_rank_files(place.store, place.files):
            return []
    return [step.name for step in steps]


def _among(count: int) -> str:
    return "the only numbered file" if count == 1 else f"the newest of {count} files"


def _single_file(name: str) -> Format:
    return Format("torch", lambda p: name in p.files, "torch_save", name)
