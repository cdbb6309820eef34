"""Bytes at a URL. The only importer of fsspec."""

from ckptkit.storage.open import open_store
from ckptkit.storage.store import BlobWriter, FileInfo, Store

__all__ = ["BlobWriter", "FileInfo", "Store", "open_store"]
