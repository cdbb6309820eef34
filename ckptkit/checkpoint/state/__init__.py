"""Captures and restores the state of a training run."""
