"""Reads and writes bytes at a URL. No other package imports fsspec."""

from ckptkit.storage.open import open_store
from ckptkit.storage.store import BlobWriter, FileInfo, Store

__all__ = ["BlobWriter", "FileInfo", "Store", "open_store"]
