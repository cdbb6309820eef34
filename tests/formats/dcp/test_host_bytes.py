"""The bytes of tensors with other memory orders: copied in tiles, not as a whole."""

import pytest
import torch

from ckptkit.formats.dcp import host_bytes
from ckptkit.formats.dcp.host_bytes import HostBytes

PLAIN = torch.arange(6000, dtype=torch.float32).reshape(20, 300)
ODD = {
    "transposed": PLAIN.t(),
    "every second column": PLAIN[:, ::2],
    "one dimension": PLAIN.reshape(-1)[::3],
    "long rows": PLAIN.reshape(2, 10, 300).transpose(1, 2),
    "conjugate": torch.complex(PLAIN, PLAIN + 1).conj(),
    "conjugate and transposed": torch.complex(PLAIN, PLAIN + 1).conj().t(),
    "expanded": torch.arange(5).expand(700, 5),
    "bool": (PLAIN > 9).t(),
    "no elements": PLAIN[:, :0].t(),
}


@pytest.mark.parametrize("name", ODD)
def test_bytes_are_row_major_and_copies_are_at_most_one_tile(name, monkeypatch):
    monkeypatch.setattr(host_bytes, "_TILE", 1000)
    tensor = ODD[name]
    pieces = [bytes(piece) for piece in HostBytes().pieces(tensor)]
    expected = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    assert b"".join(pieces) == bytes(expected.numpy())
    assert all(len(piece) <= 1000 for piece in pieces)
    assert HostBytes().at_rest(tensor) is None or tensor.is_contiguous()
