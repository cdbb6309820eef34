"""What other training systems leave on disk."""
