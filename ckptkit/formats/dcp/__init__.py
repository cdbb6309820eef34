"""torch.distributed.checkpoint: reads and writes `.metadata` and `*.distcp` files."""
