"""Saves a training state: sharded, full or local, at once or in the background."""
