"""Hugging Face exports: tensors, names and files."""
