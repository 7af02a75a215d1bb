"""The broker by itself: a plain blocking socket, frames built beforehand, and as little parsing as possible.

No client on this machine can beat these rates; everything else is compared with them. The load on the daemon is
generated the same way, because generator and daemon share the cores.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from urllib.parse import unquote, urlsplit

from bench.figures import Sample

METHOD, HEADER, BODY = 1, 2, 3
FRAME_MAX = 131_072
WINDOW = 4000
"""Unconfirmed publishes in flight, and the prefetch of the consumer."""
PORTION = 250
"""Messages that go out in one write."""
ACK, NACK = (60, 80), (60, 120)
CLOSED = (b"\x00\x0a\x00\x32", b"\x00\x14\x00\x28")
"""connection.close and channel.close: the broker objects to something."""
PERSISTENT_WITH_HEADERS = 0x3000


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def short(text: str) -> bytes:
    raw = text.encode()
    return bytes((len(raw),)) + raw


def method(channel: int, class_id: int, method_id: int, arguments: bytes = b"") -> bytes:
    return frame(METHOD, channel, struct.pack(">HH", class_id, method_id) + arguments)


def table(**entries: str) -> bytes:
    """A field table of strings; underscores in names become dashes."""
    content = b"".join(
        short(name.replace("_", "-")) + b"S" + struct.pack(">I", len(text)) + text.encode()
        for name, text in entries.items()
    )
    return struct.pack(">I", len(content)) + content


def number(name: str, value: int) -> bytes:
    """A header: a 64-bit integer."""
    return short(name) + b"l" + value.to_bytes(8, "big", signed=True)


def properties(headers: bytes) -> bytes:
    """The properties of a persistent message with these headers (encoded entries)."""
    return struct.pack(">HI", PERSISTENT_WITH_HEADERS, len(headers)) + headers + b"\x02"


def message(exchange: str, key: str, props: bytes, body: bytes) -> bytes:
    """The frames of a mandatory publish."""
    publish = method(1, 60, 40, b"\0\0" + short(exchange) + short(key) + b"\x01")
    header = frame(HEADER, 1, struct.pack(">HHQ", 60, 0, len(body)) + props)
    piece = FRAME_MAX - 8
    return publish + header + b"".join(frame(BODY, 1, body[at : at + piece]) for at in range(0, len(body), piece))


def portions(messages: Sequence[bytes], size: int = PORTION) -> list[bytes]:
    """Messages joined into writes of ``size``; a last incomplete write is left out."""
    return [b"".join(messages[at : at + size]) for at in range(0, len(messages) - size + 1, size)]


class Plain:
    """One connection with one channel."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._at = 0
        self._published = 0
        self.socket.sendall(b"AMQP\x00\x00\x09\x01")
        self.wait(10, 10)
        login = f"\0{unquote(parts.username or 'guest')}\0{unquote(parts.password or 'guest')}".encode()
        answer = table() + short("PLAIN") + struct.pack(">I", len(login)) + login + short("C")
        self.call(method(0, 10, 11, answer), 10, 30)
        self.socket.sendall(method(0, 10, 31, struct.pack(">HIH", 2047, FRAME_MAX, 0)))
        self.call(method(0, 10, 40, short(unquote(parts.path[1:]) or "/") + short("") + b"\0"), 10, 41)
        self.call(method(1, 20, 10, short("")), 20, 11)

    def close(self) -> None:
        self.socket.close()

    # ---- talking

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield kind and payload of each frame, forever. The next call continues after this call's last frame."""
        while True:
            buffer, at = self._buffer, self._at
            while len(buffer) - at >= 8:
                kind, _, size = struct.unpack_from(">BHI", buffer, at)
                if len(buffer) - at < size + 8:
                    break
                payload = bytes(buffer[at + 7 : at + 7 + size])
                self._at = at = at + size + 8
                if kind == METHOD and payload[:4] in CLOSED:
                    raise ConnectionError(f"the broker closed: {payload[6:].decode('utf-8', 'replace')}")
                yield kind, payload
            del buffer[:at]
            self._at = 0
            data = self.socket.recv(1 << 18)
            if not data:
                raise EOFError("the broker closed the connection")
            buffer += data

    def wait(self, class_id: int, method_id: int) -> bytes:
        """The arguments of the next such method; earlier frames are dropped."""
        for kind, payload in self.frames():
            if kind == METHOD and struct.unpack_from(">HH", payload) == (class_id, method_id):
                return payload[4:]
        raise EOFError

    def call(self, data: bytes, class_id: int, method_id: int) -> bytes:
        self.socket.sendall(data)
        return self.wait(class_id, method_id)

    # ---- topology

    def exchange(self, name: str, kind: str = "topic", **more: str) -> None:
        self.call(method(1, 40, 10, b"\0\0" + short(name) + short(kind) + b"\x02" + table(**more)), 40, 11)

    def fresh_queue(self, name: str, kind: str = "quorum", bind: str = "", key: str = "#") -> None:
        """Declare the queue, deleting an old one first. ``bind``: an exchange that routes all messages to it, or those
        with ``key``."""
        self.call(method(1, 50, 40, b"\0\0" + short(name) + b"\0"), 50, 41)
        self.call(method(1, 50, 10, b"\0\0" + short(name) + b"\x02" + table(x_queue_type=kind)), 50, 11)
        if bind:
            self.call(method(1, 50, 20, b"\0\0" + short(name) + short(bind) + short(key) + b"\0" + table()), 50, 21)

    def depth(self, name: str) -> int:
        """Messages of a queue that are ready."""
        answer = self.call(method(1, 50, 10, b"\0\0" + short(name) + b"\x01" + table()), 50, 11)
        return int(struct.unpack_from(">I", answer, 1 + answer[0])[0])

    def purge(self, name: str) -> None:
        self.call(method(1, 50, 30, b"\0\0" + short(name) + b"\0"), 50, 31)

    # ---- rates

    def publish(self, writes: Sequence[bytes], count: int, each: int = PORTION, window: int = WINDOW) -> list[Sample]:
        """Publish ``count`` messages, ``each`` per write, cycling through ``writes``. Returns samples of confirms."""
        if not self._published:
            self.call(method(1, 85, 10, b"\0"), 85, 11)
        before = self._published
        self._published += count
        source, frames = cycle(writes), self.frames()
        sent = confirmed = 0
        samples = [(time.perf_counter(), 0.0)]
        while confirmed < count:
            while sent < count and sent - confirmed < window:
                self.socket.sendall(next(source))
                sent += each
            kind, payload = next(frames)
            if kind != METHOD:
                continue
            what = struct.unpack_from(">HH", payload)
            if what == NACK:
                raise RuntimeError("a publish was nacked")
            if what == ACK:
                tag, multiple = struct.unpack_from(">QB", payload, 4)
                confirmed = tag - before if multiple else max(confirmed, tag - before)
                samples.append((time.perf_counter(), float(confirmed)))
        return samples

    def consume_from(self, queue: str, prefetch: int = WINDOW) -> None:
        self.call(method(1, 60, 10, struct.pack(">IHB", 0, prefetch, 0)), 60, 11)
        self.socket.sendall(method(1, 60, 20, b"\0\0" + short(queue) + short("") + b"\0" + table()))

    def acknowledge(self, tag: int) -> None:
        """This delivery and all before it."""
        self.socket.sendall(method(1, 60, 80, struct.pack(">QB", tag, 1)))

    def consume(self, queue: str, count: int) -> list[Sample]:
        """Consume ``count`` messages of one body frame each, acknowledged in thousands."""
        self.consume_from(queue)
        received = 0
        samples = [(time.perf_counter(), 0.0)]
        for kind, _ in self.frames():
            if kind == BODY:
                received += 1
                if received % 1000 == 0:
                    self.acknowledge(received)
                    samples.append((time.perf_counter(), float(received)))
                    if received >= count:
                        break
        return samples
