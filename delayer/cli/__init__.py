"""The verbs of the command line. Each verb parses its options, calls other packages, and prints the result."""
