"""The training state that a checkpoint captures and restores."""
