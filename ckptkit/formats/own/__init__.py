"""ckptkit's own file formats: the commit record, the manifest, LOCAL shards."""
