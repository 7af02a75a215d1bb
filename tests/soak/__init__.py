"""`make soak`: the ledger runs for minutes or hours while everything around two daemons keeps breaking."""
