"""Describes a checkpoint's tensors and where their slices are stored. Uses no I/O, no torch and no fsspec."""
