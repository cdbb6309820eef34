"""torch.distributed.checkpoint (DCP): reads and writes `.metadata` and `*.distcp` files."""
