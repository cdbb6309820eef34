"""Contains a reader for each checkpoint format. Each reader is a module or package that returns a Catalog.

The writer of DCP is in the same package as the reader.

All readers raise the errors of `errors.UNREADABLE`, and CheckpointNotFoundError. The message names the file, rank or
tensor: IncompleteCheckpointError if something is missing, CorruptCheckpointError if files are damaged or contradict
each other, UnsafePickleError and UnsafePathError for hostile pickles and names, UnsupportedFormatError for the rest.
"Raises" in a docstring lists only other reasons.
"""
