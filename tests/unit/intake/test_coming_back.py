"""A returning message has no delay left in any form, and a new delay applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.properties import Properties
from delayer.amqp.values import Delivery
from delayer.core.cascade import routing_key
from delayer.core.delay_sources import SOURCES, is_lasting
from delayer.core.plan import AtOnce, EnterCascade, Mode, Park, Policy, Refuse, Route
from delayer.format.release import released_properties
from delayer.intake.handle import Classified, classify
from tests.support import fakes
from tests.support.logged import capture_logs
from tests.support.raw import VOID, Header, Props, Value, array, decimal, number, octets, table, text, wire_instant
from tests.unit.intake.test_classify import Gathered

NOW: Final = 1_800_000_000_000
WAIT_MS: Final = 8_000
DUE: Final = NOW + WAIT_MS
BACK: Final = DUE + 500
"""When the message returns."""
PAUSE_MS: Final = 5_000
"""The route's ``default_delay``, if it has one."""
NSB: Final = b"NServiceBus.Transport.RabbitMQ.DelayInSeconds"


@dataclass(frozen=True)
class Message:
    """Headers sent by a publisher or returned by a broker."""

    headers: tuple[Header, ...] = ()
    key: bytes = b"order"
    body: bytes = b"{}"
    timestamp: int | None = None

    def adding(self, *headers: Header) -> Message:
        return replace(self, headers=(*self.headers, *headers))


def header(name: bytes, value: Value) -> Message:
    return Message(((name, value),))


def iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


ASKS: Final[Mapping[str, Callable[[int], Message]]] = {
    "x-delay": lambda _: header(b"x-delay", number("I", WAIT_MS)),
    "x-deliver-at": lambda now: header(b"x-deliver-at", number("l", now + WAIT_MS)),
    "x-opt-delivery-time": lambda now: header(b"x-opt-delivery-time", number("l", now + WAIT_MS)),
    "x-opt-delivery-delay": lambda _: header(b"x-opt-delivery-delay", number("I", WAIT_MS)),
    "timestamp": lambda now: Message(timestamp=(now + WAIT_MS) // 1000),
    "nservicebus": lambda now: header(NSB, number("I", 8)).adding((b"NServiceBus.TimeSent", text(wire_instant(now)))),
    "nservicebus-timeout": lambda now: Message(
        (
            (b"NServiceBus.Timeout.Expire", text(wire_instant(now + WAIT_MS))),
            (b"NServiceBus.Timeout.RouteExpiredTimeoutTo", text("sales")),
        )
    ),
    "routing-key-bits": lambda _: Message(key=routing_key(8, b"order")),
    "celery-eta": lambda now: header(b"eta", text(iso(now + WAIT_MS))),
    "header:wait:s": lambda _: header(b"wait", number("I", 8)),
    "header:at:rfc3339": lambda now: header(b"at", text(iso(now + WAIT_MS))),
    "json:/at": lambda now: Message(body=b'{"at": %d}' % (now + WAIT_MS)),
}
"""A message with a delay of WAIT_MS from an instant on, by every form."""
ALL: Final = tuple(ASKS)
DUE_MARKS: Final = (
    number("l", DUE), number("d", DUE), number("f", DUE), number("l", DUE + 3_600_000),
    text(f"{DUE}"), text(f"{DUE}.0"), text("1.8e12"), text(iso(DUE)), text(""), text(b"\xff"), octets(b"%d" % DUE),
    number("T", DUE // 1000), decimal(3, 8), decimal(0, 5), array(number("l", DUE)), table(), number("t", True), VOID,
)  # fmt: skip
"""The due time of the last delay, in the forms that clients and other protocols may give it on its way."""
MARKS: Final[tuple[tuple[Header, ...], ...]] = (
    *(((b"x-delay", value),) for value in (
        number("I", -WAIT_MS), number("l", -1), number("b", -8), number("d", -0.5), text("-8000"), text("-0.5"),
        number("s", -8), number("f", -8e3), text("-8e3"), text(" -8000 "), octets(b"-8000"), decimal(1, -5),
    )),
    *(((b"x-delayer-id", text("7")), (b"x-delayer-due", value)) for value in DUE_MARKS),
    ((b"x-delayer-refused", text("no delay")), (b"x-delayer-exchange", text("in"))),
    ((b"x-death", array(table((b"queue", text("work")), (b"time", number("T", BACK // 1000))))),),
    ((b"x-first-death-queue", text("work")),),
)  # fmt: skip
MODES: Final = (Mode.STORE, Mode.NATIVE)


def plan(message: Message, now_ms: int, *, mode: Mode, forms: tuple[str, ...] = ALL, **options: object) -> Classified:
    """The plan for a message on a route that reads these forms, in order."""
    route = Route(b"in", b"out", delay_from=forms, **options)  # type: ignore[arg-type]
    policy = Policy(mode, {b"in": route}, max_delay_ms=86_400_000)
    raw = Props(headers=message.headers or None, timestamp=message.timestamp).encode()
    return classify(Delivery(1, False, b"in", message.key, raw, message.body), policy, now_ms, 100_000)


def trip(message: Message, now_ms: int, mode: Mode, due_ms: int = DUE) -> Message:
    """The message as its consumer gets it, after a delay until ``due_ms``."""
    delivery, properties, found = plan(message, now_ms, mode=mode)
    assert properties is not None
    assert isinstance(found, Park | EnterCascade), found
    assert found.due_ms == due_ms
    carried = Properties.parse(delivery.properties)
    released = Props.decode(released_properties(carried, b"id", found.due_ms, 131_052))
    return Message(released.headers or (), found.target.routing_key, message.body, released.timestamp)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ASKS)
def test_a_delay_counts_once(form: str, mode: Mode) -> None:
    back = trip(ASKS[form](NOW), NOW, mode)

    assert plan(back, BACK, mode=mode)[2] == AtOnce(BACK, plan(back, BACK, mode=mode)[2].target, undelayed=True)  # type: ignore[union-attr]
    paused = plan(back, BACK, mode=mode, default_delay_ms=PAUSE_MS)[2]
    assert isinstance(paused, Park | EnterCascade)
    assert (paused.due_ms, paused.undelayed) == (BACK + PAUSE_MS, True)
    assert isinstance(plan(back, BACK, mode=mode, require_delay=True)[2], Refuse)
    assert isinstance(plan(back, BACK, mode=mode, late_limit_ms=100)[2], AtOnce)


ZEROS: Final[dict[str, Message]] = {
    "x-delay": header(b"x-delay", number("I", 0)),
    "x-delay as text": header(b"x-delay", text("0")),
    "x-delay below 0": header(b"x-delay", number("d", -0.0)),
    "x-opt-delivery-delay": header(b"x-opt-delivery-delay", number("I", 0)),
    "header:wait:s": header(b"wait", number("I", 0)),
    "nservicebus": header(NSB, number("I", 0)).adding((b"NServiceBus.TimeSent", text(wire_instant(NOW)))),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ZEROS)
def test_a_delay_of_zero_counts_once(form: str, mode: Mode) -> None:
    """Otherwise a message due immediately would return to its queue thousands of times a second."""
    forms = tuple(one for one in ALL if not one.startswith("json"))  # The message has no body.
    delivery, _, found = plan(ZEROS[form], NOW, mode=mode, forms=forms, default_delay_ms=PAUSE_MS)
    assert isinstance(found, AtOnce)
    released = Props.decode(released_properties(Properties.parse(delivery.properties), b"id", found.due_ms, 131_052))
    back = Message(released.headers or (), found.target.routing_key, b"")
    paused = plan(back, BACK, mode=mode, forms=forms, default_delay_ms=PAUSE_MS)[2]
    assert isinstance(paused, Park | EnterCascade)
    assert (paused.due_ms, paused.undelayed) == (BACK + PAUSE_MS, True)
    assert isinstance(plan(back, BACK, mode=mode, forms=forms, require_delay=True)[2], Refuse)


@pytest.mark.parametrize("mark", DUE_MARKS)
@pytest.mark.parametrize("form", [form for form in ASKS if is_lasting(form)])
def test_no_form_of_the_mark_makes_a_delay_count_again(form: str, mark: Value) -> None:
    back = trip(ASKS[form](NOW), NOW, Mode.NATIVE)
    changed = tuple((name, mark if name == b"x-delayer-due" else value) for name, value in back.headers)

    found = plan(replace(back, headers=changed), BACK, mode=Mode.NATIVE, default_delay_ms=PAUSE_MS)[2]
    assert isinstance(found, EnterCascade)
    assert (found.due_ms, found.undelayed) == (BACK + PAUSE_MS, True)
    assert isinstance(plan(replace(back, headers=changed), BACK, mode=Mode.NATIVE, require_delay=True)[2], Refuse)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("again", ASKS)
@pytest.mark.parametrize("form", ASKS)
def test_a_new_delay_applies_despite_leftovers_of_the_last(form: str, again: str, mode: Mode) -> None:
    back, new = trip(ASKS[form](NOW), NOW, mode), ASKS[again](BACK)
    renewed = {name for name, _ in new.headers}
    both = Message(
        (*((name, value) for name, value in back.headers if name not in renewed), *new.headers),
        new.key if again == "routing-key-bits" else back.key,
        new.body if again == "json:/at" else back.body,
        back.timestamp if new.timestamp is None else new.timestamp,
    )
    due_ms = (BACK + WAIT_MS) // 1000 * 1000 if again == "timestamp" else BACK + WAIT_MS
    assert plan(both, BACK, mode=mode)[2].due_ms == due_ms  # type: ignore[union-attr]
    assert plan(both, BACK, mode=mode, require_delay=True)[2].due_ms == due_ms  # type: ignore[union-attr]


@given(st.sampled_from(list(ASKS)), st.lists(st.sampled_from(MARKS), max_size=4), st.sampled_from(MODES), st.booleans())
def test_marks_are_not_a_delay_and_do_not_hide_one(
    form: str, marks: list[tuple[Header, ...]], mode: Mode, first: bool
) -> None:
    left = tuple(one for mark in marks for one in mark)
    bare = plan(Message(left), BACK, mode=mode)[2]
    assert isinstance(bare, AtOnce)
    assert bare.undelayed
    assert isinstance(plan(Message(left), BACK, mode=mode, require_delay=True)[2], Refuse)

    asked = ASKS[form](BACK)
    marked = replace(asked, headers=left + asked.headers if first else asked.headers + left)
    assert plan(marked, BACK, mode=mode)[2] == plan(asked, BACK, mode=mode)[2]


@pytest.mark.parametrize("forms", [ALL, ALL[::-1]])
@pytest.mark.parametrize("mode", MODES)
@given(trips=st.lists(st.sampled_from(["x-delay", "x-deliver-at", "celery-eta", "header:wait:s"]), max_size=5))
def test_any_number_of_trips(forms: tuple[str, ...], mode: Mode, trips: list[str]) -> None:
    message, now_ms = Message(), NOW
    for form in trips:
        asked = ASKS[form](now_ms)
        kept = tuple(one for one in message.headers if one[0] not in {name for name, _ in asked.headers})
        message = trip(replace(message, headers=kept + asked.headers), now_ms, mode, now_ms + WAIT_MS)
        now_ms += WAIT_MS
        assert isinstance(plan(message, now_ms, mode=mode, forms=forms, require_delay=True)[2], Refuse)


def test_every_form_is_tried() -> None:
    assert set(SOURCES) < set(ASKS)


@pytest.mark.parametrize(
    ("marks", "age_ms", "believed"),
    [
        ((), 3_600_000, True),  # The daemon may have been away for an hour.
        ((), -1, False),
        ((), -3_600_000, False),
        (((b"x-delayer-due", number("l", BACK - 2_000)),), 1_999, True),
        (((b"x-delayer-due", number("l", BACK - 2_000)),), 2_000, False),
        (((b"x-delayer-due", text("soon")),), 0, False),
        (((b"x-first-death-queue", text("work")),), 0, False),
        (((b"x-death", array()),), 0, False),
        (((b"x-death", array(table((b"time", number("T", BACK // 1000 - 2))))),), 1_000, True),
        (((b"x-death", array(table((b"time", number("T", BACK // 1000 - 2))))),), 1_501, False),
        (((b"x-death", array(table((b"time", number("T", 1)), (b"count", number("l", 2))))),), 0, False),
        (((b"x-death", array(table((b"time", text("now"))))),), 0, False),
    ],
)
def test_a_stamp_is_used_only_if_it_can_be_right(marks: tuple[Header, ...], age_ms: int, believed: bool) -> None:
    stamp = (b"timestamp_in_ms", number("l", BACK - age_ms))
    asked = Message(((b"x-delay", number("I", 4_000_000)), stamp, *marks))
    found = plan(asked, BACK, mode=Mode.STORE)[2]
    assert isinstance(found, Park)
    assert found.due_ms == BACK + 4_000_000 - (age_ms if believed else 0)


@pytest.mark.parametrize("daemons", [1, 2])
@pytest.mark.parametrize("mark", [number("l", NOW), text(f"{NOW}")])
@pytest.mark.parametrize("message_id", [None, b"order 7"])
async def test_each_daemon_logs_a_loop_once(daemons: int, mark: Value, message_id: bytes | None) -> None:
    both = [Gathered() for _ in range(daemons)]
    properties = Props(headers=((b"x-delayer-due", mark),), message_id=message_id).encode()
    with capture_logs() as entries:
        for at in range(0, 30_000, 20):
            it = both[at // 20 % daemons]
            it.live.now = fakes.NOW + at
            await it.take(
                Delivery(at + 1, False, b"orders.in", b"k", properties, b"%d" % at if message_id else b"same")
            )
    assert [one["route"] for one in entries if one["event"] == "message loops"] == [b"orders.in"] * daemons
