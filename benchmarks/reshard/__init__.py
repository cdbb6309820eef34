"""Measures `reshard` against `cp` on the same bytes, and the planning for very large world sizes."""
