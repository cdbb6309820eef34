"""The copying engine: plans, runs of bytes, boxes, checks."""
