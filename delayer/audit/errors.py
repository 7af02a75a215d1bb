"""Errors of a Spark job other than losing the store. Without pyspark, so that the command line can import them."""

from __future__ import annotations


class JobImpossible(Exception):
    """The job needs a program or package that this machine lacks. The text says which."""


class JobMisused(Exception):
    """An option is unusable. The text says which."""


class JobFailed(Exception):
    """Spark gave up for a reason other than the store and the options. The text is Spark's, with passwords masked."""
