"""Copies tensors from one checkpoint to another: plans the copy, executes the plan, checks digests."""
