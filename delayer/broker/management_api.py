"""An optional, read-only client of RabbitMQ's management API, for bindings and policies, which AMQP does not show."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from email.utils import mktime_tz, parsedate_tz
from http.client import HTTPException
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, unquote, urlsplit

from delayer.broker.addresses import addresses_of
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.core.clocks import ClockOffset
from delayer.core.topology import Binding

DATE_SECONDS: Final = 2.0
"""Maximum age of the ``Date`` header. It has whole seconds, and the server computes it once a second."""
AWAY_SECONDS: Final = 30.0
NAMES_LENGTH: Final = 3000
"""Maximum length of the queue names in the URL of a request, quoted. Servers take 8,000 characters of it."""
_OTHER: Final = "this is not RabbitMQ's management API"


class Members(NamedTuple):
    """The members of a queue. ``online``: how many of them take part; None if unknown. Only quorum queues have that."""

    copies: int
    online: int | None

    @property
    def minority(self) -> str:
        """Describe the online members, if the queue is stalled because they are not a majority; "" if they are."""
        if self.online is None or 2 * self.online > self.copies:
            return ""
        return f"{self.online} of {self.copies}"


class Management:
    """A client. ``url``: ``http[s]://user:password@host:port``. Raises ValueError for another scheme or no host.

    Makes blocking requests in a thread. A command makes a few dozen, too few for a dependency.
    """

    def __init__(self, url: str, vhost: str, *, timeout: float = 30.0, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("management_url: expected http://user:password@host:port, found something else")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.where = f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")
        self._base = self.where + parts.path.rstrip("/") + "/api"
        self.vhost = quote(vhost, safe="")
        """The virtual host, quoted for paths."""
        self.clock: ClockOffset | None = None
        """The broker's clock, by the last answer."""
        self._timeout = timeout
        self._away: str | None = None  # The last reason without an answer.
        self._away_until = 0.0
        login = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._authorization = "Basic " + base64.b64encode(login.encode()).decode()
        # Ignore proxies of the environment, because the request has a password, and brokers are near.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        )

    @classmethod
    def beside(cls, broker_urls: str, management_url: str | None, *, timeout: float = 5.0) -> Self | None:
        """Return the API of the broker at ``broker_urls``, with its vhost and TLS settings. None without a URL."""
        if management_url is None:
            return None
        address = addresses_of(broker_urls)[0]
        return cls(management_url, address.vhost, timeout=timeout, tls=address.tls)

    async def _queues(self, names: Iterable[str], columns: Mapping[str, object]) -> list[Any]:
        """Read the name and these columns of the queues that exist. The broker does not look at the vhost's other
        queues: reading eight thousand would take it more than five seconds."""
        names, rows = frozenset(names), []
        wanted = sorted(names)
        shape = {"page": int, "items": [{"name": str, **columns}]}
        at_once = max(1, NAMES_LENGTH // max((len(quote(re.escape(name), safe="")) for name in wanted), default=1))
        for start in range(0, len(wanted), at_once):
            some = "|".join(map(re.escape, wanted[start : start + at_once]))
            which = f"page=1&page_size=500&use_regex=true&name={quote(f'^({some})$', safe='')}"
            _, items = await self.get(f"queues/{self.vhost}?columns=name,{','.join(columns)}&{which}", shape)
            rows += [row for row in items if row[0] in names]  # The broker ignores the case of letters.
        return rows

    async def delayed(self, queues: Iterable[str]) -> dict[str, int | None]:
        """Count, for each of these queues, the messages that the broker itself delays, or forwards to another queue:
        neither ready nor unacknowledged. The broker's counts are up to COUNTS_AGE seconds old. None if it has not
        counted a new queue yet, or does not count (``management.disable_stats``)."""
        columns = dict.fromkeys(("messages", "messages_ready", "messages_unacknowledged"), int | None)
        rows = await self._queues(queues, columns)
        return {name: None if None in counts else max(0, counts[0] - sum(counts[1:])) for name, *counts in rows}

    async def members(self, queues: Iterable[str]) -> dict[str, Members]:
        """Count the members of each of these queues."""
        rows = await self._queues(queues, {"members": [str], "slave_nodes": [str], "online": list | None})
        return {
            name: Members(len(of) or 1 + len(more), len(online) if of and online is not None else None)
            for name, of, more, online in rows
        }

    async def bindings(self, path: str) -> list[tuple[Binding, dict[str, Any]]]:
        """Read the bindings at a ``path`` below /api, with their arguments."""
        names = ("source", "destination", "destination_type", "routing_key")
        rows = await self.get(path, [{**dict.fromkeys(names, str), "arguments": dict}])
        return [(Binding(*binding), arguments) for *binding, arguments in rows]

    async def get(self, path: str, shape: object, answers: int = 200) -> Any:
        """The decoded answer to a ``path`` below /api, read as :func:`_read` does; an error of the code ``answers`` has
        one too.

        Raises BrokerRefused (401, 403), and BrokerUnreachable for all other errors. After a request without an answer,
        it makes no other attempt for AWAY_SECONDS, because a command with a dozen questions would take minutes. A 404
        is also BrokerUnreachable: a server that does not find existing parts is not our broker. An answer of another
        shape is not from our broker either.
        """
        if self._away is not None and time.monotonic() < self._away_until:
            raise BrokerUnreachable(self._away)
        try:
            async with asyncio.timeout(2 * self._timeout):  # The socket's timeout bounds only each of its operations.
                answer = await asyncio.to_thread(self._get_blocking, path, answers)
            return _read(answer, shape)
        except TimeoutError as error:
            raise self._gone(f"{self.where}: no whole answer within {2 * self._timeout:g} s") from error
        except TypeError as error:
            raise BrokerUnreachable(f"{self.where}: {_OTHER}") from error

    def _gone(self, reason: str) -> BrokerUnreachable:
        self._away, self._away_until = reason, time.monotonic() + AWAY_SECONDS
        return BrokerUnreachable(reason)

    def _get_blocking(self, path: str, answers: int) -> Any:
        request = urllib.request.Request(f"{self._base}/{path}", headers={"Accept": "application/json"})
        request.add_unredirected_header("Authorization", self._authorization)
        asked = time.time()
        try:
            try:
                response = self._opener.open(request, timeout=self._timeout)
            except urllib.error.HTTPError as error:
                if error.code != answers:
                    raise
                response = error
            with response:
                if date := parsedate_tz(response.headers.get("Date")):
                    self.clock = ClockOffset.of_answer(asked, mktime_tz(date), time.time(), precision=DATE_SECONDS)
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (401, 403):
                    raise BrokerRefused(f"{self.where}: the management API refused the user ({error.code})") from error
                raise BrokerUnreachable(f"{self.where}: the management API answered {error.code}") from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            text = f"{self.where}: {reason}"
            is_short = isinstance(reason, ConnectionResetError | BrokenPipeError)  # One of many parallel requests.
            raise BrokerUnreachable(text) if is_short else self._gone(text) from error
        except (ValueError, HTTPException) as error:
            raise BrokerUnreachable(f"{self.where}: {_OTHER}") from error


def _read(found: Any, shape: Any) -> Any:
    """``found``, if it has this shape. Raises TypeError.

    A shape is a type, ``[shape]`` for a list, or ``{field: shape}`` for an object, which becomes a tuple of these
    fields. A list that an object lacks is empty; any other field that it lacks is None.

    >>> _read([{"name": "delays", "node": "a", "more": 1}], [{"name": str, "node": str | None, "members": [str]}])
    [('delays', 'a', [])]
    """
    if isinstance(shape, list):
        return [_read(one, shape[0]) for one in _read(found, list)]
    if isinstance(shape, dict):
        fields = _read(found, dict)
        return tuple(_read(fields.get(name, [] if isinstance(of, list) else None), of) for name, of in shape.items())
    if not isinstance(found, shape):
        raise TypeError(f"expected {shape}, found {type(found)}")
    return found


_UNREADY: Final = "itself delays or forwards"


def delayed_reason(count: int | None) -> str:
    """Describe for operators what a queue may hide; "" if nothing. ``count``: None if unknown."""
    if count is None:
        return f"may hold messages that the broker {_UNREADY}: broker.management_url is not set, or gives no count"
    return f"holds {count} message{'s' * (count != 1)} that the broker {_UNREADY}" if count else ""


async def delayed_in(queues: Iterable[str], management: Management | None) -> dict[str, int | None]:
    """Count the messages of each queue that the broker delays; None if unknown."""
    names = [*queues]
    try:
        found = None if management is None else await management.delayed(names)
    except (BrokerRefused, BrokerUnreachable):
        found = None
    return {name: None if found is None else found.get(name, 0) for name in names}
