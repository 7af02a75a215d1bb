"""The places of the supervisor with scripted processes, what is heard over a real socket, and who stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from delayer.ops.notify import Notifier
from delayer.settings import ConfigError
from delayer.supervisor import seat as seat_module
from delayer.supervisor import worker
from delayer.supervisor.ear import listening
from delayer.supervisor.policy import REFUSED, Again
from delayer.supervisor.seat import Seat
from delayer.supervisor.state import State
from tests.rig.fakes import until

READY = {"READY": "1", "STATUS": "mode store"}


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
