"""Reshard against cp on the same bytes, and planning for world sizes beyond any machine."""
