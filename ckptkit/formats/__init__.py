"""Contains a reader for each checkpoint format. Each reader is a module or package that returns a Catalog.

The writer of DCP is in the same package as the reader.

Any reader may raise these errors, so most docstrings do not list them. The message names the file, rank or tensor.

- CheckpointNotFoundError: There is no checkpoint in the reader's format.
- IncompleteCheckpointError: Something is missing.
- CorruptCheckpointError: Files are damaged, or contradict each other.
- UnsafePickleError, UnsafePathError: A pickle or a file name is hostile.
- UnsupportedFormatError: Something in the files can't be read without loss.
- CheckpointMismatchError: Two tensors get the same name when the prefixes of wrappers are removed.
- MissingExtraError: A package is not installed, such as the one that decompresses zstd.
"""
