"""Reshard compared with cp on the same bytes, and planning for very large world sizes."""
