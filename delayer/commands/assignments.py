"""Options of the form KEY=VALUE."""

from __future__ import annotations

from collections.abc import Callable

import click

Callback = Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, str]]


def assignments(example: str) -> Callback:
    """The callback of an option that may be repeated; ``example`` stands in its error."""

    def read(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
        pairs = {}
        for text in given:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise click.BadParameter(f"expected KEY=VALUE, such as {example}")
            pairs[key] = value
        return pairs

    return read
