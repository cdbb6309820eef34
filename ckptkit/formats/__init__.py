"""One module per format: its reader produces a Catalog. If the format can also be written, the writer is beside it."""
