"""The daemon checks each connection against its store, and notices a broker that stops answering."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from delayer.broker.errors import BrokerRefused, BrokerUnreachable, TopologyFinding, TopologyMismatch
from delayer.broker.management_api import Management, Members
from delayer.config.model import Settings
from delayer.core.errors import StoreLost
from delayer.core.topology import Exchange, Queue
from delayer.daemon import drift, store_bond, wiring
from delayer.daemon.drift import DeclaredTopology, Seen
from delayer.daemon.store_bond import StoreBond, WrongBroker
from delayer.daemon.systemd import Notifier
from delayer.daemon.wiring import Daemon
from delayer.store.identity import StoreIdentity


class FakeConnection:
    blocked = ""

    def __init__(self, *exchanges: str) -> None:
        self.exchanges = {f"delayer.store.{name}" for name in exchanges}


class FakeAdmin:
    def __init__(self, connection: FakeConnection, _patience: float) -> None:
        self.connection = connection

    async def __aenter__(self) -> FakeAdmin:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def exchange_exists(self, name: str) -> bool:
        return name in self.connection.exchanges


class FakeStore:
    """Belongs to the broker with the exchange ``delayer.store.ours``, and gives its id when it is told to."""

    def __init__(self) -> None:
        self.identity = StoreIdentity("ours", True, 0)
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def read_identity(self) -> StoreIdentity:
        self.asked.set()
        await self.answers.wait()
        return self.identity

    async def give_broker(self, _declare: object) -> bool:
        return False


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_bond, "PipelinedAdmin", FakeAdmin)


async def attached(bond: Any, store: FakeStore) -> None:
    store.answers.set()
    await bond.attach(store, [])


async def test_a_store_that_hangs_does_not_block_connections_to_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_bond, "IDENTITY_SECONDS", 0.01)
    bond: Any = StoreBond()
    store = FakeStore()
    await attached(bond, store)
    store.answers.clear()
    await bond.check(FakeConnection("ours"))
    with pytest.raises(WrongBroker):
        await bond.check(FakeConnection("theirs"))


@pytest.mark.parametrize("ours", [True, False])
async def test_connections_that_open_while_a_store_is_attached_are_checked(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    monkeypatch.setattr(store_bond, "IDENTITY_SECONDS", 60.0)
    bond: Any = StoreBond()
    store = FakeStore()
    attaching = asyncio.create_task(bond.attach(store, [FakeConnection("ours" if ours else "theirs")]))
    await store.asked.wait()
    checking = asyncio.create_task(bond.check(FakeConnection("theirs")))
    store.answers.set()
    with pytest.raises(WrongBroker):
        await checking
    if ours:
        await attaching
    else:
        with pytest.raises(StoreLost):
            await attaching
        await bond.check(FakeConnection("theirs"))  # Without its store, the daemon accepts any broker.


def daemon(**tables: Any) -> Any:
    return Daemon(Settings.model_validate({"mode": "native", **tables}), Notifier({}))


async def test_the_topology_is_not_declared_on_another_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def admin(*_: object) -> AsyncIterator[FakeAdmin]:
        yield FakeAdmin(FakeConnection("theirs"), 1.0)

    monkeypatch.setattr(wiring, "pipelined_admin", admin)
    one = daemon()
    await attached(one._bond, FakeStore())
    with pytest.raises(WrongBroker):
        await one.declare()


class Round(FakeAdmin):
    """Scripted rounds: each gets one of ``answers`` to its declaration, and the last answer ends the rounds."""

    answers: list[str]
    stopping: asyncio.Event

    async def missing(self, _parts: object) -> list[Exchange | Queue]:
        return []

    async def declare(self, _wanted: object) -> None:
        answer = self.answers.pop(0)
        if not self.answers:
            self.stopping.set()
        if answer:
            raise BrokerUnreachable(answer)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> type[Round]:
    Round.stopping = asyncio.Event()
    monkeypatch.setattr(drift, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(drift, "PipelinedAdmin", Round)
    monkeypatch.setattr(drift, "why_silent", unasked)
    return Round


async def unasked(*_: object) -> str:
    return ""


def connect(one: Any, *connections: FakeConnection) -> None:
    for keeper, connection in zip(one.connections.values(), connections, strict=False):
        keeper.current = connection


async def watch(one: Any, rounds: type[Round]) -> None:
    await one.topology.watch(one._bond, one.connections, one.live, rounds.stopping)


SILENCE = "no answer within 30 s"


@pytest.mark.parametrize(
    ("answers", "ready"),
    [
        ([""], True), ([SILENCE], True), ([SILENCE, "", SILENCE], True), ([SILENCE, SILENCE], False),
        ([SILENCE, SILENCE, ""], True),
    ],
)  # fmt: skip
async def test_a_broker_that_stays_silent_makes_the_daemon_unready(
    rounds: type[Round], answers: list[str], ready: bool
) -> None:
    one = daemon()
    connect(one, FakeConnection())
    rounds.answers = [*answers]
    await watch(one, rounds)
    assert (not one.topology.reason) == ready
    assert ready or SILENCE in one.topology.reason


@pytest.mark.parametrize(("minorities", "reason"), [({"delays": "few"}, "few"), ({}, "hung"), (None, "hung")])
async def test_a_queue_without_a_majority_makes_the_daemon_unready(
    rounds: type[Round], monkeypatch: pytest.MonkeyPatch, minorities: Mapping[str, str] | None, reason: str
) -> None:
    topology, settings = DeclaredTopology(), Settings()
    rounds.answers = [""] * 3
    monkeypatch.setattr(drift, "why_silent", lambda *_: answered("hung"))
    for seen in (None, Seen(minorities=minorities), Seen(minorities=minorities)):
        await topology.keep(Round(FakeConnection(), 1.0), settings, seen)  # type: ignore[arg-type]
    assert topology.reason == f"the topology is not in place: {reason}"


async def answered(answer: str | None) -> str | None:
    return answer


@pytest.mark.parametrize(
    "found", [BrokerUnreachable("late"), TopologyMismatch([TopologyFinding("queue", "delays", "quorum", "classic")])]
)
async def test_a_queue_that_may_be_another_one_is_not_queried(
    rounds: type[Round], monkeypatch: pytest.MonkeyPatch, found: Exception
) -> None:
    """``basic.get`` takes a message from a queue that has no single active consumer."""

    async def declare(*_: object) -> None:
        raise found

    monkeypatch.setattr(rounds, "declare", declare)
    monkeypatch.setattr(drift, "why_silent", lambda *_: pytest.fail("the queue was queried"))
    with pytest.raises(type(found)):
        await DeclaredTopology().keep(Round(FakeConnection(), 1.0), Settings(), Seen())  # type: ignore[arg-type]


async def test_the_queues_of_others_do_not_make_the_daemon_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def members(_: object, names: list[str]) -> dict[str, Members]:
        assert "jobs" not in names
        return dict.fromkeys(("jobs", "others", "delays.refused"), Members(3, 1)) | {"delays": Members(3, 2)}

    async def bindings(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(Management, "members", members)

    monkeypatch.setattr(Management, "bindings", bindings)
    settings = {
        "mode": "native",
        "broker": {"management_url": "http://a"},
        "destination": [{"queue": "jobs", "exchange": "jobs"}],
    }
    seen = await DeclaredTopology().look(Settings.model_validate(settings))
    few = {"delays.refused": "queue 'delays.refused' has no majority: 1 of 3 members are online"}
    assert seen == Seen([], few)


async def test_a_management_api_that_is_away_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [BrokerUnreachable("slow"), BrokerUnreachable("slow"), None, BrokerRefused("401"), BrokerUnreachable("x")]

    async def members(*_: object) -> dict[str, Members]:
        if (answer := answers.pop(0)) is not None:
            raise answer
        return {}

    monkeypatch.setattr(Management, "members", members)
    topology, settings = (
        DeclaredTopology(),
        Settings.model_validate({"mode": "store", "broker": {"management_url": "http://a"}}),
    )
    with capture_logs() as logs:
        seen = [await topology.look(settings) for _ in range(5)]
    assert [one["reason"] for one in logs if one["event"] == "management api away"] == ["slow", "401", "x"]
    assert seen == [Seen(), Seen(), Seen(minorities={}), Seen(), Seen()]


async def test_every_connection_is_checked_in_a_round(rounds: type[Round]) -> None:
    one = daemon()
    await attached(one._bond, FakeStore())
    connect(one, FakeConnection("ours"), FakeConnection("ours"), FakeConnection("theirs"))
    dropped: list[str] = []

    def drop(reason: str) -> None:
        dropped.append(reason)
        rounds.stopping.set()

    for keeper in one.connections.values():
        keeper.current.drop = drop
    rounds.answers = [""]
    await watch(one, rounds)
    assert len(dropped) == 3 and "belongs to another broker" in dropped[0]


async def test_a_blocked_connection_is_not_asked(rounds: type[Round]) -> None:
    """The broker does not read it during a resource alarm, so it would not answer, and the round would end there."""
    one = daemon()
    await attached(one._bond, FakeStore())
    blocked = FakeConnection("theirs")
    blocked.blocked = "low on memory"
    connect(one, FakeConnection("ours"), FakeConnection("ours"), blocked)
    rounds.answers = [""]
    await watch(one, rounds)
    assert not rounds.answers, "the topology was declared"


async def test_a_missing_file_of_the_broker_url_does_not_end_the_rounds(rounds: type[Round], tmp_path: Path) -> None:
    """A secret is replaced at that moment. The open connection does not need it."""
    one = daemon(broker={"url": "amqps://localhost", "ca_file": str(tmp_path / "ca"), "management_url": "http://a"})
    connect(one, FakeConnection())
    rounds.answers = [""]
    await one.topology.keep(Round(FakeConnection(), 1.0), Settings())
    rounds.answers = ["", ""]
    rounds.stopping.clear()
    await watch(one, rounds)
    assert not rounds.answers
    assert not one.topology.reason
