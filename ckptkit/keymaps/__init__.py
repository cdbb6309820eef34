"""Key maps: renames the tensors of one system to the names of another."""
