"""Manages the directory of one run, which its ranks share: commits, lease, pins, deletion."""
