"""Reshards checkpoints: the same tensors, sharded for another number of ranks."""
