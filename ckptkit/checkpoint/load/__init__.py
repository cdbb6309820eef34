"""Loads a checkpoint into a training state."""
