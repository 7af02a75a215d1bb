"""Features of routes under faults: each has a ledger that uses it, and a rule that judges every number."""
