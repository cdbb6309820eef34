"""Convert against cp and other converters on the same bytes, and planning a million slices without data."""
