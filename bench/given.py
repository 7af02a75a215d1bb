"""What the command line may say: each mistake is told at once, with its option, what was expected and what was found.

An hour of measuring must not end with a file that cannot be written, nor begin with a number that measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.figures import Result

USAGE = 2


class Mistake(ValueError):
    """Of whoever gave the command; the message is one line."""


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more; found {text!r}")
        return value

    return number


def numbers(text: str) -> tuple[int, ...]:
    """A type for argparse: whole numbers with commas between them, none of them twice."""
    try:
        found = tuple(int(one) for one in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(
            f"expected whole numbers, 1 or more, each once, with commas between them; found {text!r}"
        )
    return found


def names(option: str, text: str, known: Iterable[str]) -> set[str]:
    """Names with commas between them. Raises Mistake."""
    found, there = {name.strip() for name in text.split(",") if name.strip()}, list(known)
    if unknown := sorted(found - set(there)):
        raise Mistake(f"argument {option}: expected some of {', '.join(there)}; found {', '.join(unknown)}")
    return found


def writable(option: str, path: Path) -> Path:
    """A file that can be written when all is measured. What stands there already is left as it is. Raises Mistake."""
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise Mistake(
            f"argument {option}: expected a file that can be written; found {path}: {error.strerror}"
        ) from None
    return path


def directory(option: str, path: Path) -> Path:
    """A directory that files can be put into. Raises Mistake."""
    probe = path / ".delayer-bench"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Mistake(
            f"argument {option}: expected a directory that can be written to; found {path}: {error.strerror}"
        ) from None
    return path


def result(path: Path) -> Result:
    """A stored result. Raises Mistake."""
    expected = "expected a result of the benchmark (JSON with about, figures, series and notes)"
    try:
        return Result.load(path)
    except OSError as error:
        raise Mistake(f"{path}: {expected}; found {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, or JSON of something else
        raise Mistake(f"{path}: {expected}; found something else") from None
