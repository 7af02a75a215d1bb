"""Which service somebody is of: a name for a broker's virtual host, and one for a store, that tell nothing of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit

from delayer.settings.model import Settings


def service_of(settings: Settings) -> dict[str, str | None]:
    """The same for all that work with one virtual host and one database, whoever they log in as.

    >>> one, same, other = (
    ...     service_of(Settings.model_validate({"broker": {"url": url}}))["broker"]
    ...     for url in ("amqp://a:b@host/orders", "amqp://host:5672/orders", "amqp://a:b@host/mail")
    ... )
    >>> (one == same, one == other)
    (True, False)
    """
    broker = urlsplit(settings.broker_url)
    store = None if settings.store_url is None else urlsplit(settings.store_url)
    return {
        "broker": _name(broker, 5671 if broker.scheme == "amqps" else 5672),
        "store": None if store is None else _name(store, 5432),
    }


def same(one: Mapping[str, str | None], other: Mapping[str, str | None]) -> bool:
    """Whether these are one service. Who has no store, or not yet, may be of one that has."""
    stores = {one.get("store"), other.get("store")} - {None}
    return one.get("broker") == other.get("broker") and len(stores) < 2


def _name(url: SplitResult, port: int) -> str:
    host = url.netloc.rpartition("@")[2].lower()  # of a store they may be several, between commas
    whole = host if re.search(r":\d+$", host) else f"{host}:{port}"
    return hashlib.sha256(f"{whole} {unquote(url.path[1:]) or '/'}".encode()).hexdigest()[:16]
