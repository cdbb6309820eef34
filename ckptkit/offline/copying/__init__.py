"""Copies tensors between checkpoints: plans the copy, executes the plan and checks digests."""
