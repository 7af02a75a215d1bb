"""A client that notes everything a broker says, for comparisons of brokers. It shares no code with delayer's client."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from pamqp import body, frame, header
from pamqp.base import Frame
from pamqp.commands import Basic, Channel, Confirm, Connection, Exchange, Queue

from tests.support.raw import Props

FRAME = 100_000
"""Bytes of a body in one frame."""
SECONDS = 15.0
"""How long a scene waits for something that a broker must do."""
_TIME = re.compile(rb"(\x04timeT).{8}", re.DOTALL)
_NOTHING = Props()


@dataclass(eq=False)
class _Told:
    """What the broker said on one channel, apart from answers."""

    answers: asyncio.Queue[Frame] = field(default_factory=asyncio.Queue)
    deliveries: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    tags: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    returns: list[tuple[Any, ...]] = field(default_factory=list)
    confirms: dict[int, bool] = field(default_factory=dict)
    published: int = 0
    got: tuple[Any, ...] = ()


class Scene:
    """One connection, whose channels open when they are used. ``transcript`` has what the broker said."""

    limited_url = ""
    """The URL of a user who may only use names that begin with "mine"."""

    def __init__(self, url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.transcript: list[Any] = []
        self.url = url
        self._reader, self._writer = reader, writer
        self._told: dict[int, _Told] = defaultdict(_Told)
        self._vhost = unquote(urlsplit(url).path[1:])
        self._news = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[Scene]:
        where = urlsplit(url)
        scene = cls(url, *await asyncio.open_connection(where.hostname, where.port))
        try:
            await scene._log_in(f"\0{where.username}\0{where.password}")
            yield scene
        finally:
            scene._listening.cancel()
            await asyncio.wait([scene._listening])
            scene._writer.close()

    async def _log_in(self, response: str) -> None:
        self._writer.write(header.ProtocolHeader(0, 9, 1).marshal())
        await self._told[0].answers.get()
        abilities = dict.fromkeys(("consumer_cancel_notify", "connection.blocked", "basic.nack"), True)
        self._send(0, Connection.StartOk({"capabilities": abilities}, "PLAIN", response, "en_US"))
        await self._told[0].answers.get()
        self._send(0, Connection.TuneOk(2047, 131072, 0))
        self._send(0, Connection.Open(self._vhost))
        await self._told[0].answers.get()

    # What the broker says.

    async def _listen(self) -> None:
        data, content = b"", {}
        while piece := await self._reader.read(1 << 16):
            data += piece
            while len(data) >= 8 and len(data) >= int.from_bytes(data[3:7], "big") + 8:
                size = int.from_bytes(data[3:7], "big") + 8
                self._hear(data[:size], content)
                data = data[size:]
            self._news.set()
        self._told[0].answers.put_nowait(Connection.Close(0, "the broker hung up", 0, 0))

    def _hear(self, whole: bytes, contents: dict[int, list[Any]]) -> None:
        kind, channel = whole[0], int.from_bytes(whole[1:3], "big")
        told = self._told[channel]
        if kind == 2:
            contents[channel] += [int.from_bytes(whole[11:19], "big"), whole[19:-1], b""]
        elif kind == 3:
            contents[channel][3] += whole[7:-1]
        elif kind == 1:
            method = frame.unmarshal(whole)[2]
            if isinstance(method, Basic.Deliver | Basic.Return | Basic.GetOk):
                contents[channel] = [method]
                return
            if isinstance(method, Basic.Ack | Basic.Nack):
                self._confirm(told, method)
            else:
                told.answers.put_nowait(method)
            return
        if kind in (2, 3) and len(contents[channel][3]) == contents[channel][1]:
            method, _, properties, text = contents.pop(channel)
            self._complete(told, method, (_TIME.sub(rb"\1", properties), text))

    def _complete(self, told: _Told, method: Any, message: tuple[bytes, bytes]) -> None:
        if isinstance(method, Basic.Return):
            told.returns.append((method.reply_code, method.reply_text, method.exchange, method.routing_key, *message))
            return
        entry = (method.redelivered, method.exchange, method.routing_key, *message)
        if isinstance(method, Basic.Deliver):
            told.deliveries[method.consumer_tag].append(entry)
            told.tags[method.consumer_tag].append(method.delivery_tag)
        else:
            told.got = entry
            told.answers.put_nowait(method)

    @staticmethod
    def _confirm(told: _Told, method: Basic.Ack | Basic.Nack) -> None:
        first = min((n for n in range(1, told.published + 1) if n not in told.confirms), default=1)
        for number in range(first if method.multiple else method.delivery_tag, method.delivery_tag + 1):
            told.confirms.setdefault(number, isinstance(method, Basic.Ack))

    async def _until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not done():
                self._news.clear()
                await self._news.wait()

    # What a scene does.

    def _send(self, channel: int, *frames: Any) -> None:
        self._writer.write(b"".join(frame.marshal(one, channel) for one in frames))

    async def ask(self, method: Frame, channel: int = 1) -> Frame:
        """Send a method and note the answer. A close of the channel or the connection is an answer too."""
        if channel and channel not in self._told:
            self._send(channel, Channel.Open())
            await self._told[channel].answers.get()
        self._send(channel, method)
        return await self.hear(channel)

    async def hear(self, channel: int = 1) -> Frame:
        """Wait for the next answer, and note it."""
        told = self._told[channel]
        waits = [asyncio.ensure_future(self._told[one].answers.get()) for one in {channel, 0}]
        done, left = await asyncio.wait(waits, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in left:
            wait.cancel()
        assert done, f"no answer on channel {channel}; so far {self.transcript}"
        answer = done.pop().result()
        fields = {name: getattr(answer, name) for name in type(answer).__slots__}
        fields.pop("class_id", None), fields.pop("method_id", None), fields.pop("delivery_tag", None)
        texts = {name: self._anonymous(value) for name, value in fields.items()}
        self.transcript.append((answer.name, texts, told.got if isinstance(answer, Basic.GetOk) else ()))
        if isinstance(answer, Channel.Close):
            self._send(channel, Channel.CloseOk())
            del self._told[channel]
        return answer

    def _anonymous(self, value: Any) -> Any:
        return value.replace(self._vhost, "VHOST") if isinstance(value, str) else value

    async def queue(self, name: str, kind: str = "quorum", **arguments: Any) -> None:
        named = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        await self.ask(Queue.Declare(queue=name, durable=True, arguments={"x-queue-type": kind, **named}))

    async def exchange(self, name: str, kind: str = "direct", **arguments: Any) -> None:
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        await self.ask(Exchange.Declare(exchange=name, exchange_type=kind, durable=True, arguments=named))

    async def bind(self, queue: str, exchange: str, key: str = "", **arguments: Any) -> None:
        named = {one.replace("_", "-"): value for one, value in arguments.items()}
        await self.ask(Queue.Bind(queue=queue, exchange=exchange, routing_key=key, arguments=named))

    async def count(self, queue: str, messages: int | None = None, consumers: int | None = None) -> None:
        """Note the counts of a queue, once it has so many messages and consumers."""
        async with asyncio.timeout(SECONDS):
            while True:
                answer = await self.ask(Queue.Declare(queue=queue, passive=True))
                found = getattr(answer, "message_count", messages), getattr(answer, "consumer_count", consumers)
                if messages in (None, found[0]) and consumers in (None, found[1]):
                    return
                self.transcript.pop()
                await asyncio.sleep(0.02)

    async def confirming(self, channel: int = 1) -> None:
        await self.ask(Confirm.Select(), channel)

    def publish(
        self, key: str, text: bytes, props: Props = _NOTHING, *, exchange: str = "", mandatory: bool = False,
        channel: int = 1,
    ) -> None:  # fmt: skip
        self._told[channel].published += 1
        properties = props.encode()
        head = b"\0\x3c\0\0" + len(text).to_bytes(8, "big") + properties
        whole = b"\x02" + channel.to_bytes(2, "big") + len(head).to_bytes(4, "big") + head + b"\xce"
        self._send(channel, Basic.Publish(0, exchange, key, mandatory))
        self._writer.write(whole)
        for at in range(0, len(text), FRAME):
            self._send(channel, body.ContentBody(text[at : at + FRAME]))

    async def confirmed(self, channel: int = 1) -> None:
        """Wait for all confirms, and note them and the returns."""
        told = self._told[channel]
        await self._until(lambda: len(told.confirms) >= told.published)
        self.transcript.append(("confirms", sorted(told.confirms.items()), told.returns[:]))

    async def sent(self, key: str, *texts: bytes, props: Props = _NOTHING, exchange: str = "") -> None:
        """Publish in confirm mode, and wait for the confirms."""
        await self.confirming()
        for text in texts:
            self.publish(key, text, props, exchange=exchange)
        await self.confirmed()

    async def consume(self, queue: str, tag: str, prefetch: int = 0, channel: int = 1, **arguments: Any) -> None:
        await self.ask(Basic.Qos(0, prefetch), channel)
        named = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        await self.ask(Basic.Consume(queue=queue, consumer_tag=tag, arguments=named), channel)

    async def take(self, tag: str, count: int, channel: int = 1) -> list[int]:
        """Wait for so many more deliveries, and note them. Returns their tags."""
        told = self._told[channel]
        await self._until(lambda: len(told.deliveries[tag]) >= count)
        found, told.deliveries[tag] = told.deliveries[tag], []
        tags, told.tags[tag] = told.tags[tag], []
        self.transcript.append((tag, found))
        return tags

    def ack(self, tag: int, *, multiple: bool = False, channel: int = 1) -> None:
        self._send(channel, Basic.Ack(tag, multiple))

    def nack(self, tag: int, *, multiple: bool = False, requeue: bool = True, channel: int = 1) -> None:
        self._send(channel, Basic.Nack(tag, multiple, requeue))

    def reject(self, tag: int, *, requeue: bool = True, channel: int = 1) -> None:
        self._send(channel, Basic.Reject(tag, requeue))

    async def close_channel(self, channel: int) -> None:
        await self.ask(Channel.Close(200, "", 0, 0), channel)
        del self._told[channel]

    async def get(self, queue: str, *, no_ack: bool = True) -> int:
        answer = await self.ask(Basic.Get(queue=queue, no_ack=no_ack))
        return getattr(answer, "delivery_tag", 0)


KINDS: Final = ("quorum", "classic")
SCENES: Final[list[Callable[[Scene], Awaitable[None]]]] = []


def scene(play: Callable[[Scene], Awaitable[None]]) -> Callable[[Scene], Awaitable[None]]:
    SCENES.append(play)
    return play
