"""Audits of the stored backlog, and the Spark jobs that compact and restore it.

Only the command line imports this package, so the daemon needs no JVM.
"""
