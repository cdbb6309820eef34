"""Opens a plain DCP directory. Reads the manifest if there is one, otherwise `.metadata`."""

from __future__ import annotations

from ckptkit.catalog.entry import Catalog
from ckptkit.formats.dcp import catalog
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.own.reader import open_manifest
from ckptkit.storage import Store


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of the DCP checkpoint at the store's root.

    Prefers the manifest to `.metadata`, because the manifest contains digests and needs no unpickling.
    """
    return open_manifest(store) or catalog.open_catalog(store, options=options)
