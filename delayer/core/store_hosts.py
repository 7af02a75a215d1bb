"""The hosts of a store's URL, which are those of a primary and its standbys. Pure."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, urlencode, urlsplit


def parameters_of(url: str) -> dict[str, str]:
    """The parameters behind the ? of a URL. Raises ValueError for a text that is not a URL."""
    return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))


def names_of(url: str) -> list[str]:
    """The hosts that a URL lists, each with the port that follows it. Raises ValueError for a text that is not a URL.

    >>> names_of("postgresql://me:pw@a:1,,b/db"), names_of("postgresql:///db?host=a,b&port=1,2")
    (['a:1', '', 'b'], ['a', 'b'])
    """
    return (urlsplit(url).netloc.rpartition("@")[2] or parameters_of(url).get("host", "")).split(",")


def hosts_of(url: str) -> list[str]:
    """The URLs of the single hosts of a URL. Those of a list of ports stay together. Raises ValueError for a text
    that is not a URL.

    >>> hosts_of("postgresql://me:pw@a:1,b/db?port=5")
    ['postgresql://me:pw@a:1/db?port=5', 'postgresql://me:pw@b/db?port=5']
    >>> hosts_of("postgresql:///db?host=a,b")
    ['postgresql:///db?host=a', 'postgresql:///db?host=b']
    """
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    query = parameters_of(url)
    if "," in query.get("port", ""):
        return [url]
    if hosts:
        return [parts._replace(netloc=login + at + host).geturl() for host in hosts.split(",")]
    base = url.partition("?")[0]  # Joining the parts of a URL without a host would lose a slash.
    named = [query | {"host": host} for host in query["host"].split(",")] if "host" in query else [query]
    return [f"{base}?{urlencode(one, safe='/', quote_via=quote)}" for one in named]
