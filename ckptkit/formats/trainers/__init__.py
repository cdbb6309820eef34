"""Reads checkpoints that other training systems write."""
