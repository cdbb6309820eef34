"""Our own files: the commit record, the manifest, LOCAL shards."""
