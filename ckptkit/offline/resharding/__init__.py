"""Reshards checkpoints: the same tensors, sharded for other ranks."""
