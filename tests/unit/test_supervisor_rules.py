"""What the supervisor decides: after an end, after a word, and what it says about all of its workers."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from delayer.core.backoff import LONGEST
from delayer.settings import Settings
from delayer.supervisor import worker
from delayer.supervisor.agreement import Agreement, Disagreement
from delayer.supervisor.policy import REFUSED, STEADY, Again, GiveUp, after_end, again
from delayer.supervisor.state import Reading, State, parse, summary


@pytest.mark.parametrize(
    ("code", "lived", "failures", "step"),
    [
        # what waiting does not mend, or not if nobody was ever ready
        (2, 0.3, 0, GiveUp(2)),
        (REFUSED + 1, 0.3, 0, GiveUp(1)),
        (REFUSED + 2, 0.3, 7, GiveUp(2)),
        (REFUSED + 1, STEADY * 9, 0, GiveUp(1)),
        # killed, a bug, told to stop by somebody else, an exit code nobody knows
        (-9, 1.0, 0, Again(0.2, 1)),
        (-15, 1.0, 0, Again(0.2, 1)),
        (1, 1.0, 0, Again(0.2, 1)),
        (0, 1.0, 0, Again(0.2, 1)),
        (3, 1.0, 0, Again(0.2, 1)),
        # in a row
        (-11, 1.0, 1, Again(0.4, 2)),
        (-11, 1.0, 3, Again(1.6, 4)),
        (-11, STEADY - 0.1, 6, Again(12.8, 7)),
        (-11, 1.0, 40, Again(LONGEST, 41)),
        # and no more in a row after a good while
        (-11, STEADY, 6, Again(0.2, 1)),
        (1, STEADY * 100, 40, Again(0.2, 1)),
    ],
)
def test_after_the_end_of_a_worker(code: int, lived: float, failures: int, step: Again | GiveUp) -> None:
    assert after_end(code, lived, failures, 1.0, proven=False) == step


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (1, Again(0.2, 1)),
        (2, Again(0.2, 1)),  # python: can't open file
        (REFUSED + 2, Again(0.2, 1)),  # a file that was broken just after it was looked at
        (REFUSED + 1, GiveUp(1)),
    ],
)
def test_after_the_end_of_a_worker_of_a_service_that_was_ready(code: int, step: Again | GiveUp) -> None:
    assert after_end(code, 1.0, 0, 1.0, proven=True) == step


def settings(**tables: Any) -> Settings:
    return Settings.model_validate(tables)


BASE: dict[str, Any] = {"broker": {"url": "amqp://u:one@b/v"}, "store": {"url": "postgresql://u:one@p/d"}}
STARTED_WITH = settings(**BASE)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"mode": "native", "workers": 7, "log": {"level": "debug"}},
        {"intake": {"prefetch": 1, "max_delay": "1d"}},
        {"store": {"url": "postgresql://other:two@p/d", "lanes": 7}},
        {"broker": {"url": "amqp://u:two@b/v", "heartbeat": "5s"}},
    ],
)
def test_what_a_successor_may_have_different(tables: dict[str, Any]) -> None:
    Agreement(STARTED_WITH).check(settings(**{**BASE, **tables}))


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"broker": {"url": "amqp://u:one@b/w"}}, "broker.url"),
        ({"broker": {"url": "amqp://u:one@c/v"}}, "broker.url"),
        ({"store": {"url": "postgresql://u:one@p/e"}}, "store.url"),
        ({"intake": {"queue": "others"}}, "intake.queue"),
        ({"native": {"prefix": "other."}}, "native"),
        ({"refused": {"queue": "others"}}, "refused.queue"),
    ],
)
def test_what_a_successor_may_not_have_different(tables: dict[str, Any], key: str) -> None:
    with pytest.raises(Disagreement) as caught:
        Agreement(STARTED_WITH).check(settings(**{**BASE, **tables}))
    assert f" for {key}: " in str(caught.value)
    assert "one" not in str(caught.value)


def test_a_first_store_comes_with_a_reload_and_there_is_no_second() -> None:
    agreement = Agreement(settings(mode="native"))
    one = settings(mode="native", store={"url": "postgresql://p/one"})
    two = settings(mode="native", store={"url": "postgresql://p/two"})
    agreement.check(one)
    agreement.check(two)
    agreement.reloaded(one)
    agreement.reloaded(two)  # the workers do not take it
    agreement.check(one)
    agreement.check(settings(mode="native"))
    with pytest.raises(Disagreement):
        agreement.check(two)


def test_chance_spreads_the_pauses() -> None:
    assert again(2, 0.0) == Again(0.4, 3)
    assert again(2, 1.0) == Again(0.8, 3)


@pytest.mark.parametrize(
    ("datagram", "fields"),
    [
        (b"READY=1\nSTATUS=mode store", {"READY": "1", "STATUS": "mode store"}),
        (b"WATCHDOG=1\n", {"WATCHDOG": "1"}),
        (b"STATUS=a=b", {"STATUS": "a=b"}),
        (b"", {}),
        (b"\xff\nREADY", {}),
        (b"STATUS=caf\xe9", {"STATUS": "caf\ufffd"}),
    ],
)
def test_parse(datagram: bytes, fields: dict[str, str]) -> None:
    assert parse(datagram) == fields


READY = {"READY": "1", "STATUS": "mode store"}
RELOADING = {"RELOADING": "1", "MONOTONIC_USEC": "1"}
WATCHDOG = {"WATCHDOG": "1"}


def running(*words: dict[str, str]) -> State:
    state = State(1)
    state.began(100)
    for word in words:
        assert not state.hear(word)
    return state


def test_a_worker_becomes_ready_and_stops() -> None:
    state = running(WATCHDOG)
    assert state.heard
    assert not state.ready
    state.hear(READY)
    assert (state.ready, state.status) == (True, "mode store")
    state.hear({"STOPPING": "1"})
    assert not state.ready
    state.ended()
    assert state == State(1)


def test_a_reload_is_asked_for_said_and_answered() -> None:
    state = running(WATCHDOG, READY)
    assert state.ask_to_read(), "it can take the signal now"
    state.hear(WATCHDOG)
    assert state.reading is Reading.ASKED
    state.hear(RELOADING)
    assert state.reading is Reading.BUSY
    state.hear(READY | {"STATUS": "mode native"})
    assert (state.reading, state.ready, state.status) == (Reading.IDLE, True, "mode native")


def test_a_worker_that_has_not_spoken_is_not_sent_a_signal_that_would_kill_it() -> None:
    state = running()
    assert not state.ask_to_read()
    assert state.reading is Reading.OWED
    assert state.hear(WATCHDOG), "now it is"
    assert state.reading is Reading.ASKED
    assert not state.hear(WATCHDOG), "once"


def test_a_start_that_ends_during_a_reload_is_not_the_end_of_the_reload() -> None:
    state = running(WATCHDOG)
    assert state.ask_to_read()
    state.hear(READY)
    assert state.ready
    assert state.reading is Reading.ASKED
    state.hear(RELOADING)
    state.hear(READY)
    assert state.reading is Reading.IDLE


def test_a_worker_that_ends_owes_nothing() -> None:
    state = running(WATCHDOG, READY)
    state.ask_to_read()
    state.ended()
    assert state.reading is Reading.IDLE
    assert not state.ask_to_read(), "nobody is there; the next one reads the file anyway"
    assert state.reading is Reading.IDLE
    state.began(101)
    assert (state.pid, state.heard, state.ready) == (101, False, False)


def states(*said: str | None) -> list[State]:
    """One worker for each status; None is not ready."""
    return [
        State(number, pid=number, ready=status is not None, status=status or "half way")
        for number, status in enumerate(said, 1)
    ]


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (["mode store"] * 4, "4 workers ready: mode store"),
        (["mode store", "mode native", "mode store"], "3 workers ready: mode store (1, 3); mode native (2)"),
        ([None, "mode store", None], "1 of 3 workers ready: mode store; waiting for 1, 3"),
        ([None, None], "0 of 2 workers ready: waiting for 1, 2"),
    ],
)
def test_summary(said: list[str | None], line: str) -> None:
    assert summary(states(*said)) == line


@pytest.mark.parametrize(
    ("text", "number"), [(None, None), ("", None), ("x", None), ("-1", None), ("3", 3), ("12", 12)]
)
def test_who_we_are(text: str | None, number: int | None) -> None:
    assert worker.number({} if text is None else {worker.NUMBER: text}) == number


def test_what_a_worker_is_started_with() -> None:
    ours = {"PATH": "/bin", "NOTIFY_SOCKET": "/run/systemd/notify", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
    given = worker.environment(ours, 3, 2.5)
    assert given == {
        "PATH": "/bin", "NOTIFY_SOCKET": "fd:0", "WATCHDOG_USEC": "2500000", "DELAYER_WORKER_NUMBER": "3",
    }  # fmt: skip
    assert worker.command()[0] == sys.executable
