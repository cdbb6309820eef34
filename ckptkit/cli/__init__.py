"""The command line. It only parses arguments and prints results."""
