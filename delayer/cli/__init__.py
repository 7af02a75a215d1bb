"""The verbs of the command line. Each parses, calls, and prints; what is decided is decided elsewhere."""
