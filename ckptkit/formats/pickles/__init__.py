"""Reads pickles and torch zip archives without running any code from them."""
