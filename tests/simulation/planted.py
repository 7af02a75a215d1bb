"""Bugs to plant into a daemon, to see whether a simulation finds them."""

from __future__ import annotations

import asyncio
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

from delayer.amqp.values import CONFIRMED, Outgoing
from delayer.broker.circuit_breaker import CircuitBreaker
from delayer.broker.publisher import AmqpPublisher
from delayer.cli import drain
from delayer.daemon.live_settings import LiveSettings
from delayer.format import envelope
from delayer.intake.handle import IntakeHandler
from delayer.set_aside.queues import QueueReader
from delayer.store import hosts, postgres, statements
from delayer.store.admin.importing import ImportStore
from delayer.store.lanes import locks
from delayer.store.lanes.cursor import ReleaseCursor
from delayer.store.restoring import SegmentRestorer
from delayer.store.segments import compact


def rewrite(function: Any, *changes: tuple[str, str]) -> None:
    """Replace texts that occur once in the function, wherever the function is referred to."""
    function = inspect.unwrap(function)
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    for text, replacement in changes:
        assert source.count(text) == 1, f"{function.__qualname__} does not have {text!r} once"
        source = source.replace(text, replacement)
    made: dict[str, Any] = {}
    code = f"from __future__ import annotations\n{source}"
    exec(compile(code, inspect.getsourcefile(function) or "", "exec"), function.__globals__, made)
    function.__code__ = inspect.unwrap(made[function.__name__]).__code__


def without_confirms() -> None:
    """The publisher reports a confirm as soon as it has begun to publish."""
    publish = AmqpPublisher.publish
    running: set[asyncio.Task[Any]] = set()

    async def hasty(self: AmqpPublisher, batch: Sequence[Outgoing], *rest: Any) -> list[Any]:
        task = asyncio.create_task(publish(self, batch, *rest))
        running.add(task)
        task.add_done_callback(lambda done: (running.discard(done), done.cancelled() or done.exception()))
        await asyncio.sleep(0)
        return [CONFIRMED] * len(batch)

    AmqpPublisher.publish = hasty  # type: ignore[method-assign]


def a_clock_ahead() -> None:
    """The daemon takes a message as due 0.2 s before it is."""
    now_ms = LiveSettings.now_lower_ms
    LiveSettings.now_lower_ms = lambda self: now_ms(self) + 200  # type: ignore[method-assign]


def acknowledged_before_the_commit() -> None:
    """A delivery is acknowledged when its park begins."""
    accept = "self._session.acks.accept(delivery.tag for delivery, _, _ in batch)"
    rewrite(IntakeHandler._write, (accept, ""), ("applied = await", f"{accept}; applied = await"))


def a_cursor_ahead() -> None:
    """After a claim the cursor is half a minute ahead of the rows that wait."""
    rewrite(ReleaseCursor.note_claim, ("min(last, ", "min((last[0] + 30_000, 0), "))


def two_owners() -> None:
    """Two processes may hold the lock of one lane, and neither knows of the other."""
    locks._LOCK = locks._LOCK.replace("pg_try_advisory_lock", "pg_try_advisory_lock_shared")
    present = "ARRAY(SELECT pid FROM locks WHERE locks.number = 0 AND locks.trusted)"
    for text, replacement in {
        "WHERE locks.number = l.number": "WHERE false",
        present: "ARRAY[pg_backend_pid()]",
    }.items():
        assert text in statements.LOOK
        statements.LOOK = statements.LOOK.replace(text, replacement)


def an_overtaken_cancel() -> None:
    """Batches with keys are applied at the same time."""
    rewrite(IntakeHandler.flush, ("if self._applying_keys:", "if False:"))


def a_wrong_counter() -> None:
    """A message that was replaced in its batch is not counted as cancelled."""
    rewrite(postgres._changes, (', (lane, "cancelled")]', "]"))


def a_wide_window() -> None:
    """Rows due in five seconds go to other processes' lanes, which look for them once a minute."""
    postgres.FAR_MS = 5_000


def a_breaker_that_stays_open() -> None:
    """No batch probes a destination again."""
    rewrite(CircuitBreaker.partition, ("if breaker.until > now or (silent and not our_turn):", "if True:"))


def a_cut_envelope() -> None:
    """The last byte of a body is lost in the cascade."""
    rewrite(envelope.into_cascade, ("parcel.body", "parcel.body[:-1]"))


def a_reload_without_routes() -> None:
    """A daemon that has reloaded its configuration knows no route."""
    rewrite(LiveSettings.adopt, ("policy_of(settings,", "policy_of(settings.model_copy(update={'routes': ()}),"))


def a_standby_that_nobody_asks() -> None:
    """The driver asks the store's hosts, and a silent one keeps it from asking the next."""
    hosts.hosts_of = lambda url: [url]


def segments_that_wait_too_long() -> None:
    """A segment is restored once its first message is due."""
    rewrite(SegmentRestorer.poll, ("self.ahead_ms()", "0"))


def keys_that_stay_behind() -> None:
    """The keys of messages that go into a segment do not point there."""
    compact._keyed = lambda *_: []


def a_drain_that_leaves_one_out() -> None:
    """One row of each portion leaves the store without a publish."""
    rewrite(drain._publish, ("for row in rows]", "for row in rows[1:]]"))


def an_import_that_leaves_one_out() -> None:
    """One message of each batch is not parked."""
    rewrite(ImportStore._transact, ("fold(parcels)", "fold(parcels[1:])"))


def an_import_that_repeats_one() -> None:
    """One message of each batch is parked twice."""
    rewrite(ImportStore._transact, ("fold(parcels)", "fold([*parcels, parcels[0]])"))


def a_drop_of_too_many() -> None:
    """A refused message that is dropped takes those before it along."""
    rewrite(QueueReader.ack, ("multiple=False", "multiple=True"))


def a_leak() -> None:
    """The publisher never forgets the tokens of its messages."""
    forget = "self._tokens.difference_update(pending.batch[index].token for index in together)"
    rewrite(AmqpPublisher._publish_ordinary, (forget, "pass"))


LOST: Final = "until"
"""The ledger waits in vain."""
NOWHERE: Final = "check: not gone"
"""A message that is neither in the broker nor in the store, before it arrived."""
CHANGED: Final = "until: not verdict.changed"
EARLY: Final = "assert_kept: not self.early"
OVERDUE: Final = "_check: not late"
"""A row that nobody looks at, by the watch."""
OVERLOOKED: Final = "_check_lasting: looks < LASTING_LOOKS"


@dataclass(frozen=True)
class Bug:
    """``checks``: one of them must find it, see check_of in run.py. ``mode``: of a simulation that can meet it.
    ``faults``: the kinds that it needs; empty: any."""

    plant: Callable[[], None]
    checks: Sequence[str]
    mode: str = "store"
    faults: Sequence[str] = ()


PLANTED: Final = {
    bug.plant.__name__: bug
    for bug in (
        Bug(without_confirms, [NOWHERE], "native"),
        Bug(a_clock_ahead, [EARLY], "native"),
        Bug(acknowledged_before_the_commit, [NOWHERE]),
        Bug(a_cursor_ahead, [OVERDUE, OVERLOOKED]),
        Bug(two_owners, ["_check_lasting: looks < most"]),
        Bug(a_leak, ["check_rest: asyncio.get_running_loop().time() < ends", "check: not large"]),
        Bug(a_wide_window, [OVERDUE]),
        Bug(a_breaker_that_stays_open, [LOST], faults=["destination away"]),
        Bug(a_standby_that_nobody_asks, [OVERDUE, LOST], faults=["store fails over"]),
        Bug(a_reload_without_routes, [LOST], faults=["reloaded"]),
        Bug(a_cut_envelope, [CHANGED, NOWHERE], "native"),
        Bug(an_overtaken_cancel, ["assert_kept: not self.overtaken", "assert_kept: not self.lost"], "keys"),
        Bug(a_wrong_counter, ["_check: not counters"], "keys"),
        Bug(segments_that_wait_too_long, [OVERDUE], "operator"),
        Bug(keys_that_stay_behind, ["_check: not keys"], "segments"),
        Bug(a_drain_that_leaves_one_out, [NOWHERE], "drain"),
        Bug(an_import_that_leaves_one_out, ["judge: not lost"], "import"),
        Bug(an_import_that_repeats_one, ["stored: not verdict.unexcused"], "import"),
        Bug(a_drop_of_too_many, ["judge: not lost"], "refused"),
    )
}
