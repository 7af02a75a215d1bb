"""A ledger whose messages are sent over HTTP, alone and as lines. Each request has an Idempotency-Key, and is repeated
until it is answered with 202."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any, Final

from delayer.amqp.values import Outgoing
from tests.support.ledger import PAUSE, Ledger
from tests.support.letters import Form
from tests.support.sql_ledger import SqlLetters, encoded
from tests.support.web import Answer, Web, tokens_file

TOKEN: Final = "a-token-of-the-ledger"
SHAPES: Final[Sequence[dict[str, Any]]] = (
    {}, {"trace": "größe", "app": "orders"}, {"small": 5, "large": -(2**60), "yes": True}, {"double": 0.1, "b": 300},
)  # fmt: skip


class HttpLetters(SqlLetters):
    """Letters with the headers that HTTP takes, in their order."""

    def form(self, _number: int, _absolute: bool | None) -> Form:
        return Form.HTTP

    def headers(self, number: int) -> dict[str, Any]:
        return SHAPES[number % len(SHAPES)]

    def entries(self, headers: dict[str, Any]) -> list[tuple[bytes, bytes]]:
        return [(name.encode(), encoded(headers[name])) for name in headers]


class HttpLedger(Ledger):
    """``addresses``: where daemons serve HTTP now. ``answers``: the statuses so far; 0: no answer came. A 503 of the
    broker excuses a copy, as docs/http.md says; a lost answer does not."""

    _letters: HttpLetters

    def __init__(self, url: str, chance: Any, **names: Any) -> None:
        super().__init__(url, chance, **names)
        self._letters = HttpLetters(chance.getrandbits(64))
        self.addresses: Callable[[], Sequence[str]] = list
        self.answers: Counter[int] = Counter()
        self._requests = 0

    @staticmethod
    def environ() -> dict[str, str]:
        """The configuration of the daemons."""
        return {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKENS_FILE": tokens_file(f"ledger publish {TOKEN}")}

    def _fields(self, message: Outgoing) -> dict[str, Any]:
        number = int(message.token)
        more = {
            "content_type": "application/x-ledger",
            "priority": 4,
            "correlation_id": "correlated",
            "app_id": "ledger",
        }
        return {
            "exchange": self._into.decode(), "routing_key": message.routing_key.decode(),
            "due": self.account.owed(number).due_ms, "headers": self._letters.headers(number),
            "body_b64": base64.b64encode(message.body).decode(), "message_id": f"id-{number}",
            **({**more, "app_id": "ledger"} if number % 2 else {}),
        }  # fmt: skip

    async def _confirmed(self, batch: Sequence[Outgoing]) -> None:
        await asyncio.gather(*(self._send(part) for part in (batch[:1], batch[1:]) if part))

    async def _send(self, part: Sequence[Outgoing]) -> None:
        """Send a message, or several as lines, until the answer is 202."""
        kind = "application/json" if len(part) == 1 else "application/x-ndjson"
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind, "Idempotency-Key": part[0].token.decode()}
        content = "\n".join(json.dumps(self._fields(one)) for one in part).encode()
        while True:
            self.note_attempt(part)
            answer = await self._ask(content, headers)
            self.answers[answer.status if answer else 0] += 1
            if answer is not None and answer.status == 202:
                return
            if answer is not None and answer.status == 503 and "broker" in answer.json["detail"]:
                self.account.published_twice.update(int(one.token) for one in part)
            # 408: a daemon that hung, and then found the body too slow.
            assert answer is None or answer.status in (408, 409, 503), answer.text
            await asyncio.sleep(PAUSE)

    async def _ask(self, content: bytes, headers: dict[str, str]) -> Answer | None:
        """One attempt, at each daemon in turn. None: no answer came."""
        addresses, self._requests = [one for one in self.addresses() if one], self._requests + 1
        if not addresses:
            return None
        try:
            web = Web(addresses[self._requests % len(addresses)])
            return await web.ask("POST", "/api/messages", content, headers)
        except (OSError, HTTPException):
            return None
