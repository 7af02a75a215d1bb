"""One client's connection: its bytes go to a backend of the real Postgres, one request at a time, and the backend's
answer returns. Between arrival and execution passes simulated time; the execution itself takes none."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import TYPE_CHECKING, Final

from tests.simulation.store import standby
from tests.simulation.store.process import connect, is_readable
from tests.simulation.store.standby import Role

if TYPE_CHECKING:
    from tests.simulation.store.server import SimulatedStore

ENCRYPTION_REQUESTS: Final = (80_877_103, 80_877_104)
CANCEL_REQUEST: Final = 80_877_102
_POLL_SECONDS: Final = 0.005
_NOTIFICATION_SECONDS: Final = 0.2
"""Real time: how long a backend may take to pass a notification on."""
_DEADLOCK_SECONDS: Final = 1.0
_QUERY_CANCELED, _DEADLOCK, _NO_LOCK = b"57014", b"40P01", b"55P03"
_SHUTDOWN, _IDLE, _IDLE_IN_TRANSACTION = b"57P01", b"57P05", b"25P03"
_SET = re.compile(rb"SET (LOCAL )?(\w+_timeout) = '?(\d+)(ms|s|min)?'?")
_LISTEN = re.compile(rb'(UN)?LISTEN "?([^"\0]+)')
_INBOX = re.compile(rb"delayer_(send|cancel)\(")
_IN_MS = {b"": 1, b"ms": 1, b"s": 1_000, b"min": 60_000}
_ANSWERED: Final = b"123TnCsI"
"""The last message of the answer to each message before a Flush."""


class Session(asyncio.Protocol):
    """``status``: as in ReadyForQuery: idle, in a transaction, or in a failed one."""

    def __init__(self, server: SimulatedStore, host: str) -> None:
        self.host = host
        self.pid = 0
        self.status = b""
        self.application = ""
        self.running = False
        """The backend has a request that it has not answered."""
        self._server = server
        self._loop = server.loop
        self._socket = None
        self._input, self._request, self._answer = b"", b"", b""
        self._requests: deque[tuple[bytes, int]] = deque()
        self._owed = 0
        self._read = 0
        self._waits_for_turn: asyncio.TimerHandle | None = None
        self._statements: dict[bytes, bytes] = {}
        self._listens: set[bytes] = set()
        self._told = b""
        self._timeouts: dict[bytes, int] = {}
        self._local_timeouts: dict[bytes, int] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._is_left = self._is_standby = False
        self.connected = False
        """It never is if the server stops listening while it accepts this connection."""

    # The client's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.connected = True
        self._server.sessions.append(self)

    def connection_lost(self, _: BaseException | None) -> None:
        """The server executes what it read before it sees the end, and it may not have read the last request."""
        self._is_left = True
        if self.running:
            return
        if self._waits_for_turn is not None and not self._server.chance(2):
            self._waits_for_turn.cancel()
            self._waits_for_turn = None
        if self._waits_for_turn is None:
            self.leave()

    def data_received(self, data: bytes) -> None:
        self._input += data
        while self._take_message():
            pass
        self._begin_next()

    def _take_message(self) -> bool:
        if self._socket is None:
            return self._take_first_message()
        size = int.from_bytes(self._input[1:5])
        if len(self._input) < 5 or len(self._input) < 1 + size:
            return False
        message, self._input = self._input[: 1 + size], self._input[1 + size :]
        kind = message[:1]
        self._request += message
        if kind in b"PBDEC":
            self._owed += 1
        elif kind in b"QSHcfX":
            self._requests.append((self._request, self._owed if kind == b"H" else 0))
            self._request, self._owed = b"", 0
        return True

    def _take_first_message(self) -> bool:
        size = int.from_bytes(self._input[:4])
        if len(self._input) < 8 or len(self._input) < size:
            return False
        message, self._input = self._input[:size], self._input[size:]
        code = int.from_bytes(message[4:8])
        if code in ENCRYPTION_REQUESTS:
            self._transport.write(b"N")
        elif code == CANCEL_REQUEST:
            self._server.cancel(int.from_bytes(message[8:12]))
            self._transport.close()
        elif (role := self._server.roles[self.host]) not in {Role.PRIMARY, Role.STANDBY}:
            self._transport.write(standby.STARTING)
            self._transport.close()
        else:
            self._is_standby = role is Role.STANDBY
            fields = message[8:].split(b"\0")
            self.application = dict(zip(fields[::2], fields[1::2], strict=False)).get(b"application_name", b"").decode()
            self._socket = connect(self._server.address)
            self._requests.append((standby.begun(message) if self._is_standby else message, 0))
        return True

    # The backend's side.

    def _begin_next(self) -> None:
        if self._requests and not self.running and self._waits_for_turn is None and not self._server.frozen:
            self._forget_timers()
            self._waits_for_turn = self._loop.call_later(self._server.pace(), self._execute)

    def resume(self) -> None:
        """The server works again."""
        self._begin_next()

    def _execute(self) -> None:
        self._waits_for_turn = None
        if self._server.frozen:
            return
        request, self._owed_now = self._requests.popleft()
        if request[:1] == b"X":
            self._transport.close()
            self.leave()
            return
        self._notice(request)
        self.running = True
        self._answer, self._read = b"", 0
        self._server.set_clock()
        self._socket.sendall(standby.asked(request) if self._is_standby else request)
        if self.advance():
            self._server.settle()

    def _notice(self, request: bytes) -> None:
        """Note what the simulation must know of a request: timeouts, channels, and notifications."""
        if self.status == b"":
            return
        while request:
            kind, size = request[:1], int.from_bytes(request[1:5])
            body, request = request[5 : 1 + size], request[1 + size :]
            if kind == b"Q":
                self._notice_text(body, body)
            elif kind == b"P":
                name, text, *_ = body.split(b"\0", 2)
                self._statements[name] = text
            elif kind == b"B":
                _, name, rest = body.split(b"\0", 2)
                self._notice_text(self._statements.get(name, b""), rest)

    def _notice_text(self, text: bytes, values: bytes) -> None:
        if b"pg_notify" in text:
            self._told += values
        elif _INBOX.search(text):
            self._told += b"delayer_inbox"
        if b"_timeout" in text:
            for local, name, number, unit in _SET.findall(text):
                kept = self._local_timeouts if local else self._timeouts
                kept[name] = int(number) * _IN_MS[unit]
        if found := _LISTEN.match(text):
            (self._listens.discard if found[1] else self._listens.add)(found[2])
        self._server.terminates |= b"pg_terminate_backend" in text

    def advance(self) -> bool:
        """Read the answer to the running request. Whether it is complete; otherwise the backend waits for a lock."""
        while not self._is_complete():
            if is_readable(self._socket, _POLL_SECONDS):
                if not self._receive():
                    self.lose_backend()
                    return True
            elif self._server.is_blocked(self.pid):
                self._block()
                return False
        self._end_request()
        return True

    def _receive(self) -> bool:
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionError:
            return False
        self._answer += data
        return bool(data)

    def _is_complete(self) -> bool:
        answer, at = self._answer, self._read
        while len(answer) >= at + 5 and len(answer) > at + (size := int.from_bytes(answer[at + 1 : at + 5])):
            kind = answer[at : at + 1]
            if kind == b"K":
                self.pid = int.from_bytes(answer[at + 5 : at + 9])
            elif kind == b"Z":
                self.status = answer[at + 5 : at + 6]
            self._owed_now -= kind in _ANSWERED
            at += 1 + size
            if kind in b"ZGW" or (self._owed_now == 0 and kind in _ANSWERED) or (self._owed_now > 0 and kind == b"E"):
                self._read = at
                return True
        self._read = at
        return False

    def _end_request(self, code: bytes = b"") -> None:
        self.running = False
        self._forget_timers()
        if self in self._server.waiting:
            self._server.waiting.remove(self)
        answer = self._answer.replace(b"C" + _QUERY_CANCELED + b"\0", b"C" + code + b"\0") if code else self._answer
        self._transport.write(standby.answered(answer) if self._is_standby else answer)
        if self.status not in {b"T", b"E"}:
            self._local_timeouts.clear()
            told, self._told = self._told, b""
            if told:
                self._server.notify(self, told)
        if self._server.terminates:
            self._server.terminates = False
            self._server.reap(answer)
        if self._is_left:
            self.leave()
        else:
            self._watch_idleness()
            self._begin_next()

    def hear(self, told: bytes) -> None:
        """Pass on the notification that the backend now gets, if it listens."""
        idle = not self.running and self.status == b"I"
        if idle and any(name in told for name in self._listens) and is_readable(self._socket, _NOTIFICATION_SECONDS):
            self._answer = b""
            if self._receive():
                self._transport.write(self._answer)

    # Waiting, and its ends.

    def _block(self) -> None:
        if self in self._server.waiting:
            return
        self._server.waiting.append(self)
        limits = {**self._timeouts, **self._local_timeouts}
        for name, code in ((b"lock_timeout", _NO_LOCK), (b"statement_timeout", _QUERY_CANCELED)):
            if limit := limits.get(name):
                self._timers.append(self._loop.call_later(limit / 1000, self.cancel, code))
        self._timers.append(self._loop.call_later(_DEADLOCK_SECONDS, self._look_for_deadlock))

    def _look_for_deadlock(self) -> None:
        if self._server.is_deadlocked(self.pid):
            self.cancel(_DEADLOCK)

    def cancel(self, code: bytes = _QUERY_CANCELED) -> None:
        """Cancel the statement that waits."""
        self._server.control.query(f"SELECT pg_cancel_backend({self.pid})")
        while not self._is_complete():
            if not self._receive():
                self.lose_backend()
                return
        self._end_request(code)
        self._server.settle()

    def _watch_idleness(self) -> None:
        in_transaction = self.status != b"I"
        name = b"idle_in_transaction_session_timeout" if in_transaction else b"idle_session_timeout"
        limit = self._local_timeouts.get(name, self._timeouts.get(name))
        if limit and not self._requests:
            code = _IDLE_IN_TRANSACTION if in_transaction else _IDLE
            self._timers.append(self._loop.call_later(limit / 1000, self._end_idle, code))

    def _end_idle(self, code: bytes) -> None:
        if self._server.frozen:
            self._watch_idleness()
        else:
            self.terminate(code)

    def _forget_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    # The end.

    def terminate(self, code: bytes = _SHUTDOWN) -> None:
        """End the session as an administrator or a timeout does: the client gets a reason, once it has a backend."""
        if not self.pid:
            self._transport.close()
            self.leave()
            return
        self._server.end_backends([self.pid])
        self.running, self._answer = False, b""
        while self._receive():
            pass
        self._transport.write(self._answer.replace(b"C" + _SHUTDOWN + b"\0", b"C" + code + b"\0"))
        self.lose_backend()

    def lose_backend(self) -> None:
        """The backend is gone, perhaps with last words."""
        if self._answer and self.running:
            self._transport.write(self._answer)
        self._transport.close()
        self._is_left = True
        self.leave()

    def cut(self) -> None:
        """The connection breaks without a goodbye."""
        self._transport.abort()

    def leave(self) -> None:
        """End the backend, and what it holds."""
        self._forget_timers()
        if self._waits_for_turn is not None:
            self._waits_for_turn.cancel()
        if self in self._server.waiting:
            self._server.waiting.remove(self)
        if self in self._server.sessions:
            self._server.sessions.remove(self)
        if self._socket is not None:
            self._socket.close()
            self._server.until_gone([self.pid])
            self._server.settle()
