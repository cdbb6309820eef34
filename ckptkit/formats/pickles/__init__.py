"""Reads pickles and torch zip archives without running anything from them."""
