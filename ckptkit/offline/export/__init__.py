"""Exports checkpoints to Hugging Face: tensors, names and files."""
