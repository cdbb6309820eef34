"""Reads Hugging Face files: safetensors, config and tokenizer."""
