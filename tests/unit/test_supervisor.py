"""The supervisor with scripted processes: its places, what it hears over a real socket, what it tells systemd."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from delayer.daemon import FAREWELL
from delayer.ops.notify import FEEDS, Notifier
from delayer.services import lifecycle
from delayer.settings import ConfigError, Settings
from delayer.supervisor import seat as seat_module
from delayer.supervisor import service as service_module
from delayer.supervisor import worker
from delayer.supervisor.agreement import Disagreement
from delayer.supervisor.ear import listening
from delayer.supervisor.policy import REFUSED, Again
from delayer.supervisor.seat import Seat
from delayer.supervisor.service import ABSENT, FIRST_WORD, GRACE, LIMIT, RELOAD, Supervisor
from delayer.supervisor.state import State
from tests.rig.fakes import until

STARTED, READY, RELOADING = {"WATCHDOG": "1"}, {"READY": "1", "STATUS": "mode store"}, {"RELOADING": "1"}


class Process:
    """Ends when the test says so, or by a signal; ``deaf`` only by SIGKILL."""

    def __init__(self, pid: int, *, deaf: bool = False) -> None:
        self.pid = pid
        self.signals: list[int] = []
        self._deaf = deaf
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def send_signal(self, signum: int) -> None:
        if self._code.done():
            raise ProcessLookupError
        self.signals.append(signum)
        if signum == signal.SIGKILL:
            self.end(-signum)
        elif signum == signal.SIGTERM and not self._deaf:
            self.end(0)

    def end(self, code: int) -> None:
        self._code.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)


class Service:
    """What a place said."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.mistake: ConfigError | None = None
        self.proven = False
        self.failure: Exception | None = None

    def check(self) -> None:
        if self.mistake is not None:
            raise self.mistake

    def began(self, state: State) -> None:
        self.said.append(("began", state.pid))
        if self.failure is not None:
            raise self.failure

    def ended(self, state: State) -> None:
        self.said.append("ended")

    def give_up(self, code: int) -> None:
        self.said.append(("give up", code))


class Scene:
    """One place, kept. Pauses are a thousand times shorter."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.service = Service()
        self.processes: list[Process] = []
        self.refuse_to_start = 0
        self.stopping = asyncio.Event()

        async def start() -> Any:
            if self.refuse_to_start:
                self.refuse_to_start -= 1
                raise OSError(11, "Resource temporarily unavailable")
            self.processes.append(Process(100 + len(self.processes), deaf=deaf))
            return self.processes[-1]

        self.seat = Seat(State(1), start, self.service)
        self.task = asyncio.create_task(self.seat.keep(self.stopping))

    async def process(self, count: int = 1) -> Process:
        await until(lambda: len(self.processes) == count and self.seat.state.pid is not None)
        return self.processes[-1]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []

    def shorter(decide: Callable[..., object]) -> Callable[..., object]:
        def decided(*arguments: float, **options: bool) -> object:
            step = decide(*arguments, **options)
            if isinstance(step, Again):
                found.append(step.pause)
                return Again(step.pause / 1000, step.failures)
            return step

        return decided

    monkeypatch.setattr(seat_module, "after_end", shorter(seat_module.after_end))
    monkeypatch.setattr(seat_module, "again", shorter(seat_module.again))
    return found


async def test_a_place_is_filled_again_with_growing_pauses(pauses: list[float]) -> None:
    it = Scene()
    with capture_logs() as logs:
        for count, code in enumerate((-9, 1, 0, -200), 1):
            (await it.process(count)).end(code)
        await it.process(5)
        it.stopping.set()
        await it.task
    died = [one for one in logs if one["event"] == "worker died"]
    assert [one.get("signal", one.get("exit_code")) for one in died] == ["SIGKILL", 1, 0, "200"]
    assert {one["worker"] for one in logs} == {1}
    assert it.processes[-1].signals == [signal.SIGTERM]
    assert it.service.said == [word for n in range(5) for word in (("began", 100 + n), "ended")]
    assert 0.1 <= pauses[0] <= 0.2 <= pauses[1] <= 0.4 <= pauses[2] <= 0.8 <= pauses[3] <= 1.6


@pytest.mark.parametrize(("code", "given"), [(2, 2), (REFUSED + 1, 1), (REFUSED + 2, 2)])
async def test_a_place_is_given_up(code: int, given: int) -> None:
    it = Scene()
    (await it.process()).end(code)
    await it.task
    assert it.service.said[-1] == ("give up", given)
    assert len(it.processes) == 1


async def test_a_place_whose_service_was_ready_once_is_not_given_up_for_an_interpreter_that_finds_no_program() -> None:
    it = Scene()
    it.service.proven = True
    for count, code in enumerate((2, 1, REFUSED + 2), 1):
        (await it.process(count)).end(code)
    (await it.process(4)).end(REFUSED + 1)
    await it.task
    assert it.service.said[-1] == ("give up", 1)


async def test_no_process_is_left_when_something_fails_right_after_its_start() -> None:
    it = Scene(deaf=True)
    it.service.failure = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await it.task
    assert it.processes[0].signals == [signal.SIGKILL]
    assert it.service.said == [("began", 100), "ended"]


async def test_whatever_the_end_is_like_after_the_order_to_stop_it_is_no_news() -> None:
    it = Scene(deaf=True)
    process = await it.process()
    with capture_logs() as logs:
        it.stopping.set()
        await until(lambda: bool(process.signals))
        process.end(REFUSED + 1)
        await it.task
    assert logs == []
    assert it.service.said == [("began", 100), "ended"]


async def test_no_process_and_no_configuration_are_waited_for(pauses: list[float]) -> None:
    it = Scene()
    it.refuse_to_start = 2
    it.service.mistake = ConfigError([])
    with capture_logs() as logs:
        await until(lambda: len(pauses) == 2)
        it.service.mistake = None
        await it.process()
    assert {one["event"] for one in logs} == {"worker not started", "worker started"}
    assert "Resource temporarily unavailable" in str(logs)
    it.stopping.set()
    await it.task


async def test_a_deaf_process_is_killed_when_the_time_is_over() -> None:
    it = Scene(deaf=True)
    process = await it.process()
    it.stopping.set()
    await until(lambda: bool(process.signals))
    it.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await it.task
    assert process.signals == [signal.SIGTERM, signal.SIGKILL]
    assert it.service.said[-1] == "ended"


async def test_a_signal_for_nobody_is_lost() -> None:
    it = Scene()
    it.seat.signal(signal.SIGHUP)
    process = await it.process()
    it.seat.signal(signal.SIGHUP)
    process.end(0)
    it.seat.signal(signal.SIGHUP)
    assert process.signals == [signal.SIGHUP]
    it.stopping.set()
    await it.task


async def test_the_ear_knows_who_speaks() -> None:
    heard: list[tuple[int, object]] = []
    with listening(lambda pid, fields: heard.append((pid, fields))) as line:
        ours = Notifier({"NOTIFY_SOCKET": f"fd:{line}"})
        ours.ready("mode store")
        await until(lambda: len(heard) == 1)
        other = "import os; from delayer.ops.notify import Notifier; Notifier().feed_watchdog(); print(os.getpid())"
        environ = worker.environment(os.environ, 1, 60.0)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", other], env=environ, stdin=line, capture_output=True, check=True
        )
        await until(lambda: len(heard) == 2)
        kept = os.dup(line)
    assert heard == [(os.getpid(), READY), (int(done.stdout), {"WATCHDOG": "1"})]
    with capture_logs() as logs:
        Notifier({"NOTIFY_SOCKET": f"fd:{kept}"}).ready()
    os.close(kept)
    assert [one["event"] for one in logs] == ["notify failed"], "nobody listens any more"


async def test_what_a_worker_says_while_nobody_has_time_to_listen_is_kept() -> None:
    """And is heard a portion at a time: whoever says a lot does not keep the loop from everybody else."""
    heard: list[int] = []
    with listening(lambda pid, _: heard.append(pid)) as line, capture_logs() as logs:
        said = Notifier({"NOTIFY_SOCKET": f"fd:{line}"})
        for _ in range(100):
            said.feed_watchdog()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 0 < len(heard) < 100
        await until(lambda: len(heard) == 100)
    assert logs == []


ORPHAN = """
import asyncio, signal, sys, time
from delayer.supervisor import worker
worker.do_not_outlive_supervisor(patience=1)
async def healthy():
    gone = asyncio.Event()
    worker.watch_supervisor(gone.set)
    await gone.wait()
    print("in order", flush=True)
print("up", flush=True)
if sys.argv[1] == "spins":
    while True: pass
asyncio.run(healthy())
"""
SUPERVISOR = """
import socket, subprocess, sys, time
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
print(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=theirs).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("worker_is", "last_words"), [("well", [b"in order"]), ("stopped", [b"in order"]), ("spins", [])]
)
def test_nobody_outlives_a_killed_supervisor(worker_is: str, last_words: list[bytes]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, ORPHAN, worker_is], stdout=subprocess.PIPE, bufsize=0
    ) as supervisor:
        assert supervisor.stdout is not None
        # Both write there, and either may be the first.
        said = [supervisor.stdout.readline(), supervisor.stdout.readline()]
        said.remove(b"up\n")
        if worker_is == "stopped":
            os.kill(int(said[0]), signal.SIGSTOP)
        supervisor.kill()
        said = supervisor.stdout.read().splitlines()  # to its end, which is the end of the worker
        assert said[-1:] == last_words


def test_a_worker_without_a_supervisor_from_the_start_does_not_stay() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        done = subprocess.run([sys.executable, "-c", ORPHAN, "spins"], stdin=theirs, timeout=30, check=False)
    assert done.returncode == -signal.SIGALRM


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
