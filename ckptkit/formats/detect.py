"""Detects the format of the checkpoint at a URL. If the URL is the directory of a run, finds the newest step."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ckptkit.catalog.entry import Catalog, Role
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    UnsafePathError,
    UnsupportedFormatError,
    command_line,
)
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.own.record import CommitRecord, find_record, step_of_name
from ckptkit.formats.state_names import ACCELERATE_FILE, ACCELERATE_MODEL, WEIGHTS_NAMES
from ckptkit.formats.torch_save import MODEL_FILES, TORCH_ENDINGS, TORCH_STARTS, may_hold_model, model_file, torch_files
from ckptkit.formats.trainers.steps import STEP_DIRECTORY, ordered, parse_step
from ckptkit.gc_pause import collector_paused
from ckptkit.storage import FileInfo, Store, open_store
from ckptkit.storage.local import is_directory
from ckptkit.storage.open import refuse_credentials
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.store import FILE_SYSTEM_FOLDERS, split_url
from ckptkit.units import first_few

# --- the supported formats


RECORD = "checkpoint.json"
# File names that tools use for weights. Safetensors files with different names are used only if nothing else is found.
_WEIGHTS = rf"(?:{WEIGHTS_NAMES})(?:\.[\w-]+)?\.safetensors"
_SAFETENSORS = rf"{_WEIGHTS}|.*-\d{{5,}}-of-\d{{5,}}\.safetensors|.*\.safetensors\.index\.json"
_TORCH_WEIGHTS = r"pytorch_model.*\.bin|.*model-\d{5,}-of-\d{5,}\.bin|.*\.bin\.index\.json|adapter_model\.bin"


class Candidate:
    """A directory that may be a checkpoint, with a listing of its contents."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @cached_property
    def listing(self) -> dict[str, FileInfo]:
        return {item.path: item for item in self.store.list() if item.path not in FILE_SYSTEM_FOLDERS}

    @cached_property
    def files(self) -> list[str]:
        return [path for path, item in self.listing.items() if item.kind in ("file", "symlink")]

    @cached_property
    def directories(self) -> list[str]:
        """The visible directories. Hidden directories may hold unfinished saves."""
        return [path for path, item in self.listing.items() if item.kind == "directory" and not path.startswith(".")]

    def has(self, pattern: str) -> bool:
        """Return whether the pattern matches the whole name of a file, or a directory's name followed by "/"."""
        return any(re.fullmatch(pattern, name) for name in (*self.files, *(f"{name}/" for name in self.directories)))


# Errors that a reader may raise when values have unexpected types or shapes.
_MALFORMED = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class Format:
    """A checkpoint format.

    Attributes:
        reader: The module with `open_catalog`. It is imported only if the names match.
        names: Patterns (see `Candidate.has`). Each of them must match a name in the directory.
        confirm: Called with the reader's module if names alone do not prove the format.
        label: The format's name in errors that list all formats. "" if they do not list this format separately.
        path: If set, the reader opens only this file of the directory.
    """

    name: str
    reader: str
    names: tuple[str, ...] = ()
    confirm: Callable[[Any, Candidate], bool] | None = None
    label: str = ""
    path: str = ""

    def fits(self, place: Candidate) -> bool:
        """Return whether a directory is a checkpoint in this format."""
        return all(map(place.has, self.names)) and (self.confirm is None or self.confirm(reader(self.reader), place))

    def open(self, store: Store, options: ReadOptions) -> Catalog:
        """Return the catalog of the checkpoint at the store's root. A malformed file raises a CkptkitError."""
        one_file = {"path": self.path} if self.path else {}
        try:
            catalog: Catalog = reader(self.reader).open_catalog(store, options=options, **one_file)
            return catalog
        except CkptkitError:
            raise
        except _MALFORMED as error:
            raise CorruptCheckpointError(
                f"{store.url}: it looks like a {self.name} checkpoint, but a file does not follow that format: "
                f"{type(error).__name__}: {error}."
            ) from error


def reader(module: str) -> Any:
    return importlib.import_module(f"ckptkit.formats.{module}")


# The first format that fits is used. Formats that add files to a DCP checkpoint precede DCP.
FORMATS: tuple[Format, ...] = (
    Format("ckptkit", "own.reader", (r"checkpoint\.json",), label="ckptkit"),
    Format("ckptkit", "own.reader", (r"manifest\.safetensors",), lambda own, place: own.is_of_a_save(place.store)),
    Format("deepspeed-universal", "deepspeed.universal", ("zero/", r".*_(?:model|optim)_states\.pt")),
    Format("deepspeed", "deepspeed.pipeline", (r"layer_\d+(?:-model_\d+)?-model_states\.pt",)),
    Format("deepspeed", "deepspeed.zero", (r".*mp_rank_\d+_(?:model|optim)_states\.pt|layer_\d+.*_states\.pt",)),
    Format("deepspeed", "deepspeed.trainer", (r"trainer_state\.json", "global_step.*/"), label="DeepSpeed"),
    Format("deepspeed", "deepspeed.trainer", ("latest", "pytorch_model/", ACCELERATE_FILE.pattern)),
    Format("verl", "trainers.verl", (r"model_world_size_\d+_rank_\d+\.pt",), label="verl"),
    Format("megatron", "trainers.megatron", (r"metadata\.json",), lambda it, place: it.is_megatron(place.store)),
    Format("megatron", "trainers.megatron_ranks", (r"mp_rank_\d+(?:_\d+){0,2}/",), label="Megatron"),
    Format("lightning", "trainers.lightning", (r"meta\.pt", r"\.metadata"), label="Lightning"),
    Format("lightrft", "trainers.lightrft", (r"\.metadata", r"optim_states/|client_state\.pt"), label="LightRFT"),
    Format("dcp", "dcp.reader", (r"\.metadata|__\d+\.metadata",), label="torch DCP (.metadata)"),
    Format("accelerate", "trainers.accelerate", (ACCELERATE_MODEL.pattern,), label="accelerate"),
    Format("ckptkit-local", "own.local", (r"local_\d{5,9}\.safetensors",)),
    Format("safetensors", "hf.safetensors", (_SAFETENSORS,), label="Hugging Face (*.safetensors, pytorch_model*.bin)"),
    Format("torch", "torch_save", (_TORCH_WEIGHTS,)),
    Format(
        "directories",
        "trainers.directories",
        ("model/|weights/|hf_weights/|hf_adapter/",),
        lambda it, place: it.layout_of(place.store, place.directories) is not None,
        label="NeMo, Oumi",
    ),
)
# Files with arbitrary names are used only if no subdirectory is a checkpoint.
UNNAMED: tuple[Format, ...] = (
    Format(
        "rank-files", "trainers.rank_directory", (), lambda it, place: it.is_rank_directory(place.store, place.files)
    ),
    Format("safetensors", "hf.safetensors", (r".*\.safetensors",)),
    Format("torch", "torch_save", (), lambda _, place: _has_model_file(place)),
)


def _has_model_file(place: Candidate) -> bool:
    name = model_file(torch_files(place.store, place.files))
    return name is not None and (name in MODEL_FILES or parse_step(name) is None)


def format_of(place: Candidate, formats: Sequence[Format] = ()) -> Format | None:
    return next((form for form in formats or FORMATS if form.fits(place)), None)


# Files that hold checkpoints which ckptkit can't read, by name: (pattern, what they are, what to do instead).
_UNPACK = "Unpack it into an empty directory, and give that directory"
_TORCH = "If torch.save wrote it, give the file itself"
_SAVED = r"(?:[\w=.,-]*(?:checkpoint|ckpt|step|epoch|iter(?:ation)?)[-_=]?\d[\w=.,-]*|checkpoint|ckpt|last|latest)"
_PACKED = rf"(?i:{_SAVED}\.(?:tar|tgz|zip|tar\.\w+|\w+\.(?:gz|xz|zst|bz2|lz4)))"
_FOREIGN = rf"(?i:{_SAVED}\.(?:msgpack|npz|h5|hdf5|pkl|pickle|keras))"
_UNSUPPORTED = (
    (r".*\.nemo", "a tar archive of NeMo, perhaps compressed, with a checkpoint in it", f"{_UNPACK} ('tar -xf')"),
    (_PACKED, "an archive of a checkpoint", f"{_UNPACK}. {_TORCH}"),
    (r"_CHECKPOINT_METADATA|manifest\.ocdbt", "part of an Orbax checkpoint (JAX)", "Restore it with Orbax"),
    (r".+\.ckpt-\d+\.index", "part of a TensorFlow checkpoint", "Restore it with TensorFlow"),
    (_FOREIGN, "a checkpoint in another format", f"Read it with the library that wrote it. {_TORCH}"),
)


def refuse_unsupported(names: Sequence[str]) -> None:
    """Raise UnsupportedFormatError if one of these files holds a checkpoint that ckptkit can't read."""
    for pattern, what, instead in _UNSUPPORTED:
        found = next((name for name in names if re.fullmatch(pattern, name)), None)
        if found is not None:
            raise UnsupportedFormatError(f"{found} is {what}. {instead}.")


_MAX_DEPTH = 3
_MAX_CHILDREN = 32  # of the directories without a step, at most this many are searched
_MAX_LISTINGS = 10
_MAX_STEPS = 64  # how many of the newest step directories to search
_POINTERS = ("latest", "latest_checkpointed_iteration.txt", "LATEST", "latest_universal", "LATEST.txt")
# Subdirectories of a step that each contain a model of their own (verl and SkyRL).
_MEMBERS = ("actor", "policy", "model", "critic", "ref", "reward")
_ASIDE = ("optim", "rng", "dataloader", "recipe_state")  # prefixes of the names of directories without a model
_DATA = r"__\d+_\d+\.distcp|\.metadata\.tmp"
_EXPECTED = (
    f"a checkpoint of {', '.join(filter(None, (form.label for form in FORMATS)))}, a torch.save file, or a directory "
    "with steps in one of these formats"
)


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint.

    Attributes:
        store: The root of the checkpoint. Paths in the catalog are relative to this root.
        url: URL of the opened checkpoint.
        note: The reason why this checkpoint was chosen, or "" if `url` is the URL that the caller passed.
        joined: The checkpoints that were joined into this one, or () if this is a single checkpoint.
    """

    store: Store
    catalog: Catalog
    url: str
    note: str = ""
    joined: tuple[Source, ...] = ()

    @property
    def checkpoints(self) -> tuple[Source, ...]:
        """The checkpoints that are read: the joined checkpoints, or this checkpoint itself."""
        return self.joined or (self,)


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint to open, its URL, and the reason why it was chosen ("" if the user passed its URL)."""

    place: Candidate
    url: str
    form: Format
    note: str = ""

    def because(self, *notes: str) -> _Found:
        """Return a copy with `notes` before the existing note."""
        return replace(self, note=" ".join(filter(None, (*notes, self.note))))


def identify(store: Store) -> str | None:
    """Return the name of the format at the store's root, or None if the root is not a checkpoint.

    Reads only names, and a small marker file if the names are ambiguous.
    """
    place = Candidate(store)
    found = format_of(place) or format_of(place, UNNAMED)
    return found.name if found is not None else None


@collector_paused()
def open_source(
    url: str, *, storage_options: Mapping[str, Any] | None = None, options: ReadOptions | None = None
) -> Source:
    """Open the checkpoint at `url`, a file or a directory. In the directory of a run, open the newest step.

    Steps are compared as numbers (10 is newer than 9). If there are steps, a `latest` file is not followed. If `latest`
    names a step other than the newest, `Source.note` says so. If a directory contains checkpoints that ckptkit
    committed, everything else in that directory is ignored.

    Raises:
        CheckpointNotFoundError: There is no checkpoint. The message lists the files and directories that were found.
        CkptkitError: The format's reader failed.
    """
    options = options or ReadOptions()
    refuse_credentials(url)
    url = real_url(url)
    file = _as_file(url, storage_options)
    if file is not None:
        source = _open_file(*file, url, options)
        return replace(source, catalog=_with_step(source.catalog, source.url))
    tries = 0
    while True:
        place = Candidate(open_store(url, storage_options=storage_options))
        try:
            return _open_directory(place, url, options)
        except (FileNotFoundError, CorruptCheckpointError):
            # A job may have saved a checkpoint and deleted the listed one meanwhile. If so, choose again.
            tries += 1
            if tries == _MAX_LISTINGS or Candidate(place.store).listing.keys() == place.listing.keys():
                raise


def _open_directory(place: Candidate, url: str, options: ReadOptions) -> Source:
    if not place.listing:
        _refuse_empty(place.store, url)
    found = _resolve(place, url, 0)
    if found is None:
        raise _unknown(place, url)
    try:
        catalog = found.form.open(found.place.store, options)
    except CkptkitError as error:
        here = "" if found.url in str(error) else f" This is {found.url}."
        told = type(error)(f"{error}{here} {found.note}") if found.note else error
        if isinstance(told, CorruptCheckpointError):
            told.checkpoint = found.url
        if told is error:
            raise
        raise told from error
    if found.form in UNNAMED:
        _check_weights(catalog, found.url)
    return Source(found.place.store, _with_step(catalog, found.url), found.url, found.note)


def _check_weights(catalog: Catalog, url: str) -> None:
    """Check that the catalog has weights.

    Raises:
        IncompleteCheckpointError: The directory has only an optimizer, scheduler or similar file. The message names the
            file.
    """
    if catalog.by_role(Role.MODEL):
        return
    name = next(iter(catalog.info.files), "")
    raise IncompleteCheckpointError(
        f"{url}: the only readable file is {name}, which has no weights. An interrupted save may have left it: use an "
        f"older checkpoint. To see what the file contains: {command_line('inspect', f'{url}/{name}')}"
    )


def _with_step(catalog: Catalog, url: str) -> Catalog:
    """Return the catalog with the step in the directory's name, unless the catalog already has a step.

    If the name contains neither a step nor an epoch, the step is that of the parent, as in step100/model_and_optim. A
    name that contains only an epoch, such as epoch_3, gives no step. The number in the name is also ignored if it
    equals the checkpoint's "epoch".
    """
    parent, name = f"/{url}".split("/")[-2:]
    named = parse_step(name) or (parse_step(parent) if STEP_DIRECTORY.fullmatch(parent) else None)
    if catalog.info.step is not None or named is None or not named.has_step:
        return catalog
    epoch = catalog.objects.get("epoch")
    if epoch is not None and epoch.value == named.step and "step" not in name and "iter" not in name:
        return catalog  # checkpoint-3.pth.tar of timm
    return replace(catalog, info=replace(catalog.info, step=named.step))


# --- is the URL a file or a directory?


def real_url(url: str) -> str:
    """Return the URL without a trailing slash. If the URL names a symlink whose target exists, return the target."""
    protocol, rest = split_url(url)
    if protocol in ("file", "local"):
        full = os.path.abspath(os.path.expanduser(rest))
        return os.path.realpath(full) if os.path.islink(full) and os.path.exists(full) else full
    return url.rstrip("/")


def _as_file(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Store, str] | None:
    """Return the parent directory's store and the file's name, or None if the URL is not a file."""
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
        form = format_of(Candidate(store))
        if form is not None:
            return Source(store, form.open(store, options), parent, f"{name} is a part of the checkpoint in {parent}.")
    if name.endswith(".safetensors"):
        return Source(store, reader("hf.safetensors").open_file(store, name), url)
    try:
        refuse_unsupported([name])
    except UnsupportedFormatError:
        if store.read(name, 0, 2) not in (b"", *TORCH_STARTS):  # an empty file has an error of its own
            raise
    return Source(store, _torch_file(name).open(store, options), url)


def _refuse_empty(store: Store, url: str) -> None:
    if is_directory(store) and os.path.isdir(store.url):
        raise CheckpointNotFoundError(f"{url} is an empty directory. Expected {_EXPECTED}.")
    if is_directory(store):
        raise CheckpointNotFoundError(not_there(url, store.url))
    raise CheckpointNotFoundError(f"{url} does not exist, or is empty. Expected {_EXPECTED}.")


def not_there(url: str, path: str) -> str:
    """Return a message that `url` does not exist. It suggests a similar path, or says which part of `path` exists."""
    if os.path.islink(path):
        return f"{url} is a symbolic link to {os.readlink(path)}, which does not exist."
    missing, parent = path, os.path.dirname(path)
    while not os.path.isdir(parent) and parent != os.path.dirname(parent):
        missing, parent = parent, os.path.dirname(parent)
    with contextlib.suppress(OSError):
        near = difflib.get_close_matches(os.path.basename(missing), sorted(os.listdir(parent)), n=1)
        if near:
            return f"{url} does not exist. Did you mean {os.path.join(parent, near[0])}{path[len(missing) :]}?"
    return f"{url} does not exist ({'its parent does' if missing == path else f'nor does {missing}; {parent} does'})."


def _unknown(place: Candidate, url: str) -> CkptkitError:
    names = [f"{n}/" if item.kind == "directory" else n for n, item in place.listing.items()]
    shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
    refuse_unsupported(place.files)
    if place.has(_DATA):
        reader("dcp.catalog").open_catalog(place.store)  # raises an error that says what is missing
    files = torch_files(place.store, place.files)
    if files and not may_hold_model(files):
        return IncompleteCheckpointError(
            f"{url} has no file that may hold weights, only {first_few(files, 8)}. An interrupted save may have left "
            "it: use an older checkpoint."
        )
    if len(files) > 1:
        return CheckpointNotFoundError(
            f"{url} has {len(files)} torch.save files: {first_few(files, 8)}. Give the one you mean: "
            f"{command_line('inspect', f'{url}/{may_hold_model(files)[0]}')}"
        )
    return CheckpointNotFoundError(f"{url} holds no checkpoint. Found: {shown}. Expected {_EXPECTED}.")


# --- what to open in a directory


def _resolve(place: Candidate, url: str, depth: int) -> _Found | None:
    """Choose the checkpoint to open for a directory. Returns None if there is none.

    Tries, in this order: the directory itself, its newest step, a model in the directory, the target of a pointer file,
    the only checkpoint among the children, and files with arbitrary names.
    """
    form = format_of(place)
    if form is not None:
        return _Found(place, url, form)
    if place.has(_DATA):
        return None  # an unfinished DCP save: everything in this directory belongs to it
    if depth < _MAX_DEPTH:
        for look in (_newest_step, _member, _pointed_at, _only_child):
            found = look(place, url, depth)
            if found is not None:
                return found
    form = format_of(place, UNNAMED)
    return _Found(place, url, form) if form is not None else None


def _enter(place: Candidate, url: str, name: str, depth: int) -> _Found | None:
    """Choose the checkpoint to open for the subdirectory `name`, as `_resolve` does."""
    return _resolve(Candidate(place.store.child(name)), f"{url}/{name}", depth + 1)


def _newest_step(place: Candidate, url: str, depth: int) -> _Found | None:
    steps = [step.name for step in ordered(place.directories)]
    committed = _newest_committed(place, steps)
    found, skipped = None, []
    for name in steps[:_MAX_STEPS] if committed is None else (committed,):
        found = _enter(place, url, name, depth)
        if found is not None:
            break
        skipped.append(name)
    if found is None:
        return None
    if committed is not None:
        newer = steps[: steps.index(name)] if name in steps else steps
        skipped = [step for step in newer[:_MAX_STEPS] if place.store.info(f"{step}/{RECORD}") is None]
    text = f"the newest of {len(steps)} step directories" if len(steps) > 1 else "the only step"
    notes = [f"Skipped because they are not finished checkpoints: {', '.join(skipped[:4])}."] if skipped else []
    notes += [f"Not read: {', '.join(f'{other}/' for other in aside)}."] if (aside := _aside(place)) else []
    for pointer, target in pointers(place):
        step, own = parse_step(target), parse_step(name)
        if step is not None and own is not None and step.step != own.step:
            notes.append(f"{pointer} says {target}.")  # the pointer is not followed
            break
    note = " ".join(filter(None, (f"{name} is {text} in {url}.", found.note, *notes)))
    return replace(found, note=note)


def _newest_committed(place: Candidate, steps: Sequence[str]) -> str | None:
    """Return the directory of ckptkit's newest committed checkpoint, or None if this is not the root of a ckptkit run.

    The newest checkpoint is the one that was saved last. After a rollback, an older checkpoint may have a higher step.
    A directory whose commit record is damaged, or belongs to another step, may have been saved later. Such a directory
    is returned if its step is higher than that of the newest checkpoint.
    """
    seen: dict[str, CommitRecord | CkptkitError | None] = {}

    def look(name: str) -> bool:
        try:
            seen[name] = find_record(place.store, f"{name}/{RECORD}")
        except StorageError:
            raise
        except CkptkitError as error:
            seen[name] = error
        return seen[name] is not None

    with WorkerPool(16, thread_name_prefix="ckptkit-open") as pool:
        if not (any(map(look, steps[:1])) or any(list(pool.map(look, steps[1:_MAX_STEPS])))):
            return None
        list(pool.map(look, [name for name in place.directories if name not in seen]))
    newest: tuple[int, int, str] | None = None  # sequence, step, directory
    damaged: list[tuple[int, str]] = []
    for name, record in seen.items():
        if isinstance(record, CkptkitError):
            step = parse_step(name)
            damaged += [(step.step, name)] if step is not None else []
        elif record is not None and name.partition("@")[0] == record.name:
            newest = max(newest or (-1, -1, ""), (record.sequence, record.step, name))
        elif record is not None and (number := step_of_name(name)) is not None:  # a copy, or its record was overwritten
            damaged.append((number, name))
    last = max(damaged, default=(-1, ""))
    if newest is None or last[0] > newest[1]:
        return last[1] or None
    return newest[2]


def pointers(place: Candidate) -> list[tuple[str, str]]:
    """Return the pointer files of a run's directory, such as `latest`, and their contents."""
    found = []
    for pointer in _POINTERS:
        if pointer in place.files and place.listing[pointer].kind == "file" and place.listing[pointer].size < 1024:
            found.append((pointer, place.store.read(pointer).decode("utf-8", "replace").strip()))
    return found


def _member(place: Candidate, url: str, depth: int) -> _Found | None:
    """Choose a model if a step's directory has one subdirectory per model, otherwise return None.

    The actor is preferred to the critic.
    """
    there = [name for name in _MEMBERS if name in place.directories]
    for name in there:
        found = _enter(place, url, name, depth)
        if found is not None:
            others = [f"{other}/" for other in (*there, *_aside(place)) if other != name]
            return found.because(f"{name}/ was chosen{_unread(others)}.")
    return None


def _pointed_at(place: Candidate, url: str, depth: int) -> _Found | None:
    """Choose the directory that a pointer file names, or return None if it is not a checkpoint.

    Called only if no step directory and no model was found.
    """
    for pointer, target in pointers(place):
        found = _enter(place, url, target, depth) if target in place.directories else None
        if found is not None:
            return found.because(f"{pointer} says {target}.")
    return None


def _only_child(place: Candidate, url: str, depth: int) -> _Found | None:
    """Choose the newest numbered file, or the only subdirectory that is a checkpoint. Returns None if there is neither.

    Raises:
        CheckpointNotFoundError: Several subdirectories of the directory that the user named are checkpoints.
    """
    files = _numbered_files(place)
    if files:
        among = "the only numbered file" if len(files) == 1 else f"the newest of {len(files)} files"
        note = f"{files[0]} is {among} in {url}{_unread(_beside(place, files[0]))}."
        return _Found(place, f"{url}/{files[0]}", _torch_file(files[0]), note)
    if len(place.directories) > _MAX_CHILDREN:
        return None
    aside = _aside(place)
    likely = [name for name in place.directories if name not in aside]
    found = {name: child for name in likely if (child := _enter(place, url, name, depth))}
    # A directory that matches one of `FORMATS` is surely a checkpoint. Per-rank files may be data loader states.
    marked = [name for name, child in found.items() if child.form in FORMATS]
    if len(found) > 1 and len(marked) == 1:
        others = ", ".join(f"{name}/" for name in found if name != marked[0])
        return found[marked[0]].because(f"{marked[0]}/ was chosen; not read: {others}.")
    if len(found) > 1 and depth == 0:
        names = ", ".join(list(found)[:8])
        raise CheckpointNotFoundError(f"{url} has {len(found)} checkpoints: {names}. Give the one you mean.")
    if len(found) != 1:
        return None
    ((name, only),) = found.items()
    unread = _unread([f"{other}/" for other in place.directories if other != name])
    return only.because(f"{name}/ is the only checkpoint in {url}{unread}.")


def _aside(place: Candidate) -> list[str]:
    """Return the subdirectories whose names say that they hold an optimizer or other state, and no model."""
    return [name for name in place.directories if name.startswith(_ASIDE)]


def _unread(names: Sequence[str]) -> str:
    return f"; not read: {first_few(names, 8)}" if names else ""


def _beside(place: Candidate, name: str) -> list[str]:
    """Return the other torch.save files whose names contain the same step as `name`, or a higher step."""
    step = parse_step(name)
    others = ((n, parse_step(n)) for n in place.files if n != name and n.endswith(TORCH_ENDINGS))
    return [n for n, other in others if step and other and other >= step]


def _numbered_files(place: Candidate) -> list[str]:
    """Return the .ckpt files that are named after a step and may hold a model, newest first.

    If there are none, does the same for all torch.save files, but returns [] if several of them have the newest step.
    Also returns [] if there is one file per rank.
    """
    saved = [n for n in place.files if n.endswith(".ckpt")]
    steps = ordered(may_hold_model(saved) or saved)
    if not steps:
        saved = place.files
        steps = ordered(may_hold_model(n for n in saved if n.endswith(TORCH_ENDINGS)))
        if len(steps) > 1 and steps[0] == steps[1]:
            return []
    if steps and reader("trainers.rank_directory").are_rank_files(place.store, saved, steps[0].name):
        return []
    return [step.name for step in steps]


def _torch_file(name: str) -> Format:
    return Format("torch", "torch_save", path=name)
