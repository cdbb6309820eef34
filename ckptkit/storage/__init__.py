"""Bytes at a URL. The only importer of fsspec."""

from ckptkit.storage.store import BlobWriter, FileInfo, Store, open_store

__all__ = ["BlobWriter", "FileInfo", "Store", "open_store"]
