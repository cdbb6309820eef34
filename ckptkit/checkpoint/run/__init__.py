"""Manages a run's directory, which all ranks share: commits, lease, pins, deletion."""
