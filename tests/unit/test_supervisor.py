"""The supervisor with scripted places: what it makes of what its workers say, and what it tells systemd."""

from __future__ import annotations

import signal
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from delayer.daemon import FAREWELL
from delayer.ops.notify import FEEDS, Notifier
from delayer.services import lifecycle
from delayer.settings import ConfigError, Settings
from delayer.supervisor import service as service_module
from delayer.supervisor import worker
from delayer.supervisor.agreement import Disagreement
from delayer.supervisor.seat import Seat
from delayer.supervisor.service import ABSENT, FIRST_WORD, GRACE, LIMIT, RELOAD, Supervisor

STARTED, READY, RELOADING = {"WATCHDOG": "1"}, {"READY": "1", "STATUS": "mode store"}, {"RELOADING": "1"}


class Line(Notifier):
    """What systemd heard."""

    def __init__(self, interval: float | None = None) -> None:
        super().__init__({})
        self._interval = interval
        self.said: list[str] = []

    @property
    def watchdog_interval(self) -> float | None:
        return self._interval

    def _send(self, state: str, status: str = "") -> None:
        word = state.partition("\n")[0]
        self.said.append(": ".join(filter(None, [word, status if word != "WATCHDOG=1" else ""])))

    def since(self) -> list[str]:
        said, self.said = self.said, []
        return said


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Crew:
    """A supervisor of two, whose processes are numbers."""

    def __init__(self, line: Line, clock: Clock) -> None:
        self.line, self.clock = line, clock
        self.mistake: ConfigError | None = None
        self.file: dict[str, Any] = {}
        self.signals: list[tuple[int, int]] = []
        self.it = Supervisor(Settings.model_validate({"workers": 2}), self.load, line)
        for state in self.it._states:
            self.it._seats[state.number] = cast(Seat, self.Place(self, state.number))

    class Place:
        def __init__(self, crew: Crew, number: int) -> None:
            self.crew, self.number = crew, number

        def signal(self, signum: int) -> None:
            self.crew.signals.append((self.number, signum))

    def load(self) -> Settings:
        if self.mistake is not None:
            raise self.mistake
        return Settings.model_validate({"workers": 2, **self.file})

    def begin(self, number: int) -> None:
        state = self.it._states[number - 1]
        state.began(number)
        self.it.began(state)

    def end(self, number: int) -> None:
        state = self.it._states[number - 1]
        state.ended()
        self.it.ended(state)

    def hear(self, number: int, *words: dict[str, str]) -> None:
        for word in words:
            self.it._heard(number, word)

    def all_ready(self) -> None:
        for number in (1, 2):
            self.begin(number)
            self.hear(number, STARTED, READY)
        self.line.since()

    def look(self, after: float) -> None:
        """``after`` seconds after the last time, every second of them."""
        while after > 0:
            self.clock.now += min(1.0, after)
            after -= 1.0
            self.it._look(self.clock.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(service_module, "time", clock)
    monkeypatch.setattr(service_module.telemetry, "configure", lambda *_: None)
    return clock


def test_ready_when_all_are_and_said_once(clock: Clock) -> None:
    crew = Crew(Line(), clock)
    crew.begin(1)
    crew.begin(2)
    crew.hear(2, STARTED, READY)
    crew.hear(99, READY)  # a stranger
    assert crew.line.since() == [
        "0 of 2 workers ready: waiting for 1, 2",
        "1 of 2 workers ready: mode store; waiting for 1",
    ]
    crew.hear(1, STARTED, READY, STARTED)
    assert crew.line.since() == ["READY=1: 2 workers ready: mode store"]
    crew.end(1)
    crew.begin(1)
    crew.hear(1, STARTED, READY)
    assert crew.line.since() == ["1 of 2 workers ready: mode store; waiting for 1", "2 workers ready: mode store"]


def test_a_word_that_was_lost_is_made_up_for_by_the_next(clock: Clock) -> None:
    """A worker's words of life repeat that it is ready (tests/unit/test_notify.py)."""
    crew = Crew(Line(), clock)
    crew.begin(1)
    crew.hear(1, STARTED, READY)
    crew.hear(2, STARTED, READY)  # before it is known that it runs
    assert crew.line.since()[-1].endswith("waiting for 2")
    crew.begin(2)
    crew.hear(2, STARTED | READY)
    assert crew.line.since()[-1] == "READY=1: 2 workers ready: mode store"


def test_proven_by_the_first_that_is_ready(clock: Clock) -> None:
    crew = Crew(Line(), clock)
    crew.begin(1)
    crew.hear(1, STARTED)
    assert not crew.it.proven
    crew.hear(1, READY)
    crew.end(1)
    assert crew.it.proven


def test_a_successor_that_would_differ_is_not_started_while_another_worker_lives(clock: Clock) -> None:
    crew = Crew(Line(), clock)
    crew.it.check()
    crew.all_ready()
    crew.end(1)
    crew.file = {"broker": {"url": "amqp://elsewhere/"}}
    with pytest.raises(Disagreement, match=r"restart.*broker\.url"):
        crew.it.check()
    crew.end(2)
    crew.it.check()  # nobody lives: as good as a restart
    crew.begin(1)
    crew.it.check()
    crew.file = {}
    with pytest.raises(Disagreement):
        crew.it.check()


def test_a_stop_takes_no_longer_than_ten_seconds() -> None:
    """A worker's own longest way out ends before it is killed, and what follows the killing before ten seconds."""
    ends = 0.5
    """Seconds for an interpreter to end, or a killed process to be gone."""
    worst = lifecycle.GRACE + lifecycle.CUT_OFF + FAREWELL
    assert worst + ends <= GRACE
    assert GRACE + lifecycle.CUT_OFF + ends <= 10.0
    assert worst + ends <= worker.ORPHANED <= 10.0


def test_a_reload_ends_when_all_have_read(clock: Clock) -> None:
    crew = Crew(Line(), clock)
    crew.all_ready()
    crew.it.reload()
    crew.it.reload()  # one more, after this one
    assert crew.signals == [(1, signal.SIGHUP), (2, signal.SIGHUP)]
    crew.hear(1, RELOADING, READY | {"STATUS": "mode native"})
    crew.hear(2, RELOADING)
    assert crew.line.since() == ["RELOADING=1", "2 workers ready: mode native (1); mode store (2)"]
    crew.hear(2, READY | {"STATUS": "mode native"})
    assert crew.line.since() == ["READY=1: 2 workers ready: mode native", "RELOADING=1"]
    assert len(crew.signals) == 4
    crew.hear(1, RELOADING, READY)
    crew.end(2)  # it owes nothing any more
    assert crew.line.since()[-1] == "READY=1: 1 of 2 workers ready: mode store; waiting for 2"


def test_a_reload_of_a_bad_file_bothers_nobody(clock: Clock) -> None:
    crew = Crew(Line(), clock)
    crew.all_ready()
    crew.mistake = ConfigError([])
    with capture_logs() as logs:
        crew.it.reload()
    assert [one["event"] for one in logs] == ["reload refused"]
    assert crew.signals == []
    assert crew.line.since() == ["RELOADING=1", "READY=1: 2 workers ready: mode store"]


def test_a_reload_during_the_start_is_not_the_end_of_the_start(clock: Clock) -> None:
    crew = Crew(Line(), clock)
    crew.begin(1)
    crew.begin(2)
    crew.hear(1, STARTED)
    crew.it.reload()
    assert crew.signals == [(1, signal.SIGHUP)]
    crew.hear(2, STARTED)
    assert crew.signals == [(1, signal.SIGHUP), (2, signal.SIGHUP)]
    for number in (1, 2):
        crew.hear(number, RELOADING, READY)
    assert not [word for word in crew.line.since() if "=1" in word]
    crew.hear(1, READY)
    crew.hear(2, READY)
    assert crew.line.since()[-1].startswith("READY=1")


def test_a_reload_that_gets_no_answer_ends_too(clock: Clock) -> None:
    crew = Crew(Line(), clock)
    crew.all_ready()
    crew.it.reload()
    crew.hear(1, RELOADING, READY)
    with capture_logs() as logs:
        for _ in range(int(RELOAD) // 20):
            assert logs == []
            crew.hear(1, STARTED)
            crew.hear(2, STARTED)
            crew.look(20.0)
    assert [(one["event"], one["workers"]) for one in logs] == [("reload unanswered", [2])]
    assert crew.line.since()[-1] == "READY=1: 2 workers ready: mode store"


def test_who_is_silent_is_killed_once_and_systemd_hears_nothing_meanwhile(clock: Clock) -> None:
    crew = Crew(Line(interval=6.0 / FEEDS), clock)
    crew.all_ready()
    crew.look(2.0)
    crew.look(2.0)
    assert crew.line.since() == ["WATCHDOG=1", "WATCHDOG=1"]
    crew.hear(1, STARTED)
    crew.hear(2, {"STATUS": "mode store"})  # a word, but not the one that counts
    with capture_logs() as logs:
        crew.look(2.0)
        assert crew.line.since() == ["WATCHDOG=1"]
        crew.look(0.5)
        crew.look(2.5)
    assert [(one["event"], one["worker"]) for one in logs] == [("worker silent", 2)]
    assert crew.signals == [(2, signal.SIGKILL)]
    assert crew.line.since() == []
    crew.end(2)
    crew.look(0.5)
    assert crew.line.since()[-1] == "WATCHDOG=1"


def test_a_new_worker_has_time_for_its_first_word(clock: Clock) -> None:
    crew = Crew(Line(), clock)
    crew.begin(1)
    crew.look(FIRST_WORD)
    assert crew.signals == []
    crew.look(0.5)
    assert crew.signals == [(1, signal.SIGKILL)]


def test_a_supervisor_that_stood_still_blames_nobody(clock: Clock) -> None:
    """What the workers said meanwhile has not been read when it looks; they get the time of a start to say it again."""
    crew = Crew(Line(), clock)
    crew.all_ready()
    crew.look(1.0)
    clock.now += LIMIT + ABSENT
    crew.look(1.0)
    crew.look(FIRST_WORD - 1.0)
    assert crew.signals == []
    crew.look(2.0)
    assert crew.signals == [(1, signal.SIGKILL), (2, signal.SIGKILL)]
