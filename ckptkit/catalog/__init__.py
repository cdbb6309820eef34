"""What tensors exist and where their parts lie. No I/O, no torch, no fsspec."""
