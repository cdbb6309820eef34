"""Reshards: the same tensors, cut for other ranks."""
