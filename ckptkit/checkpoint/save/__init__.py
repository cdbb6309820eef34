"""Saves a training state: sharded, full or local, in the foreground or in the background."""
