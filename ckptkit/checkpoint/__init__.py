"""Saves, rotates and loads the checkpoints of one run."""
