"""The errors of a Spark job beside the losses of a store. This module imports no pyspark, so that the command line can
read it."""

from __future__ import annotations


class JobImpossible(Exception):
    """The job needs a program or package that is not on this machine. The text says which."""


class JavaMissing(JobImpossible):
    """Java is missing, or too old for Spark."""

    def __init__(self, found: str | None, needed: int) -> None:
        what = "Java is missing" if found is None else f"Java {found} is too old"
        super().__init__(
            f"{what}: Spark needs Java {needed} or later. Next: install it (Debian and Ubuntu: "
            "apt install default-jre-headless; Fedora and RHEL: dnf install java-21-openjdk-headless), or set "
            "JAVA_HOME to where it is."
        )


class SparkMissing(JobImpossible):
    """The extra ``spark`` is not installed."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"the Python package {module} is missing: audit, compact and restore are an extra. "
            "Next: pip install '.[spark]' in delayer's checkout, or the wheel with [spark] behind its name."
        )


class JobMisused(Exception):
    """An option does not fit; the text says which."""


class JobFailed(Exception):
    """Spark gave up, for a reason besides the store and the options. The text is Spark's, without passwords."""
