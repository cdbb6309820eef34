"""Hugging Face models: written, converted, planned in memory, and compared bit by bit."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from ckptkit import convert
from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog
from ckptkit.catalog.targets import Part, Target
from ckptkit.formats.detect import open_source
from ckptkit.formats.sources import read_box
from ckptkit.offline.copying.plan import ComputedTensor, Literal
from ckptkit.offline.export.base import BaseModel, open_base
from ckptkit.offline.export.hf import HFExport, plan_export
from ckptkit.offline.export.weights import ExportOptions
from ckptkit.storage import Store
from tests.catalog.materialize import materialize
from tests.offline.engine import UNITS


class Result(NamedTuple):
    """What a conversion reports, and the tensors and the config.json that it wrote."""

    report: Any
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]


def write_model(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> str:
    """Write tensors of torch or arrays of numpy, and a config.json if there is a config; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in tensors.items() if not isinstance(value, torch.Tensor)}
    if plain:
        save_arrays({name: np.asarray(value) for name, value in plain.items()}, folder / "model.safetensors")
    else:
        save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def read_model(place: Path | str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, or of all that are in a folder."""
    paths = [place] if Path(place).is_file() else sorted(Path(place).glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def converted(source: Any, out: Path, *, command: Callable[..., Any] = convert, **options: Any) -> Result:
    """Convert a source, or merge several."""
    report = command(source if isinstance(source, list) else str(source), str(out), **options)
    config = out / "config.json"
    return Result(report, read_model(out), json.loads(config.read_text()) if config.exists() else {})


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that the tensors have the same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same_tensor(found[name], expected[name])] == []


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


class Planned(NamedTuple):
    """A plan with its source."""

    export: HFExport
    store: Store
    catalog: Catalog

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the export, computed."""
        return {tensor.name: self.computed(tensor) for tensor in self.export.tensors}

    def computed(self, tensor: Target | ComputedTensor) -> torch.Tensor:
        """Return a tensor in the dtype in which it is stored or computed: casts are not carried out."""
        dtype = tensor.source_dtype if isinstance(tensor, Target) else tensor.dtype
        return torch.from_numpy(_bits(self.store, self.catalog, tensor)).view(getattr(torch, dtype))

    @property
    def names(self) -> set[str]:
        return {tensor.name for tensor in self.export.tensors}

    @property
    def files(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for file in self.export.files:
            (literal,) = file.literals
            assert isinstance(literal, Literal)
            found[file.path] = literal.data
        return found

    def json(self, name: str = "config.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files[name])
        return found


def planned(source: Path | str, base: Path | BaseModel | None = None, **options: Any) -> Planned:
    """Plan the export of a checkpoint of any format."""
    found = open_source(str(source))
    model = open_base(str(base)) if isinstance(base, Path) else base
    export = plan_export(found.store, found.catalog, base=model, options=ExportOptions(**options))
    return Planned(export, found.store, found.catalog)


def stored(**shapes: tuple[int, ...]) -> dict[str, Target]:
    """Return fp32 tensors as they are stored; "__" in a name is a dot."""
    made = {}
    for name, shape in ((key.replace("__", "."), shape) for key, shape in shapes.items()):
        made[name] = Target(name, "float32", shape, (Part(Box.whole(shape), name, Box.whole(shape)),), "float32")
    return made


def _bits(store: Store, catalog: Catalog, tensor: Target | ComputedTensor) -> Any:
    """Return an array of unsigned integers, the bits of any dtype."""
    if isinstance(tensor, Target):
        sources = {}
        for key in tensor.sources:
            entry = catalog.tensors[key]
            data = read_box(store, entry, Box.whole(entry.shape)).reshape(-1)
            sources[key] = data.view(UNITS[dtype_of(entry.dtype).itemsize]).reshape(entry.shape)
        return materialize(tensor, sources)
    inputs = [np.ascontiguousarray(_bits(store, catalog, item)).reshape(-1).view(np.uint8) for item in tensor.inputs]
    made = np.empty(tensor.numel * dtype_of(tensor.dtype).itemsize, np.uint8)
    tensor.compute(inputs, made)
    return made.view(UNITS[dtype_of(tensor.dtype).itemsize]).reshape(tensor.shape)
