"""The Spark job: audit, compact and restore the stored backlog.

Only the command line imports this package, so the daemon needs no JVM.
"""
