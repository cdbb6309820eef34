"""Measures `convert` against `cp` and other converters on the same bytes, and the planning of a million slices."""
