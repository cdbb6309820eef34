"""Describes which tensors exist and where their parts are. No I/O, no torch, no fsspec."""
