"""The little of RabbitMQ's management API that AMQP does not tell: bindings and policies. Read only, optional."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.core.topology import Binding


class Management:
    """``url``: ``http[s]://user:password@host:port``. Raises ValueError for another scheme or no host.

    Blocking HTTP in a thread: a few dozen requests in a command, not worth a dependency.
    """

    def __init__(self, url: str, vhost: str, *, timeout: float = 30.0, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("management_url: expected http://user:password@host:port, found something else")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.where = f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")
        self._base = self.where + parts.path.rstrip("/") + "/api"
        self._vhost = quote(vhost, safe="")
        self._timeout = timeout
        login = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._authorization = "Basic " + base64.b64encode(login.encode()).decode()
        # No proxy from the environment: the request carries a password, and brokers are near.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        )

    async def bindings_from(self, exchange: str) -> list[tuple[Binding, dict[str, Any]]]:
        """Every binding out of ``exchange`` with its arguments. Empty for an exchange that is missing."""
        rows = await self._get(f"exchanges/{self._vhost}/{quote(exchange, safe='')}/bindings/source") or []
        return [
            (Binding(row["source"], row["destination"], row["destination_type"], row["routing_key"]), row["arguments"])
            for row in rows
        ]

    async def policy_of(self, queue: str) -> dict[str, Any]:
        """What policies and operator policies say about ``queue`` together. Empty when nothing does."""
        row = await self._get(f"queues/{self._vhost}/{quote(queue, safe='')}")
        return dict((row or {}).get("effective_policy_definition") or {})

    async def _get(self, path: str) -> Any:
        """The decoded answer, None for 404. Raises BrokerRefused (401, 403) and BrokerUnreachable (anything else)."""
        return await asyncio.to_thread(self._get_blocking, path)

    def _get_blocking(self, path: str) -> Any:
        request = urllib.request.Request(f"{self._base}/{path}", headers={"Accept": "application/json"})
        request.add_unredirected_header("Authorization", self._authorization)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                if error.code in (401, 403):
                    raise BrokerRefused(f"{self.where}: the management API refused the user ({error.code})") from error
                raise BrokerUnreachable(f"{self.where}: the management API answered {error.code}") from error
        except OSError as error:
            raise BrokerUnreachable(f"{self.where}: {getattr(error, 'reason', error)}") from error
        except ValueError as error:
            raise BrokerUnreachable(f"{self.where}: this is not RabbitMQ's management API") from error
