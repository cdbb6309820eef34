"""Saving and loading sharded states, against torch DCP in the same run."""
