"""Saves and loads of sharded states, compared with torch DCP in the same run."""
