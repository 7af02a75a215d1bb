"""The Spark job: audit, compact and restore the stored backlog.

Nothing but the edge imports this package, so that the daemon needs no JVM.
"""
