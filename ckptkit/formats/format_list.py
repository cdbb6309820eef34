"""The formats ckptkit reads, in the order in which they are looked for: the marks of each, and its reader."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptkit.catalog.entry import Catalog
from ckptkit.errors import CkptkitError, CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.numbered_files import MODEL_FILES
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.steps import parse_step
from ckptkit.storage import FileInfo, Store

__all__ = [
    "FORMATS",
    "RECORD",
    "TORCH_ENDINGS",
    "UNNAMED",
    "Format",
    "Place",
    "format_of",
    "open_torch",
    "reader",
    "refuse_packed",
]

RECORD = "checkpoint.json"
_DEEPSPEED = r".*mp_rank_\d+_(?:model|optim)_states\.pt|layer_\d+.*_states\.pt"
# Names that a tool gives to weights; a safetensors file of any other name counts only where nothing else is there.
_WEIGHTS = r"(?:model|adapter_model|diffusion_pytorch_model|consolidated)(?:\.[\w-]+)?\.safetensors"
_SAFETENSORS = rf"{_WEIGHTS}|.*-\d{{5,}}-of-\d{{5,}}\.safetensors|.*\.safetensors\.index\.json"
TORCH_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".pth.tar", ".th")  # of files that torch.save wrote
_TORCH = r"pytorch_model.*\.bin|.*\.bin\.index\.json|adapter_model\.bin"


class Place:
    """A directory that may be a checkpoint, with what lies in it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @cached_property
    def listing(self) -> dict[str, FileInfo]:
        return {item.path: item for item in self.store.list()}

    @cached_property
    def files(self) -> list[str]:
        return [path for path, item in self.listing.items() if item.kind in ("file", "symlink")]

    @cached_property
    def directories(self) -> list[str]:
        return [path for path, item in self.listing.items() if item.kind == "directory"]

    def any_file(self, pattern: str) -> bool:
        """Whether a file's whole name matches."""
        return any(re.fullmatch(pattern, name) for name in self.files)


# What values of another type or shape than a format has cause in a reader. The cause stays attached.
_MALFORMED = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RecursionError)
Test = Callable[[Place], bool]


@dataclass(frozen=True, slots=True)
class Format:
    """A format: how it is told, and the module that reads it; `path` where one file of a directory is meant."""

    name: str
    test: Test
    reader: str
    path: str = ""

    def open(self, store: Store, options: ReadOptions) -> Catalog:
        try:
            if self.reader == "torch_save":
                return open_torch(store, self.path or None, options)
            catalog: Catalog = reader(self.reader).open_catalog(store, options=options)
            return catalog
        except CkptkitError:
            raise
        except _MALFORMED as error:
            raise CorruptCheckpointError(
                f"{store.url}: it is laid out as a {self.name} checkpoint, but a file is not what that format says: "
                f"{type(error).__name__}: {error}."
            ) from error


def reader(module: str) -> Any:
    return importlib.import_module(f"ckptkit.formats.{module}")


def _only_torch_file(place: Place) -> bool:
    names = [name for name in place.files if name.endswith(TORCH_ENDINGS)]
    return any(name in MODEL_FILES for name in names) or (len(names) == 1 and parse_step(names[0]) is None)


# Names are looked at before a reader is imported: most directories have nothing that most readers look for.
# DeepSpeed and verl name their files so that nothing else does; what has a file beside a DCP comes before DCP.
FORMATS: tuple[Format, ...] = (
    Format("ckptkit", lambda p: RECORD in p.files, "ckptkit"),
    Format(
        "deepspeed-universal",
        lambda p: "zero" in p.directories and p.any_file(r".*_(?:model|optim)_states\.pt"),
        "deepspeed_universal",
    ),
    Format("deepspeed", lambda p: p.any_file(r"layer_\d+(?:-model_\d+)?-model_states\.pt"), "deepspeed_pipeline"),
    Format("deepspeed", lambda p: p.any_file(_DEEPSPEED), "deepspeed"),
    Format(
        "deepspeed",
        lambda p: (
            reader("deepspeed_trainer").is_trainer_directory(p.files, p.directories) and not p.any_file(_SAFETENSORS)
        ),
        "deepspeed_trainer",
    ),
    Format("verl", lambda p: p.any_file(r"model_world_size_\d+_rank_\d+\.pt"), "verl"),
    Format(
        "megatron",
        lambda p: "metadata.json" in p.files and reader("megatron").is_megatron(p.store, p.files),
        "megatron",
    ),
    Format("lightning", lambda p: "meta.pt" in p.files and ".metadata" in p.files, "lightning"),
    Format(
        "lightrft",
        lambda p: (
            ("optim_states" in p.directories or "client_state.pt" in p.files)
            and reader("lightrft").is_lightrft(p.files, p.directories)
        ),
        "lightrft",
    ),
    Format("dcp", lambda p: p.any_file(r"\.metadata|__\d+\.metadata"), "dcp_source"),
    Format("accelerate", lambda p: reader("accelerate").is_accelerate(list(p.listing)), "accelerate"),
    Format("ckptkit-local", lambda p: p.any_file(r"local_\d{5,9}\.safetensors"), "local_shards"),
    Format("safetensors", lambda p: p.any_file(_SAFETENSORS), "safetensors"),
    Format("torch", lambda p: p.any_file(_TORCH), "torch_save"),
    Format("directories", lambda p: reader("directories").layout_of(p.store, p.directories) is not None, "directories"),
)
# Files of any name count only where no directory below is a checkpoint.
UNNAMED: tuple[Format, ...] = (
    Format("rank-files", lambda p: reader("rank_directory").is_rank_directory(p.files), "rank_directory"),
    Format("safetensors", lambda p: p.any_file(r".*\.safetensors"), "safetensors"),
    Format("torch", _only_torch_file, "torch_save"),
)


def format_of(place: Place, formats: Sequence[Format] = ()) -> Format | None:
    return next((form for form in formats or FORMATS if form.test(place)), None)


def refuse_packed(names: Sequence[str]) -> None:
    """Raise UnsupportedFormatError for an archive of NeMo, which holds a checkpoint that can't be read in place."""
    packed = next((name for name in names if name.endswith(".nemo")), None)
    if packed is not None:
        raise UnsupportedFormatError(
            f"{packed} is a tar archive of NeMo, perhaps compressed, with a checkpoint in it. Unpack it with "
            "'tar -xf' into an empty directory, and give that directory."
        )


def open_torch(store: Store, name: str | None, options: ReadOptions) -> Catalog:
    """Open one file, or what lies at the root. Names of a LightningModule lose its attribute, as in a sharded one."""
    refuse_packed([name] if name is not None else [])
    catalog: Catalog = reader("torch_save").open_catalog(store, path=name, options=options)
    if not catalog.info.producer.startswith("lightning") or options.strip_prefix is not None:
        return catalog
    lightning = reader("lightning")
    fqns = [entry.fqn for entry in catalog.tensors.values() if entry.role.value == "model"]
    stripped: Catalog = lightning.without_prefix(catalog, lightning.module_prefix(fqns))
    return stripped
