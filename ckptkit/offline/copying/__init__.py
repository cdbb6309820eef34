"""The copying engine: plans, runs of bytes and boxes, checks."""
