"""Exports a state dict as a single `torch.save` file."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.catalog.entry import Catalog
from ckptkit.formats.hf.header import TensorToWrite
from ckptkit.formats.pickles.encode import encode_torch_file
from ckptkit.offline.copying.plan import CrcField, Literal, OutputFile, OutputTensor, Placement
from ckptkit.offline.export.files import in_disk_order


def torch_file(
    catalog: Catalog, tensors: Sequence[OutputTensor], *, path: str
) -> tuple[list[OutputFile], list[Placement], tuple[str, ...]]:
    """Lay out tensors in one file at `path`; return (files, placements, paths to publish last)."""
    ordered = in_disk_order(catalog, tensors)
    headers = [TensorToWrite(t.name, t.dtype, t.shape) for t in ordered]
    laid = encode_torch_file(headers)
    crcs = tuple(
        CrcField(at, start, header.nbytes) for at, start, header in zip(laid.crcs, laid.starts, headers, strict=True)
    )
    file = OutputFile(path, laid.nbytes, tuple(Literal(start, data) for start, data in laid.literals), crcs)
    return [file], [Placement.whole(tensor, 0, start) for tensor, start in zip(ordered, laid.starts, strict=True)], ()
