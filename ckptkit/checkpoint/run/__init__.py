"""Manages a run's directory, which its ranks share: commits, lease, pins, deletion."""
