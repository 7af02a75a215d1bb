"""The Spark job: audit, compact and restore the stored backlog. Nothing but the edge imports it, so the daemon needs no JVM."""
