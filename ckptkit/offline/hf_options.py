"""What the user asked of an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ckptkit.catalog.names import NameMap

__all__ = ["ExportOptions"]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the user asked for.

    Attributes:
        dtype: "keep" or a float dtype; floats only are cast.
        weights: "model", "master" (fp32 copies), or "auto".
        key_map: None chooses one where there is no doubt.
        strip_prefix: Removed from every name; names without it are left out.
        include, exclude: Globs over names before the key map, or over keys of the catalog.
        untie: Keep a head that a tied config would lose.
        adapter_config: PEFT's config of an adapter, where the checkpoint and the base have none.
        merge_adapter: Merge the adapter into the base weights.
        card: Write README.md.
        strict: Raise on all that does not fit the base. Without, it is listed in `HFExport.faults`.
    """

    dtype: str = "keep"
    weights: Literal["auto", "model", "master"] = "auto"
    key_map: NameMap | None = None
    strip_prefix: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    untie: bool = False
    adapter_config: Mapping[str, Any] | None = None
    merge_adapter: bool = False
    card: bool = True
    strict: bool = True
