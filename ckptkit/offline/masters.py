"""Whether the fp32 masters of a source are those of its weights, where their names were not saved with them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ckptkit.catalog.entry import Role
from ckptkit.errors import IntegrityError

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source

__all__ = ["prove_masters"]


def prove_masters(source: Source, used: Collection[str] | None = None) -> int:
    """Prove the names that a reader gave to masters that were saved without: cast, each is its weight, bit for bit.

    Args:
        used: The tensors that are wanted; nothing is read where no master is among them. None stands for all.

    Returns:
        How many masters were proved.

    Raises:
        IntegrityError: Some are not their weights.
    """
    if source.catalog.info.format != "lightrft":
        return 0
    masters = [name for name, entry in source.catalog.tensors.items() if entry.role is Role.MASTER]
    if not masters or not (used is None or any(name in used for name in masters)):
        return 0
    from ckptkit.formats.master_check import check_masters

    wrong = check_masters(source.store, source.catalog)
    if wrong:
        raise IntegrityError(
            f"{source.url}: {len(wrong)} of {len(masters)} fp32 masters, cast, are not the weights that they belong to "
            f"by their order: {', '.join(wrong[:4])}. Model and optimizer are of two saves, or the model was changed."
        )
    return len(masters)
