"""Readers of all checkpoint formats, a module or package per format: each returns a Catalog.

The writer of DCP is beside its reader.
"""
