"""`delayer` with an adjustable host clock, or with a planted bug that the test harnesses must find.

    python -m tests.support.odd [--clock FILE] [--bug NAME] -- ARGUMENTS OF delayer

The clock is the host's plus the offset in FILE, see :class:`Clock`.
"""

from __future__ import annotations

import argparse
import mmap
import random
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_OFFSET = struct.Struct("<q")


class Clock:
    """A file with the milliseconds by which a process is ahead of its host; processes map it into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(_OFFSET.pack(0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _OFFSET.size)

    @property
    def ahead_ms(self) -> int:
        return int(_OFFSET.unpack(self._memory)[0])

    def set(self, ahead_ms: int) -> None:
        self._memory[:] = _OFFSET.pack(ahead_ms)

    def rule(self) -> None:
        """Let this process's clock be this one."""
        nanoseconds, seconds = time.time_ns, time.time
        time.time_ns = lambda: nanoseconds() + self.ahead_ms * 1_000_000
        time.time = lambda: seconds() + self.ahead_ms / 1000


def acknowledge_first() -> None:
    """A crash loses messages that were read (G1)."""
    from delayer.intake.handle import IntakeHandler

    handle = IntakeHandler.handle

    def broken(self: IntakeHandler, batch: Sequence[Any]) -> None:
        acks = self._session.acks
        acks.accept([delivery.tag for delivery in batch])
        self._session.acks = _Like(acks, accept=lambda _: None, keep=lambda _: None)  # type: ignore[assignment]
        handle(self, batch)
        self._session.acks = acks

    IntakeHandler.handle = broken  # type: ignore[method-assign]


class _Like:
    """Another object, but for some methods."""

    def __init__(self, other: Any, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods)
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def early() -> None:
    """Rows and kept messages leave 200 ms before they are due. The cascade is a second too short, and the daemon does
    not check the due instant at its end (G2)."""
    from delayer.core import plan
    from delayer.intake import dispatch
    from delayer.intake.handle import DueHandler
    from delayer.release import loop
    from delayer.store import statements

    pace = loop.Pace

    def sooner(due_ms: Sequence[int], *more: Any) -> Any:
        return pace([one - 200 for one in due_ms], *more)

    loop.Pace = dispatch.Pace = sooner  # type: ignore[assignment, misc, attr-defined]
    judge = "statement_timestamp()"
    statements.CLAIM = statements.CLAIM.replace(judge, f"{judge} + interval '200 ms'")
    seconds, init = plan.whole_seconds_until, DueHandler.__init__
    plan.whole_seconds_until = lambda due_ms, now_ms: max(0, seconds(due_ms, now_ms) - 1)

    def broken(self: DueHandler, live: Any, *more: Any) -> None:
        init(self, _Like(live, now_lower_ms=lambda: live.now_lower_ms() + 1_000), *more)

    DueHandler.__init__ = broken  # type: ignore[method-assign]


def twice() -> None:
    """Now and then a whole batch is published again, without any fault (G3)."""
    from delayer.broker.publisher import AmqpPublisher

    publish = AmqpPublisher.publish

    async def broken(self: AmqpPublisher, batch: Sequence[Any], pace: Any = None) -> list[Any]:
        outcomes = await publish(self, batch, pace)
        return await publish(self, batch) if random.random() < 0.2 else outcomes

    AmqpPublisher.publish = broken  # type: ignore[method-assign]


def forgetful() -> None:
    """Messages that the broker returns or rejects count as delivered (G1); the log names them."""
    import structlog

    from delayer.amqp.values import CONFIRMED
    from delayer.broker.publisher import AmqpPublisher

    log, publish = structlog.get_logger(__name__), AmqpPublisher.publish

    async def broken(self: AmqpPublisher, batch: Sequence[Any], pace: Any = None) -> list[Any]:
        for outcome in await publish(self, batch, pace):
            if outcome != CONFIRMED:
                log.warning("forgotten")
        return [CONFIRMED for _ in batch]

    AmqpPublisher.publish = broken  # type: ignore[method-assign]


def lenient() -> None:
    """The daemon drops a message that it must refuse (G5)."""
    from delayer.amqp.values import CONFIRMED
    from delayer.broker.publisher import AmqpPublisher

    publish = AmqpPublisher.publish

    async def broken(self: AmqpPublisher, batch: Sequence[Any], pace: Any = None) -> list[Any]:
        kept = [one for one in batch if b"x-delayer-refused" not in one.properties]
        outcomes = iter(await publish(self, kept, pace) if kept else ())
        return [CONFIRMED if b"x-delayer-refused" in one.properties else next(outcomes) for one in batch]

    AmqpPublisher.publish = broken  # type: ignore[method-assign]


def new_id() -> None:
    """A message released again after a crash, or read again from the due queue, has another x-delayer-id (G3)."""
    from delayer.core.message import Due
    from delayer.intake import handle
    from delayer.release import loop

    prepare_outgoing, read = loop.prepare_outgoing, handle.read_envelope

    def broken(row: Due, max_properties: int) -> Any:
        return prepare_outgoing(row._replace(id=row.id * 1_000_000 + random.randrange(1_000_000)), max_properties)

    def renamed(*arguments: Any) -> Any:
        return read(*arguments)._replace(id=b"%032x" % random.getrandbits(128))

    loop.prepare_outgoing = broken
    handle.read_envelope = renamed


def same_id() -> None:
    """Two rows leave under one x-delayer-id: a consumer that drops copies by id loses one of them (G3)."""
    from delayer.core.message import Due
    from delayer.release import loop

    prepare_outgoing = loop.prepare_outgoing

    def broken(row: Due, max_properties: int) -> Any:
        return prepare_outgoing(row._replace(id=row.id // 2), max_properties)

    loop.prepare_outgoing = broken


def narrow() -> None:
    """A signed integer leaves as an unsigned one (G4)."""
    from delayer.intake import handle
    from delayer.release import loop

    released = loop.released_properties

    def broken(*arguments: Any) -> bytes:
        return released(*arguments).replace(b"\x03i32I", b"\x03i32i")

    for module in (handle, loop):
        module.released_properties = broken  # type: ignore[attr-defined]


def sorts_headers() -> None:
    """Headers leave sorted by name (G4). A broker from 4.0 on sorts them before the daemon reads them."""
    from delayer.amqp.properties import Properties, splice
    from delayer.intake import handle
    from delayer.release import loop

    released = loop.released_properties

    def broken(properties: Properties, *more: Any) -> bytes:
        entries = sorted((name, properties.raw[at:stop]) for name, at, stop in properties.entries())
        bare = splice(properties, remove={name for name, _ in entries})
        names = b"".join(bytes((len(name),)) + name + value for name, value in entries)
        return released(Properties.parse(splice(bare, append=names)), *more)

    for module in (handle, loop):
        module.released_properties = broken  # type: ignore[attr-defined]


# ---- in features of routes: each breaks the promise of one feature


def keyless() -> None:
    """A message with a key replaces nothing."""
    from delayer.core.message import Parcel
    from delayer.intake import handle

    parcel = handle.parcel

    def broken(delivery: Any, due_ms: int, target: Any, *_keyed: Any) -> Parcel:
        return parcel(delivery, due_ms, target)

    handle.parcel = broken


def forgets_keep() -> None:
    """A message that keeps replaces the waiting one."""
    from delayer.core import plan
    from delayer.core.message import REPLACE

    key_mode = plan._key_mode

    def broken(headers: Any, key: bytes | None) -> Any:
        mode = key_mode(headers, key)
        return REPLACE if mode.keep else mode

    plan._key_mode = broken


def forgets_ceilings() -> None:
    """A message that debounces is due when its own delay says."""
    from delayer.core import plan

    plan._ceiling_ms = lambda _: 1 << 40


def deaf_to_cancels() -> None:
    """A cancel is answered as done, and the message stays."""
    from delayer.core.operations import Applied, Cancel
    from delayer.store.backlog import PostgresBacklog

    apply = PostgresBacklog.apply

    async def broken(self: PostgresBacklog, operations: Any) -> Applied:
        await apply(self, [one for one in operations if not isinstance(one, Cancel)])
        return Applied(frozenset(range(len(operations))))

    PostgresBacklog.apply = broken  # type: ignore[method-assign]


def impatient() -> None:
    """A failed message returns after half of its pause."""
    from delayer.core import plan

    wait_ms = plan.wait_ms
    plan.wait_ms = lambda *said: wait_ms(*said) // 2


def once_more() -> None:
    """A failed message returns once more than configured."""
    from delayer.core import plan

    failure = plan.failure

    def broken(headers: Any, retry: Any) -> Any:
        failed = failure(headers, retry)
        return failed._replace(exhausted=failed.retries > retry.attempts + 1)

    plan.failure = broken


def hurried() -> None:
    """A message taken over is published before the cascade would have delivered it."""
    from delayer.intake import takeover

    due_at_level = takeover.due_at_level
    takeover.due_at_level = lambda *said: due_at_level(*said) - 1_500


def at_the_border() -> None:
    """A delay too short for the store does not wait at all."""
    from delayer.core import plan

    placed = plan._placed

    def broken(due_ms: int, start_ms: int, target: Any, *more: Any, **named: Any) -> Any:
        found = placed(due_ms, start_ms, target, *more, **named)
        return plan.AtOnce(due_ms, target) if isinstance(found, plan.EnterCascade) else found

    plan._placed = broken


def unlimited() -> None:
    """A limited route publishes at twice its rate."""
    from delayer.daemon import live_settings

    rates_of = live_settings.rates_of
    live_settings.rates_of = lambda settings: {route: 2 * rate for route, rate in rates_of(settings).items()}


def never_too_late() -> None:
    """A message that falls due too late for its route is still delivered."""
    from delayer.daemon.live_settings import LiveSettings

    LiveSettings.late_limits = lambda self: {}  # type: ignore[method-assign]


def lenient_at_intake() -> None:
    """A message that is too late at its publish is still delivered."""
    from delayer.core import plan

    plan.too_late = lambda *_: None


_PLANTED: Final = (
    acknowledge_first, early, twice, forgetful, lenient, new_id, same_id, narrow, sorts_headers,
)  # fmt: skip
_PLANTED_IN_FEATURES: Final = (
    keyless, forgets_keep, forgets_ceilings, deaf_to_cancels, impatient, once_more, hurried, at_the_border, unlimited,
    never_too_late, lenient_at_intake,
)  # fmt: skip
BUGS: Final[Mapping[str, Callable[[], None]]] = {bug.__name__.replace("_", " "): bug for bug in _PLANTED}
OF_FEATURES: Final = {bug.__name__.replace("_", " "): bug for bug in _PLANTED_IN_FEATURES}
"""Bugs that only a test of their feature can find (tests/faults/features)."""


def program(*, clock: Path | None = None, bug: str = "") -> tuple[str, ...]:
    """The command line to start instead of ``delayer``."""
    arguments = [*(("--clock", str(clock)) if clock else ()), *(("--bug", bug) if bug else ())]
    return (sys.executable, "-m", "tests.support.odd", *arguments, "--")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clock", type=Path)
    parser.add_argument("--bug", choices=BUGS | OF_FEATURES)
    at = sys.argv.index("--")
    odd = parser.parse_args(sys.argv[1:at])
    if odd.clock:
        Clock(odd.clock).rule()
    if odd.bug:
        (BUGS | OF_FEATURES)[odd.bug]()
    from delayer.cli import main as cli

    sys.argv[1:] = sys.argv[at + 1 :]
    cli.main()


if __name__ == "__main__":
    main()
