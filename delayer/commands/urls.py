"""URLs that options name, read as the configuration's are: what is wrong with one is told without its password."""

from __future__ import annotations

from collections.abc import Callable

from delayer.commands.common import Misused
from delayer.settings.errors import Expected, show
from delayer.settings.secret import SecretUrl
from delayer.settings.values import broker_url, management_url, store_url

__all__ = ["broker_url", "management_url", "store_url", "url_of"]


def url_of(option: str, text: str, read: Callable[[object], SecretUrl | None]) -> SecretUrl:
    """The URL that ``option`` gave, as ``read`` (one of the above) has it. Raises Misused."""
    try:
        url = read(text)
    except Expected as wrong:
        raise Misused(f"{option}: expected {wrong}, found {show(text, is_url=True)}") from None
    if url is None:
        raise Misused(f"{option}: expected a URL, found none")
    return url
