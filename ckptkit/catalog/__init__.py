"""Describes the tensors of a checkpoint and where their parts are stored. No I/O, no torch, no fsspec."""
