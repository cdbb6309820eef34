"""Reads and writes ckptkit's own files: the commit record, the manifest, LOCAL shards."""
