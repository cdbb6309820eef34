"""Reads Hugging Face files: safetensors, configs and tokenizers."""
