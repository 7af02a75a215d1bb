"""A plain HTTP client for the daemon's pages: one request, one answer, no redirects and no cookies."""

from __future__ import annotations

import asyncio
import http.client
import json
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemon import DaemonProcess

TIMEOUT = 20.0
_DIRECTORY = tempfile.TemporaryDirectory(prefix="delayer-tokens-")
_numbers = count()


def tokens_file(*lines: str) -> str:
    """The path of a new file with these tokens. A line of one word is a token of the role act, called ops."""
    path = Path(_DIRECTORY.name) / str(next(_numbers))
    path.write_text("".join(f"{line if ' ' in line else f'ops act {line}'}\n" for line in lines))
    return str(path)


class Answer(NamedTuple):
    """Header names in lower case; repeated headers are joined with ", "."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Name and labels of every sample, as Prometheus reads it."""
    return {
        (one.name, *(f"{name}={value}" for name, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


class Web:
    """Speaks to ``host:port``."""

    def __init__(self, address: str) -> None:
        self.address = address

    @classmethod
    async def of(cls, daemon: DaemonProcess, *, after: int = 0) -> Web:
        """A client of a daemon that listens at a port of the system's choice; waits until it listens."""
        return cls((await daemon.event("http served", after=after))["addresses"][0])

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, headers=headers)

    async def post(self, path: str, form: Mapping[str, str | list[str]] | None = None, **headers: str) -> Answer:
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return await self.ask("POST", path, urlencode(form or {}, doseq=True).encode(), kind | headers)

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        return await asyncio.to_thread(self._ask, method, path, body, headers or {})

    async def metrics(self) -> dict[tuple[str, ...], float]:
        answer = await self.get("/metrics")
        assert answer.status == 200, answer.text
        return samples(answer.text)

    def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            found: dict[str, str] = {}
            for name, value in answer.getheaders():
                low = name.lower()
                found[low] = f"{found[low]}, {value}" if low in found else value
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()
