"""The errors of a Spark job beside the losses of a store. This module imports no pyspark, so that the command line can
read it."""

from __future__ import annotations


class JobImpossible(Exception):
    """The job needs a program or package that is not on this machine. The text says which."""


class JobMisused(Exception):
    """An option does not fit; the text says which."""


class JobFailed(Exception):
    """Spark gave up, for a reason besides the store and the options. The text is Spark's, without passwords."""
