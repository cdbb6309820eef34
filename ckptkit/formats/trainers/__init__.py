"""Reads checkpoints of other training systems."""
