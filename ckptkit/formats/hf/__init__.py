"""Hugging Face files: safetensors, and the config and tokenizer beside them."""
