"""Draws checkpoints as self-contained HTML pages with inline SVG. Pages need no network, and all names are escaped."""
