"""The hosts of a store's URL, which are those of a primary and its standbys. Pure."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, urlencode, urlsplit


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
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "," in query.get("port", ""):
        return [url]
    if hosts:
        return [parts._replace(netloc=login + at + host).geturl() for host in hosts.split(",")]
    base = url.partition("?")[0]  # Joining the parts of a URL without a host would lose a slash.
    named = [query | {"host": host} for host in query["host"].split(",")] if "host" in query else [query]
    return [f"{base}?{urlencode(one, safe='/', quote_via=quote)}" for one in named]
