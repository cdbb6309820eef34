"""Converts, reshards, verifies, compares and lists checkpoints without a training job."""
