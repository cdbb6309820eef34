"""One module a format: each reads it into a Catalog, and where ckptkit writes it, the writer is beside the reader."""
