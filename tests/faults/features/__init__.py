"""Features of routes while things break: each has a ledger that uses it, and a rule by which every number is judged."""
