"""Loads replicated data. If several ranks need the same bytes, each reads a part and sends it to the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ckptkit.checkpoint.run.coordinator import Coordinator

_PIECE = 64 << 20  # maximum bytes per message
_DIRECT = 1 << 20  # tensors of fewer bytes are packed together into messages
_FLYING = 128 << 20  # bytes in flight per rank; above this, the rank waits for the oldest message
_ALIGN = 16
_MOST = 64  # ranks per group; limited because each rank sends to all others


def groups_of(signatures: Sequence[bytes]) -> list[list[int]]:
    """Return, for each rank, all ranks that read the same data, in ascending order. The list includes the rank itself.

    Args:
        signatures: A signature of each rank's planned reads, or b"" if the rank's reads cannot be shared.
    """
    alike: dict[bytes, list[int]] = {}
    for rank, signature in enumerate(signatures):
        if signature:
            alike.setdefault(signature, []).append(rank)
    found = [[rank] for rank in range(len(signatures))]
    for ranks in alike.values():
        for start in range(0, len(ranks), _MOST):
            members = ranks[start : start + _MOST]
            for rank in members:
                found[rank] = members
    return found


def exchange(coordinator: Coordinator, members: Sequence[int], shares: Sequence[Sequence[torch.Tensor]]) -> int:
    """Send this rank's share to all other members, and receive theirs. Returns the number of bytes received.

    All members must call it, and all send in parallel. At most 128 MiB per rank are in flight.

    Args:
        members: The ranks, as the coordinator numbers them. Includes this rank.
        shares: The tensors that each member reads. Their number, shapes, dtypes and order are the same on every member.
    """
    import torch.distributed as dist

    own = members.index(coordinator.rank)
    messages = [list(_messages(share)) for share in shares]
    others = [coordinator.global_rank(rank) for rank in members if rank != coordinator.rank]
    # The tag is unique to this exchange. If a rank fails, its next receive must not match messages that were already
    # sent, because gloo kills the process if such a message is too long.
    group, tag, limit = coordinator.group, coordinator.step, timedelta(seconds=coordinator.timeout_s)
    flying: deque[tuple[torch.Tensor, list[Any], Callable[[torch.Tensor], None]]] = deque()
    aloft = received = 0

    def land() -> int:
        data, works, keep = flying.popleft()
        for work in works:
            work.wait(limit)
        keep(data)
        return data.numel()

    for turn in range(max(map(len, messages), default=0)):
        for member, theirs in enumerate(messages):
            if turn >= len(theirs):
                continue
            data = theirs[turn].make(member == own)
            if member == own:
                flying.append((data, [dist.isend(data, peer, group=group, tag=tag) for peer in others], lambda _: None))
            else:
                peer = coordinator.global_rank(members[member])
                flying.append((data, [dist.irecv(data, peer, group=group, tag=tag)], theirs[turn].keep))
                received += data.numel()
            aloft += data.numel()
            while aloft > _FLYING and len(flying) > 1:
                aloft -= land()
    while flying:
        land()
    return received


@dataclass(frozen=True, slots=True)
class _Message:
    """Some of the tensors that a rank reads for the other ranks, sent as one message."""

    make: Callable[[bool], torch.Tensor]  # True: the bytes to send. False: memory to receive them in
    keep: Callable[[torch.Tensor], None]  # copies received bytes to the tensors


def _messages(share: Sequence[torch.Tensor]) -> Iterator[_Message]:
    """Divide `share`, the tensors that a rank sends, into messages.

    Large tensors in host memory are sent without a copy. All other tensors are copied, several to a message.
    """
    import torch

    from ckptkit.formats.dcp.host_bytes import host_view, lies_row_major

    small: list[torch.Tensor] = []
    size = 0
    for piece in (piece for tensor in share for piece in _pieces(tensor)):
        nbytes = piece.numel() * piece.itemsize
        if nbytes >= _DIRECT and lies_row_major(piece):
            data = torch.frombuffer(host_view(piece, writable=True), dtype=torch.uint8)
            yield _Message(lambda _, data=data: data, lambda _: None)  # type: ignore[misc]
            continue
        if small and size + nbytes > _PIECE:
            yield _packed(small)
            small, size = [], 0
        small.append(piece)
        size += nbytes + _ALIGN
    if small:
        yield _packed(small)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if not tensor.is_contiguous():
        return [tensor]
    flat, numel = tensor.detach().view(-1), _PIECE // tensor.itemsize
    return [flat[start : start + numel] for start in range(0, flat.numel(), numel)]


def _packed(tensors: Sequence[torch.Tensor]) -> _Message:
    import torch

    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.numel() * tensor.itemsize // _ALIGN) * _ALIGN

    def parts(data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for tensor, start in zip(tensors, starts, strict=True):
            piece = data[start : start + tensor.numel() * tensor.itemsize]
            yield tensor, piece.view(tensor.dtype).view(tensor.shape)

    def make(filled: bool) -> torch.Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        if filled:
            for tensor, piece in parts(data):
                _copy(piece, tensor)
        return data

    def keep(data: torch.Tensor) -> None:
        for tensor, piece in parts(data):
            _copy(tensor, piece)

    return _Message(make, keep)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    import torch

    with torch.no_grad():
        if target.dtype.itemsize == 1:
            # torch cannot copy some float8 dtypes.
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        target.copy_(source)
