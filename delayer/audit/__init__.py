"""Audits of the stored backlog, the Spark job that compacts it, and its restore in bulk. Only the command line imports
this package, so the daemon needs no JVM."""
