"""One module per format: its reader produces a Catalog, and its writer, if any, is next to it."""
