"""Reads DeepSpeed checkpoints: ZeRO 0 to 3, experts, pipelines and universal checkpoints."""
