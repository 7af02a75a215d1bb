"""SIGHUP without servers: keys that wait for a restart, and refused reloads. tests/acceptance/test_daemon_reload.py has
the successful reloads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from delayer.amqp.errors import BrokerLost
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.pipelined_admin import PipelinedAdmin
from delayer.config.loading import load
from delayer.config.model import Settings
from delayer.config.topology import cascade_of
from delayer.core.errors import StoreLost
from delayer.core.units import LATEST_MS
from delayer.daemon.app import Reload, changed, live_part
from delayer.daemon.live_settings import LiveSettings
from delayer.daemon.systemd import Notifier
from delayer.daemon.wiring import Daemon
from delayer.store.backlog import PostgresBacklog
from tests.support.fakes import ScriptedPublisher, until
from tests.support.logged import logging_as_it_was

STORE = {"url": "postgresql://localhost/one"}


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    with logging_as_it_was():
        yield


def settings(**tables: Any) -> Settings:
    return Settings.model_validate(tables)


class StubDaemon:
    """The parts of a daemon that a reload uses; ``failures`` by name make a part fail."""

    configured = usable = reached = True

    def __init__(self, now: Settings, **failures: Exception) -> None:
        self.settings = now
        self.store = self
        self._failures = failures
        self.routes: list[str] = []
        self.routes_when_declared: list[str] = []
        self.limited: list[tuple[set[bytes], Settings]] = []
        self.restart_needed: list[str] = []

    def _fail(self, where: str) -> None:
        if where in self._failures:
            raise self._failures[where]

    async def wait_usable(self, _seconds: float) -> None:
        self._fail("lanes")

    async def limit(self, routes: Collection[bytes]) -> None:
        self._fail("lanes")
        self.limited.append((set(routes), self.settings))

    async def declare(self, _wanted: Settings) -> None:
        self.routes_when_declared = self.routes
        self._fail("broker")

    @property
    def live(self) -> StubDaemon:
        return self

    def add_routes(self, wanted: Settings) -> None:
        self.routes = [route.from_ for route in wanted.routes]

    def adopt(self, wanted: Settings) -> None:
        self.settings = wanted


class Line(Notifier):
    """Records the messages to systemd."""

    def __init__(self) -> None:
        super().__init__({})
        self.said: list[str] = []

    def report(self, status: str = "") -> None:
        self.said.append(f"reloaded {status}")

    def reloading(self) -> None:
        self.said.append("reloading")


def reloading(daemon: StubDaemon, load: Callable[[], Settings]) -> tuple[Reload, Line]:
    line = Line()
    return Reload(cast(Daemon, daemon), load, line), line


@pytest.mark.parametrize(
    ("failures", "away"),
    [({"broker": BrokerLost("no answer")}, ["no answer"]), ({"lanes": StoreLost("no lane")}, ["no lane", "no lane"])],
    ids=str,
)
async def test_a_reload_is_in_force_although_something_is_out_of_reach(
    failures: dict[str, Exception], away: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon, stopping = StubDaemon(settings(mode="native", store=STORE), **failures), asyncio.Event()
    reload, line = reloading(daemon, lambda: settings(mode="store", store=STORE))
    reload.request()
    running = asyncio.create_task(reload.run(stopping))
    await until(lambda: len(line.said) == 2)
    stopping.set()
    await running
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["out_of_reach"] for one in told if one["event"] == "reloaded"] == [away]
    assert daemon.settings.mode == "store"
    assert line.said == ["reloading", "reloaded mode store"]


def test_the_url_of_a_file_needs_no_restart(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"

    def loaded(file: Path, content: str) -> Settings:
        file.write_text(content)
        path = tmp_path / "delayer.toml"
        path.write_text(f"[store]\nurl_file = {json.dumps(str(file))}\n")
        return load(path, {}, {})

    old = loaded(one, "postgresql://u:1@h/d")
    for new, keys in (
        (loaded(one, "postgresql://u:2@h/d"), []),
        (loaded(one, "postgresql://u:2@h/other"), ["store.url"]),
        (loaded(other, "postgresql://u:2@h/d"), ["store.url", "store.url_file"]),
    ):
        assert changed(live_part(old, new), new) == keys


@pytest.mark.parametrize("failures", [{"broker": BrokerRefused("no right")}, {"broker": TopologyMismatch([])}], ids=str)
async def test_a_refused_reload_does_not_change_the_settings(failures: dict[str, Exception]) -> None:
    daemon, stopping = StubDaemon(settings(mode="native", store=STORE), **failures), asyncio.Event()
    reload, line = reloading(daemon, lambda: settings(mode="store", store=STORE))
    reload.request()
    running = asyncio.create_task(reload.run(stopping))
    with capture_logs() as logs:
        await until(lambda: len(line.said) == 2)
    stopping.set()
    await running
    assert [one["event"] for one in logs] == ["reload refused"]
    assert daemon.settings.mode == "native"
    assert line.said[0] == "reloading"
    assert line.said[1].startswith("reloaded mode native; the last reload was refused: ")


async def test_a_new_route_is_known_before_its_binding_exists() -> None:
    """Otherwise what its exchange receives during the reload would be refused."""
    daemon, stopping = StubDaemon(settings(route=[{"from": "a"}])), asyncio.Event()
    reload, line = reloading(daemon, lambda: settings(route=[{"from": "a"}, {"from": "b"}]))
    reload.request()
    running = asyncio.create_task(reload.run(stopping))
    await until(lambda: len(line.said) == 2)
    stopping.set()
    await running
    assert daemon.routes_when_declared == ["a", "b"]


def test_added_routes_do_not_change_the_old_ones() -> None:
    old = settings(route=[{"from": "a", "default_delay": "1s"}])
    live = LiveSettings(old, cascade_of(old), ScriptedPublisher(), cast(PostgresBacklog, StubDaemon(old)))
    live.add_routes(settings(route=[{"from": "a", "default_delay": "2s"}, {"from": "b"}]))
    assert {name: route.default_delay_ms for name, route in live.policy().routes.items()} == {b"a": 1000, b"b": 0}
    live.adopt(old)
    assert set(live.policy().routes) == {b"a"}


def test_native_mode_says_whether_its_store_is_unreachable_or_not_configured() -> None:
    daemon = StubDaemon(now := settings(mode="native", store=STORE))
    live = LiveSettings(now, cascade_of(now), ScriptedPublisher(), cast(PostgresBacklog, daemon))
    assert live.policy().has_store
    daemon.usable = daemon.reached = False
    assert (live.policy().has_store, live.policy().no_store) == (False, "the store, which is unreachable")
    live = LiveSettings(
        now := settings(mode="native"), cascade_of(now), ScriptedPublisher(), cast(PostgresBacklog, daemon)
    )
    assert (live.policy().has_store, live.policy().no_store) == (False, "a store, but none is configured")


@pytest.mark.parametrize("reason", ["it is too old", ""])
async def test_a_probe_of_the_broker_during_a_reload_keeps_the_added_routes(reason: str) -> None:
    class Broker:
        async def why_no_delays(self, *_: object) -> str:
            return reason

    old, new = settings(mode="store", store=STORE), settings(mode="native", route=[{"from": "b"}])
    live = LiveSettings(old, cascade_of(old), ScriptedPublisher(), cast(PostgresBacklog, StubDaemon(old)))
    live.add_routes(new)
    await live.choose_strategy(cast(PipelinedAdmin, Broker()), new, 1)
    assert b"b" in live.policy().routes
    assert (live.policy().longest_native_ms == LATEST_MS) == (not reason)


async def test_a_limited_route_has_its_lane_before_its_limit_counts() -> None:
    old, stopping = settings(store=STORE), asyncio.Event()
    daemon = StubDaemon(old)
    route = {"from": "slow", "to": "out", "max_rate": 5}
    reload, line = reloading(daemon, lambda: settings(store=STORE, route=[route]))
    reload.request()
    running = asyncio.create_task(reload.run(stopping))
    await until(lambda: len(line.said) == 2)
    stopping.set()
    await running
    assert daemon.limited == [({b"slow"}, old)]
    assert daemon.settings.routes[0].max_rate == 5


async def test_native_mode_reloads_while_its_store_is_out_of_reach() -> None:
    native = settings(mode="native", store=STORE)
    reload, line = reloading(StubDaemon(native, lanes=StoreLost("no answer")), lambda: native)
    reload.request()
    running = asyncio.create_task(reload.run(stopping := asyncio.Event()))
    await until(lambda: line.said == ["reloading", "reloaded mode native"])
    stopping.set()
    await running


async def test_a_reload_whose_keys_all_need_a_restart_is_not_called_reloaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = settings(store={"url": "postgresql://localhost:1/out-of-reach"})
    daemon = StubDaemon(settings(store=STORE))
    reload, line = reloading(daemon, lambda: new)
    reload.request()
    running = asyncio.create_task(reload.run(stopping := asyncio.Event()))
    await until(lambda: len(line.said) == 2)
    stopping.set()
    await running
    told = [json.loads(one) for one in capsys.readouterr().err.splitlines()]
    said = [(one["event"], one["keys"], one["next_step"]) for one in told]
    assert said == [("restart needed", ["store.url"], "restart the daemon")]
    assert daemon.restart_needed == ["store.url"]


async def test_requests_during_a_reload_cause_one_more_reload() -> None:
    loads: list[int] = []

    def load() -> Settings:
        loads.append(1)
        if len(loads) == 1:
            reload.request()
            reload.request()
        return settings(mode="native")

    reload, line = reloading(StubDaemon(settings(mode="native")), load)
    stopping = asyncio.Event()
    reload.request()
    running = asyncio.create_task(reload.run(stopping))
    await until(lambda: len(line.said) == 4)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(loads) == 2
    stopping.set()
    await running


async def test_a_bug_is_not_swallowed() -> None:
    def load() -> Settings:
        raise ZeroDivisionError

    reload, _ = reloading(StubDaemon(settings()), load)
    reload.request()
    with pytest.raises(ZeroDivisionError):
        await reload.run(asyncio.Event())


def test_keys_that_need_a_restart_stay_as_they_are() -> None:
    old = settings(store=STORE)
    new = settings(
        store={"url": "postgresql://localhost/two", "lanes": 5, "park_beyond": "10s"},
        intake={"queue": "other", "max_delay": "1d"},
        broker={"url": "amqp://elsewhere/"},
    )
    wanted = live_part(old, new)
    assert wanted == settings(store=STORE | {"park_beyond": "10s"}, intake={"max_delay": "1d"})
    assert changed(wanted, new) == ["broker.url", "intake.queue", "store.url", "store.lanes"]
    assert live_part(new, new) == new


def test_keys_that_change_while_the_daemon_runs() -> None:
    new = settings(
        mode="native",
        route=[{"from": "x"}],
        destination=[{"queue": "q"}],
        intake={"max_delay": "1d"},
        store=STORE | {"park_beyond": "1h", "restore_ahead": "2d"},
        log={"level": "debug", "format": "console"},
        http={"tokens_file": "/tokens", "open": True},
    )
    old = settings(store=STORE)
    assert live_part(old, new) == new
    in_store = ["store.park_beyond", "store.restore_ahead"]
    others = ["http.open", "http.tokens_file", "log.format", "log.level"]
    assert changed(old, new) == ["mode", "intake.max_delay", "route", "destination", *in_store, *others]


def test_a_first_store_needs_no_restart() -> None:
    new = settings(mode="native", store=STORE | {"lanes": 5})
    assert live_part(settings(mode="native"), new) == new
