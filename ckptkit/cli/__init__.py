"""The command line. It parses arguments, calls the library and prints results; the work is done elsewhere."""
