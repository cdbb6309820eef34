"""The FSDP2 runtime of a training process."""
