"""What goes by a connection of its own, over a broker that is played. tests/conformance asks a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from delayer.broker import apart as module
from delayer.broker import relay as relay_module
from delayer.broker.apart import ENDED, LATE, NOT_TRIED, Apart, Lone, ends_connections
from delayer.broker.relay import Relay
from delayer.core.message import CONFIRMED, NACKED, ClosedConnection, Outcome, Outgoing, Unanswered
from delayer.wire.address import Address
from delayer.wire.errors import AccessRefused, ConfirmTimeout, ConnectionLost
from tests.rig.fakes import until

POISON = ConnectionLost(541, "INTERNAL_ERROR")
OBJECTION = ClosedConnection(541, "INTERNAL_ERROR")
GONE = ConnectionLost(0, "the broker hung up")


class Channel:
    """Takes all but those whose bodies are in ``answers``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def confirm_select(self) -> None: ...

    def abandon(self) -> None:
        self._connection.channels -= 1

    async def publish(self, batch: Sequence[Outgoing], *, timeout: float) -> list[Outcome]:
        self._connection.published.append([one.body for one in batch])
        for one in batch:
            answer = self._connection.answers.get(one.body)
            if isinstance(answer, ConnectionLost):
                self._connection.closed.set_result(answer)
            if answer is not None:
                raise answer
        return [CONFIRMED] * len(batch)


class Connection:
    def __init__(self, answers: dict[bytes, Exception]) -> None:
        self.closed: asyncio.Future[ConnectionLost] = asyncio.get_running_loop().create_future()
        self.answers = answers
        self.published: list[list[bytes]] = []
        self.channels = 0
        self.abandoned = False

    async def channel(self) -> Channel:
        self.channels += 1
        return Channel(self)

    def abandon(self) -> None:
        self.abandoned = True

    async def close(self) -> None:
        self.abandon()


class Broker:
    """In the place of a relay. ``refusals``: instead of connections, by the number of the attempt."""

    def __init__(
        self, answers: dict[bytes, Exception] | None = None, refusals: dict[int, ConnectionLost] | None = None
    ) -> None:
        self._answers = answers or {}
        self._refusals = refusals or {}
        self.attempts = 0
        self.connections: list[Connection] = []
        self.given_back: list[Connection] = []

    async def another(self, timeout: float) -> Connection:
        self.attempts += 1
        if (refusal := self._refusals.get(self.attempts)) is not None:
            raise refusal
        if self.given_back:
            return self.given_back.pop()
        self.connections.append(Connection(self._answers))
        return self.connections[-1]

    def give_back(self, connection: Connection) -> None:
        assert connection.channels == 0
        self.given_back.append(connection)

    @property
    def published(self) -> list[list[bytes]]:
        return [some for connection in self.connections for some in connection.published]


def apart_at(broker: Broker) -> Apart:
    relay: Any = broker
    return Apart(relay)


def reply(body: bytes) -> Outgoing:
    return Outgoing(b"", b"amq.rabbitmq.reply-to.x", b"\0\0", body, body)


def ender(body: bytes) -> Outgoing:
    return Outgoing(b"", b"q", b"\0\0", body, body, isolated=True)


async def first(broker: Broker, *batch: Outgoing, seconds: float = 8.0) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    await apart_at(broker).first(batch, outcomes, asyncio.get_running_loop().time() + seconds)
    return outcomes


def late() -> ConnectionLost:
    lost = ConnectionLost(0, "no connection within 3 s")
    lost.__cause__ = TimeoutError()
    return lost


async def test_others_need_no_connection() -> None:
    broker = Broker()
    assert await first(broker, Outgoing(b"", b"q", b"\0\0", b"", b"1"), Outgoing(b"x", b"k", b"\0\0", b"", b"2")) == {}
    assert broker.attempts == 0


async def test_direct_replies_go_at_once_and_the_connection_is_kept() -> None:
    broker = Broker()
    for _ in range(2):
        assert await first(broker, reply(b"a"), reply(b"b"), reply(b"c")) == dict.fromkeys(range(3), CONFIRMED)
    assert broker.published == [[b"a", b"b", b"c"]] * 2
    assert len(broker.connections) == 1


async def test_one_that_ends_the_connection_does_not_stop_the_other_replies() -> None:
    broker = Broker({b"b": POISON})
    assert await first(broker, reply(b"a"), reply(b"b"), reply(b"c")) == {0: CONFIRMED, 1: OBJECTION, 2: CONFIRMED}
    assert broker.published == [[b"a", b"b", b"c"], [b"a"], [b"b"], [b"c"]]


async def test_replies_that_all_end_connections_are_bounded() -> None:
    broker = Broker({b"%d" % n: POISON for n in range(50)})
    outcomes = await first(broker, *(reply(b"%d" % n) for n in range(50)))
    assert outcomes == dict.fromkeys(range(50), OBJECTION)
    assert len(broker.connections) == ENDED + 1


async def test_replies_of_one_token_do_not_go_at_once() -> None:
    broker = Broker()
    assert await first(broker, reply(b"a"), reply(b"a"), reply(b"b")) == dict.fromkeys(range(3), CONFIRMED)
    assert sorted(broker.published) == [[b"a"], [b"a", b"b"]]


async def test_what_is_answered_of_the_replies_is_known() -> None:
    timeout = ConfirmTimeout(0, "1 confirms were missing")
    timeout.outcomes = [CONFIRMED, None]
    broker = Broker({b"b": timeout})
    assert await first(broker, reply(b"a"), reply(b"b")) == {0: CONFIRMED, 1: NACKED}
    assert broker.connections[0].abandoned


async def test_each_that_ends_connections_has_one_of_its_own() -> None:
    broker = Broker({b"1": POISON, b"2": POISON})
    outcomes = await first(broker, ender(b"1"), ender(b"2"), ender(b"fine by now"))
    assert outcomes == {0: OBJECTION, 1: OBJECTION, 2: CONFIRMED}
    assert len(broker.connections) == 3
    assert broker.given_back == broker.connections[-1:]


@pytest.mark.parametrize("refusal", [AccessRefused(530, "connection limit is reached"), late(), GONE])
async def test_without_a_connection_they_are_held_untried(refusal: ConnectionLost) -> None:
    outcomes = await first(Broker(refusals={1: refusal}), ender(b"1"), reply(b"2"))
    assert outcomes == {0: NOT_TRIED, 1: NACKED}
    assert ends_connections(NOT_TRIED)
    assert await first(Broker(), ender(b"1"), seconds=0.0) == {0: NOT_TRIED}


async def test_the_others_are_held_untried_when_there_is_no_second_connection() -> None:
    broker = Broker({b"1": POISON}, {2: AccessRefused(530, "limit")})
    assert await first(broker, ender(b"1"), ender(b"2")) == {0: OBJECTION, 1: NOT_TRIED}


@pytest.mark.parametrize("lost", [GONE, ConfirmTimeout(0, "1 confirms were missing")])
async def test_one_without_an_answer_is_perhaps_out(lost: Exception) -> None:
    broker = Broker({b"1": lost})
    assert await first(broker, ender(b"1"), ender(b"2")) == {0: Unanswered(module.BRIEFLY, b"", b"q"), 1: NOT_TRIED}
    assert broker.given_back == []


async def test_what_is_known_is_not_repeated() -> None:
    broker = Broker()
    outcomes: dict[int, Outcome] = {0: CONFIRMED}
    await apart_at(broker).first([ender(b"1")], outcomes, asyncio.get_running_loop().time() + 8)
    assert broker.attempts == 0


@pytest.mark.parametrize("refusal", [AccessRefused(530, "connection limit is reached"), GONE])
async def test_the_others_connection_is_used_where_the_broker_refuses_another(refusal: ConnectionLost) -> None:
    it = apart_at(Broker(refusals={1: refusal}))
    assert await it.open(asyncio.get_running_loop().time() + 8) is None


async def test_it_is_not_used_for_want_of_time() -> None:
    """But in the end: nobody is stopped for good where a second connection never comes about."""
    loop = asyncio.get_running_loop()
    it = apart_at(Broker(refusals={n: late() for n in range(1, 20)}))
    for seconds in (0.0, 0.1, 1.0, 1.0, 1.0, *[8.0] * (LATE - 1)):
        with pytest.raises(TimeoutError):
            await it.open(loop.time() + seconds)
    assert await it.open(loop.time() + 8) is None


async def test_once_there_is_one_the_count_begins_anew() -> None:
    loop = asyncio.get_running_loop()
    it = apart_at(Broker(refusals={n: late() for n in (1, 2, 4, 5)}))
    for n in range(1, 6):
        if n == 3:
            assert isinstance(await it.open(loop.time() + 8), Lone)
        else:
            with pytest.raises(TimeoutError):
                await it.open(loop.time() + 8)


class Asked:
    """What the relay asks of the connections that it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timeouts: list[float | None] = []
        monkeypatch.setattr(relay_module.Connection, "open", self._open)

    async def _open(self, address: Address, *, name: str, heartbeat: float, timeout: float = 10.0) -> Any:
        self.timeouts.append(address.timeout)
        return Connection({})


@pytest.mark.parametrize(
    "query, seconds", [("", 3.0), ("?connection_timeout=60000", 3.0), ("?connection_timeout=500", 0.5)]
)
async def test_the_url_does_not_make_others_wait_for_longer(
    monkeypatch: pytest.MonkeyPatch, query: str, seconds: float
) -> None:
    asked = Asked(monkeypatch)
    relay = Relay(Address.parse(f"amqp://localhost/{query}"), "relay test", heartbeat=20)
    await relay.another(3.0)
    assert asked.timeouts == [seconds]


async def test_a_connection_is_kept_for_some_seconds_and_not_beyond_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    monkeypatch.setattr(relay_module, "IDLE", 0.05)
    relay = Relay(Address.parse("amqp://localhost/"), "relay test", heartbeat=20)
    never: Any = Connection({})
    relay.give_back(never)
    assert never.abandoned  # it is not started: nobody would close it
    hang: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(relay, "_keep", lambda: _forever(hang))
    relay.start()
    one: Any = await relay.another(3.0)
    relay.give_back(one)
    assert await relay.another(3.0) is one
    other: Any = await relay.another(3.0)
    relay.give_back(one)
    relay.give_back(other)
    assert (one.abandoned, other.abandoned) == (False, True)
    await until(lambda: one.abandoned)
    dead: Any = await relay.another(3.0)
    relay.give_back(dead)
    dead.closed.set_result(POISON)
    last: Any = await relay.another(3.0)
    assert last is not dead
    relay.give_back(last)
    await relay.close()
    assert last.abandoned
    assert len(asked.timeouts) == 4


async def _forever(hang: asyncio.Future[None]) -> None:
    await hang
