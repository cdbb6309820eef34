"""Saving and keeping the checkpoints of one run."""
