"""URLs that options name, read as the configuration's are: what is wrong with one is told without its password."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from delayer.commands.common import Misused
from delayer.settings.errors import Expected, show
from delayer.settings.secret import SecretUrl
from delayer.settings.values import broker_url, management_url, store_url

__all__ = ["broker_url", "management_url", "store_url", "store_url_of_hosts", "url_of"]


def url_of(option: str, text: str, read: Callable[[object], SecretUrl | None]) -> SecretUrl:
    """The URL that ``option`` gave, as ``read`` (one of the above) has it. Raises Misused."""
    try:
        url = read(text)
    except Expected as wrong:
        raise Misused(f"{option}: expected {wrong}, found {show(text, is_url=True)}") from None
    if url is None:
        raise Misused(f"{option}: expected a URL, found none")
    return url


def store_url_of_hosts(value: object) -> SecretUrl:
    """As store_url; or of several hosts, as in h1:5432,h2:5432: the drivers take one that answers. Raises Expected."""
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
    except ValueError:
        return store_url(value)
    _, at, hosts = parts.netloc.rpartition("@")
    if not isinstance(value, str) or "," not in hosts:
        return store_url(value)
    for host in hosts.split(","):
        store_url(value.replace(f"{at}{hosts}", f"{at}{host}", 1))
    return SecretUrl(value)
