"""Reshards checkpoints: the same tensors, sharded for a different number of ranks."""
