"""Reads DeepSpeed checkpoints: ZeRO-0 to ZeRO-3, experts, pipelines and universal checkpoints."""
