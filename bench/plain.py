"""The broker by itself: a plain blocking socket, frames built beforehand, nothing parsed that need not be.

What these rates say is what no client can beat on this machine; everything else is compared with them.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

METHOD, HEADER, BODY = 1, 2, 3
WINDOW = 4000
"""Unconfirmed publishes in flight, and the prefetch of the consumer."""


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def short(text: str) -> bytes:
    raw = text.encode()
    return bytes((len(raw),)) + raw


def method(channel: int, class_id: int, method_id: int, arguments: bytes = b"") -> bytes:
    return frame(METHOD, channel, struct.pack(">HH", class_id, method_id) + arguments)


def publish_frames(exchange: str, key: str, headers: bytes, body: bytes) -> bytes:
    """A persistent, mandatory publish. ``headers``: encoded table entries."""
    properties = struct.pack(">HI", 0x3000, len(headers)) + headers + b"\x02"
    header = struct.pack(">HHQ", 60, 0, len(body)) + properties
    publish = method(1, 60, 40, b"\0\0" + short(exchange) + short(key) + b"\x01")
    return publish + frame(HEADER, 1, header) + frame(BODY, 1, body)


class Plain:
    """One connection with one channel."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self.send(b"AMQP\x00\x00\x09\x01")
        self.wait(10, 10)
        login = f"\0{unquote(parts.username or 'guest')}\0{unquote(parts.password or 'guest')}".encode()
        self.send(
            method(
                0, 10, 11, struct.pack(">I", 0) + short("PLAIN") + struct.pack(">I", len(login)) + login + short("C")
            )
        )
        self.wait(10, 30)
        self.send(method(0, 10, 31, struct.pack(">HIH", 2047, 131072, 0)))
        self.send(method(0, 10, 40, short(unquote(parts.path[1:]) or "/") + short("") + b"\0"))
        self.wait(10, 41)
        self.send(method(1, 20, 10, short("")))
        self.wait(20, 11)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        while True:
            start = 0
            while len(self._buffer) - start >= 8:
                kind, _, size = struct.unpack_from(">BHI", self._buffer, start)
                if len(self._buffer) - start < size + 8:
                    break
                yield kind, bytes(self._buffer[start + 7 : start + 7 + size])
                start += size + 8
            del self._buffer[:start]
            data = self._socket.recv(1 << 18)
            if not data:
                raise EOFError("the broker closed the connection")
            self._buffer += data

    def wait(self, class_id: int, method_id: int) -> None:
        for kind, payload in self.frames():
            if kind == METHOD and struct.unpack_from(">HH", payload) == (class_id, method_id):
                return

    def publish(self, message: bytes, count: int) -> float:
        """Publish ``message`` ``count`` times, at most WINDOW unconfirmed; the confirmed rate, messages a second."""
        self.send(method(1, 85, 10, b"\0"))
        self.wait(85, 11)
        many = message * 500
        sent = confirmed = 0
        started = time.perf_counter()
        frames = self.frames()
        while confirmed < count:
            while sent < count and sent - confirmed < WINDOW:
                portion = min(500, count - sent)
                self.send(many if portion == 500 else message * portion)
                sent += portion
            kind, payload = next(frames)
            if kind == METHOD and payload[:4] == b"\x00\x3c\x00\x50":
                tag, multiple = struct.unpack_from(">QB", payload, 4)
                confirmed = tag if multiple else max(confirmed, tag)
        return count / (time.perf_counter() - started)

    def consume(self, queue: str, count: int) -> float:
        """Consume ``count`` messages, acknowledged by the thousand; messages a second."""
        self.send(method(1, 60, 10, struct.pack(">IHB", 0, WINDOW, 0)))
        self.wait(60, 11)
        self.send(method(1, 60, 20, b"\0\0" + short(queue) + short("") + b"\0" + struct.pack(">I", 0)))
        received = 0
        started = time.perf_counter()
        for kind, _ in self.frames():
            if kind == BODY:
                received += 1
                if received % 1000 == 0:
                    self.send(method(1, 60, 80, struct.pack(">QB", received, 1)))
                if received >= count:
                    break
        return count / (time.perf_counter() - started)

    def close(self) -> None:
        self._socket.close()
