"""Reads and writes the files of ckptkit's own formats: the commit record, the manifest, LOCAL shards."""
