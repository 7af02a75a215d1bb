"""SIGHUP: what changes live, what waits for a restart, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from delayer.broker.errors import TopologyMismatch
from delayer.config import ConfigError, Settings
from delayer.core.errors import BrokerLost, StoreLost
from delayer.daemon import app as module
from delayer.daemon.app import Reload, live_part
from delayer.daemon.systemd import Notifier
from delayer.daemon.wiring import Daemon
from delayer.store.errors import BadStoreUrl, SchemaOutdated
from tests.support.fakes import until

STORE = {"url": "postgresql://localhost/one"}


def settings(**tables: Any) -> Settings:
    return Settings.model_validate(tables)


class Lanes:
    def __init__(self, lanes: object) -> None:
        self.configured = lanes is not None
        self.failure: Exception | None = None

    async def wait_usable(self, seconds: float) -> None:
        if self.failure is not None:
            raise self.failure


class StubDaemon:
    """What a reload needs of the daemon."""

    def __init__(self, now: Settings, lanes: object) -> None:
        self.settings = now
        self.lanes = Lanes(lanes)
        self.declared: list[Settings] = []
        self.adopted: list[Settings] = []
        self.started: list[Settings] = []
        self.failure: Exception | None = None

    async def declare(self, wanted: Settings) -> None:
        if self.failure is not None:
            raise self.failure
        self.declared.append(wanted)

    def start_lanes(self, wanted: Settings) -> None:
        self.started.append(wanted)
        self.lanes.configured = True

    def adopt(self, wanted: Settings) -> None:
        self.settings = wanted
        self.adopted.append(wanted)


class Line(Notifier):
    """What systemd heard."""

    def __init__(self) -> None:
        super().__init__({})
        self.said: list[str] = []

    def ready(self, status: str = "") -> None:
        self.said.append(f"ready {status}")

    def reloading(self) -> None:
        self.said.append("reloading")


class Connects:
    """In the place of PostgresStore."""

    failure: Exception | None = None
    urls: list[str]

    @classmethod
    async def connect(cls, url: str) -> Connects:
        if cls.failure is not None:
            raise cls.failure
        cls.urls.append(url)
        return cls()

    async def close(self) -> None:
        """Nothing was opened."""


@pytest.fixture(autouse=True)
def connects(monkeypatch: pytest.MonkeyPatch) -> type[Connects]:
    monkeypatch.setattr(Connects, "failure", None)
    monkeypatch.setattr(Connects, "urls", [], raising=False)
    monkeypatch.setattr(module, "PostgresStore", Connects)
    # The set-up of the logs would outlive the test.
    monkeypatch.setattr(module.logs, "configure", lambda *_: None)
    return Connects


class Scene:
    def __init__(self, now: Settings, load: Callable[[], Settings], lanes: object) -> None:
        self.daemon = StubDaemon(now, lanes)
        self.line = Line()
        self.reload = Reload(cast(Daemon, self.daemon), load, self.line)
        self.stopping = asyncio.Event()
        self.task = asyncio.create_task(self.reload.run(self.stopping))

    async def once(self) -> list[dict[str, Any]]:
        """One reload; what it logged."""
        done = len(self.line.said) + 2
        with capture_logs() as logs:
            self.reload.request()
            await until(lambda: len(self.line.said) >= done)
        return cast(list[dict[str, Any]], logs)


@asynccontextmanager
async def scene(
    now: Settings, new: Settings | Callable[[], Settings], *, lanes: object = "lanes"
) -> AsyncIterator[Scene]:
    made = Scene(now, new if callable(new) else lambda: new, lanes)
    yield made
    made.stopping.set()
    await made.task


def events(logs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["event"]: one for one in logs}


async def test_live_keys() -> None:
    old = settings(store=STORE)
    new = settings(
        mode="native",
        store=STORE | {"park_beyond": "10s", "restore_ahead": "2d"},
        intake={"max_delay": "1d"},
        route=[{"from": "a", "to": "b"}],
        log={"level": "debug"},
    )
    async with scene(old, new) as it:
        said = events(await it.once())
        assert it.daemon.settings == new
        assert it.daemon.declared == [new]
        assert it.daemon.started == []
        in_store = {"store.park_beyond", "store.restore_ahead"}
        assert set(said["reloaded"]["keys"]) == {"mode", "intake.max_delay", "route", "log.level"} | in_store
        assert (said["mode switched"]["before"], said["mode switched"]["now"]) == ("store", "native")
        assert "restart needed" not in said
        assert it.line.said == ["reloading", "ready mode native"]


async def test_keys_that_need_a_restart() -> None:
    old = settings(store=STORE)
    new = settings(
        store={"url": "postgresql://localhost/two", "lanes": 5, "park_beyond": "10s"},
        intake={"queue": "other", "max_delay": "1d"},
        broker={"url": "amqp://elsewhere/"},
    )
    async with scene(old, new) as it:
        said = events(await it.once())
        wanted = settings(store=STORE | {"park_beyond": "10s"}, intake={"max_delay": "1d"})
        assert it.daemon.settings == wanted
        assert set(said["restart needed"]["keys"]) == {"store.url", "store.lanes", "intake.queue", "broker.url"}
        assert set(said["reloaded"]["keys"]) == {"store.park_beyond", "intake.max_delay"}
        assert "mode switched" not in said
        assert "elsewhere" not in str(said)


async def test_a_first_store(connects: type[Connects]) -> None:
    """Nothing is held anywhere yet, so all of [store] may change, and is tried before lanes are started."""
    old = settings(mode="native")
    new = settings(mode="store", store=STORE | {"lanes": 3})
    async with scene(old, new, lanes=None) as it:
        said = events(await it.once())
        assert connects.urls == [STORE["url"]]
        assert it.daemon.started == [new]
        assert it.daemon.settings == new
        assert "restart needed" not in said


def wrong() -> Settings:
    raise ConfigError([])


@pytest.mark.parametrize(
    ("where", "failure"),
    [
        ("load", None),
        ("declare", BrokerLost("unreachable")),
        ("declare", TopologyMismatch([])),
        ("connect", StoreLost("out of reach")),
        ("connect", SchemaOutdated("1", "2")),
        ("connect", BadStoreUrl("unreadable")),
    ],
)
async def test_a_reload_that_is_refused_changes_nothing(
    where: str, failure: Exception | None, connects: type[Connects], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = settings(mode="native")
    new = settings(mode="store", store=STORE)
    async with scene(old, wrong if where == "load" else new, lanes=None) as it:
        if where == "declare":
            it.daemon.failure = failure
        elif where == "connect":
            monkeypatch.setattr(connects, "failure", failure)
        logs = await it.once()
        assert [one["event"] for one in logs] == ["reload refused"]
        assert it.daemon.settings == old
        assert it.daemon.adopted == []
        assert it.daemon.started == []
        begun, told = it.line.said
        assert begun == "reloading"
        # systemd waits for it in any case
        assert told.startswith("ready mode native; the last reload was refused: ")
        assert told.endswith(str(logs[0]["reason"]) or ("ConfigError" if where == "load" else "TopologyMismatch"))


async def test_a_switch_to_a_store_that_is_out_of_reach_is_refused() -> None:
    old = settings(mode="native", store=STORE)
    async with scene(old, settings(mode="store", store=STORE)) as it:
        it.daemon.lanes.failure = StoreLost("no lane")
        assert [one["event"] for one in await it.once()] == ["reload refused"]
        assert it.daemon.settings == old


async def test_requests_that_come_meanwhile_are_one_more() -> None:
    loads: list[int] = []

    def load() -> Settings:
        loads.append(1)
        if len(loads) == 1:
            it.reload.request()
            it.reload.request()
        return settings()

    async with scene(settings(), load) as it:
        it.reload.request()
        it.reload.request()
        await until(lambda: len(it.line.said) == 4)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(loads) == 2


async def test_a_bug_is_not_swallowed() -> None:
    def load() -> Settings:
        raise ZeroDivisionError

    it = Scene(settings(), load, "lanes")
    it.reload.request()
    with pytest.raises(ZeroDivisionError):
        await it.task


def test_the_live_part_of_the_same_settings_is_those_settings() -> None:
    given = settings(mode="native", store=STORE)
    for first in (True, False):
        assert live_part(given, given, first_store=first) == given
