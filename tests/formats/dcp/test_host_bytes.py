"""The bytes of tensors with other memory orders: copied in tiles, not as a whole."""

from __future__ import annotations

import pytest
import torch

from ckptkit.formats.dcp import host_bytes
from ckptkit.formats.dcp.host_bytes import HostBytes


def _odd(name: str) -> torch.Tensor:
    plain = torch.arange(6000, dtype=torch.float32).reshape(20, 300)
    return {
        "transposed": plain.t(),
        "every second column": plain[:, ::2],
        "one dimension": plain.reshape(-1)[::3],
        "long rows": plain.reshape(2, 10, 300).transpose(1, 2),
        "conjugate": torch.complex(plain, plain + 1).conj(),
        "conjugate and transposed": torch.complex(plain, plain + 1).conj().t(),
        "expanded": torch.arange(5).expand(700, 5),
        "bool": (plain > 9).t(),
        "no elements": plain[:, :0].t(),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "transposed",
        "every second column",
        "one dimension",
        "long rows",
        "conjugate",
        "conjugate and transposed",
        "expanded",
        "bool",
        "no elements",
    ],
)
def test_bytes_are_row_major_and_copies_are_at_most_one_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_bytes, "_TILE", 1000)
    tensor = _odd(name)
    pieces = [bytes(piece) for piece in HostBytes().pieces(tensor)]
    expected = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    assert b"".join(pieces) == bytes(expected.numpy())
    assert all(len(piece) <= 1000 for piece in pieces)
    assert HostBytes().at_rest(tensor) is None or tensor.is_contiguous()
