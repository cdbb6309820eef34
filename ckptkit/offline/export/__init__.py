"""Hugging Face exports: which tensors, under which names, with which files."""
