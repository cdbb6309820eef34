"""Measures saves and loads of sharded states against torch DCP in the same run."""
