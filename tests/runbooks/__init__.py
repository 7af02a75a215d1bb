"""The runbooks of docs/operations.md, carried out: each on servers of its own, with messages that flow and an account
of every one of them.

    python -m tests.runbooks                    # all
    python -m tests.runbooks postgres-failover  # one
"""
