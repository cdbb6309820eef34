"""The command line: parses and prints, nothing else."""
