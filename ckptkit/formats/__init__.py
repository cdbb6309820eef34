"""Contains a reader for each checkpoint format. Each reader is a module or package that returns a Catalog.

The writer of DCP is in the same package as the reader.
"""
