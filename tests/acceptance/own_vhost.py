"""A vhost for one daemon of a test's own, and its configuration as a file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.acceptance.world import Things, secret_broker_url
from tests.support.daemon import DaemonProcess
from tests.support.raw import Inbox, Message, Props, Raw, number, text
from tests.support.servers import RabbitMQ

ROUTES = ({"from": "in", "to": "out"}, {"from": "in.queue", "to": ""}, {"from": "in.missing", "to": "missing"})


@dataclass
class OwnVhost:
    """Exchange ``out``, with queue ``inbox`` bound to it."""

    rabbitmq: RabbitMQ
    vhost: str
    things: Things
    url: str

    @classmethod
    def furnished(cls, rabbitmq: RabbitMQ, vhost: str) -> Self:
        things = Things(rabbitmq, vhost)
        things.exchange("out")
        things.queue("inbox")
        things.bind("out", "inbox")
        return cls(rabbitmq, vhost, things, secret_broker_url(rabbitmq, vhost))

    async def raw(self) -> Raw:
        """A connection as guest."""
        return await Raw.connect(self.rabbitmq.url(self.vhost))

    @asynccontextmanager
    async def working(
        self, environ: Mapping[str, str] | None = None, **how: Any
    ) -> AsyncIterator[tuple[DaemonProcess, Raw, Inbox]]:
        """A ready daemon, a connection as guest, and the arrivals at ``inbox``. ``how``: see DaemonProcess."""
        async with DaemonProcess(environ or {}, **how) as daemon, await self.raw() as raw:
            inbox = await raw.inbox("inbox")
            yield await daemon.ready(), raw, inbox

    def environ(self, mode: str, store_url: str = "") -> dict[str, str]:
        found = {"MODE": mode, "BROKER__URL": self.url, "ROUTE": json.dumps(ROUTES)}
        return found | ({"STORE__URL": store_url} if store_url else {})

    def write(self, path: Path, mode: str, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the configuration file: broker, routes and these ``sections``."""
        lines = [f"mode = {json.dumps(mode)}"]
        for section, table in {"broker": {"url": self.url}, **sections}.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
        for route in ROUTES:
            lines += ["[[route]]", *(f"{key} = {json.dumps(value)}" for key, value in route.items())]
        path.write_text("\n".join(lines) + "\n")


def delayed(body: str, milliseconds: int, *, through: str = "in", key: str = "inbox", under: str = "") -> Message:
    """``under``: its x-delay-key."""
    keys = ((b"x-delay-key", text(under)),) if under else ()
    props = Props(headers=((b"x-delay", number("I", milliseconds)), *keys), delivery_mode=2)
    return Message(through, key.encode(), props, body.encode())


def cancel(key: str, reply_to: bytes = b"answers") -> Message:
    headers = ((b"x-delay-cancel", text(key)),)
    return Message(
        "in", b"inbox", Props(headers=headers, reply_to=reply_to, correlation_id=key.encode(), delivery_mode=2), b""
    )


def unreadable(body: str) -> Message:
    props = Props(headers=((b"x-delay", text("soon")),), message_id=body.encode(), delivery_mode=2)
    return Message("in", b"inbox", props, body.encode())
