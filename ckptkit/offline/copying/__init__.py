"""Copies tensors from one checkpoint to another: plans what goes where, executes it, checks digests."""
