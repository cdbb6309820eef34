"""The directory of one run, shared by its ranks: commit, lease, pins, deletion."""
