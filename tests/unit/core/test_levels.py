"""The due instant of a message found inside a cascade: rows, and the law that it is never early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.values import Timestamp
from delayer.core import levels
from delayer.core.cascade import CASCADE_KINDS, LEVELS, MAX_SECONDS, Cascade, Kind, routing_key
from delayer.core.levels import due_at_level, longest_wait_seconds
from delayer.core.marks import X_DEATH
from delayer.core.nservicebus import DELAY_IN_SECONDS, EXPIRE, RETRIES_TIMESTAMP, TIME_SENT
from tests.support.raw import wire_instant

NOW = 1_800_000_000_000
NSB = Cascade("nservicebus-v2")
HOUR = 3600


@pytest.mark.parametrize(
    ("level", "key", "seconds"),
    [
        (11, routing_key(HOUR, b"a"), HOUR),
        (10, routing_key(HOUR, b"a"), HOUR - 2048),
        (4, routing_key(HOUR, b"a"), 16),
        (27, routing_key(MAX_SECONDS, b"a"), MAX_SECONDS),
        (6, b"no bits at all", 64),  # published straight into the queue: the queue's TTL holds for it too
        (6, routing_key(1, b"a"), 65),
    ],
)
def test_the_longest_wait(level: int, key: bytes, seconds: int) -> None:
    assert longest_wait_seconds(level, key) == seconds


def death(queue: str, at: int, *, count: int = 1, reason: str = "expired") -> list[dict[str, object]]:
    return [{"queue": queue, "reason": reason, "count": count, "time": Timestamp(at), "routing-keys": ["x"]}]


def sent(seconds: int, at_ms: int) -> dict[bytes, object]:
    return {DELAY_IN_SECONDS: seconds, TIME_SENT: wire_instant(at_ms)}


LATEST = NOW + (HOUR - 2048) * 1000  # a delay of an hour, found at level 10
SOONEST = LATEST - 1024_000
SECOND = NOW // 1000
OLD = sent(HOUR, NOW - 60 * 86_400_000)


@pytest.mark.parametrize(
    ("headers", "due_ms"),
    [
        ({}, LATEST),
        (sent(HOUR, NOW - 2_100_000), NOW + 1_500_000),
        (sent(HOUR, NOW + 9_000_000), LATEST),  # the sender's clock is ahead
        # The sender's clock is slow, and the message is about to leave its level.
        (sent(HOUR, SOONEST - levels.CLOCKS_MS - HOUR * 1000), SOONEST),
        # TimeSent belongs to an earlier sending; the headers do not contain the time of this one.
        (sent(HOUR, SOONEST - levels.CLOCKS_MS - 1 - HOUR * 1000), LATEST),
        (OLD, LATEST),
        # The vendor's tool moves a timeout with a new delay, the old TimeSent, and the due instant.
        (OLD | {EXPIRE: wire_instant(SOONEST + 600_000)}, SOONEST + 600_000),
        (OLD | {EXPIRE: wire_instant(NOW - 60_000)}, LATEST),
        (OLD | {EXPIRE: "some day"}, LATEST),
        (sent(HOUR, NOW - 2_100_000) | {EXPIRE: wire_instant(NOW - 9_000_000)}, NOW + 1_500_000),
        # A delayed retry is measured from its failure.
        (sent(HOUR, 0) | {RETRIES_TIMESTAMP: wire_instant(NOW - 2_100_000)}, NOW + 1_500_000),
        # Unreadable headers are ignored.
        ({DELAY_IN_SECONDS: HOUR, TIME_SENT: "yesterday"}, LATEST),
        ({DELAY_IN_SECONDS: "x", TIME_SENT: wire_instant(NOW)}, LATEST),
        ({TIME_SENT: wire_instant(NOW - 2_100_000)}, LATEST),
        # The broker's note of the level before.
        ({X_DEATH: death("nsb.v2.delay-level-11", SECOND - 100)}, LATEST - 99_000),
        ({X_DEATH: death("nsb.v2.delay-level-11", SECOND)}, LATEST),
        ({X_DEATH: death("nsb.v2.delay-level-11", SECOND - 9_999)}, LATEST),
        (OLD | {X_DEATH: death("nsb.v2.delay-level-11", SECOND - 100)}, LATEST - 99_000),
        # Notes of another trip, another queue or another reason do not count.
        ({X_DEATH: death("nsb.v2.delay-level-11", SECOND - 100, count=2)}, LATEST),
        ({X_DEATH: death("nsb.v2.delay-level-12", SECOND - 100)}, LATEST),
        ({X_DEATH: death("nsb.v2.delay-level-11", SECOND - 100, reason="maxlen")}, LATEST),
        ({X_DEATH: [{"queue": "nsb.v2.delay-level-11", "reason": "expired", "count": 1, "time": SECOND}]}, LATEST),
        ({X_DEATH: [5]}, LATEST),
        # With both, the later one wins.
        (sent(HOUR, NOW - 2_100_000) | {X_DEATH: death("nsb.v2.delay-level-11", SECOND - 100)}, NOW + 1_500_000),
        (sent(HOUR, NOW - 2_200_000) | {X_DEATH: death("nsb.v2.delay-level-11", SECOND - 100)}, LATEST - 99_000),
    ],
)
def test_a_message_met_at_level_10(headers: dict[bytes, object], due_ms: int) -> None:
    assert due_at_level(NSB, 10, routing_key(HOUR, b"Sales"), headers, NOW) == due_ms


def test_a_note_at_the_first_level_is_of_another_trip() -> None:
    noted = {X_DEATH: death("nsb.v2.delay-level-12", SECOND - 100)}
    assert due_at_level(NSB, 11, routing_key(HOUR, b"a"), noted, NOW) == NOW + HOUR * 1000


@pytest.mark.parametrize(
    ("eta", "due_ms"),
    [
        ("2027-01-15T09:00:00.400000+00:00", NOW + 3_600_400),  # Celery cut 0.4 s off
        ("2027-01-15T08:40:00", NOW + 2_400_000),
        ("2027-01-15T08:25:52", NOW + 3_600_000 - 2_048_000),
        ("2027-01-15T08:25:48", NOW + 3_600_000 - 2_048_000),
        ("2027-01-15T08:00:00", NOW + 3_600_000),  # the eta of an earlier sending
        (None, NOW + 3_600_000),
        ("soon", NOW + 3_600_000),
    ],
)
def test_a_task_of_celery(eta: object, due_ms: int) -> None:
    assert due_at_level(Cascade("celery"), 11, routing_key(HOUR, b"celery"), {b"eta": eta}, NOW) == due_ms


def test_a_message_of_our_own_cascade_contains_its_due_instant() -> None:
    said = {b"x-delayer-due": NOW + 3_000_000}
    assert due_at_level(Cascade(), 11, routing_key(HOUR, b"q"), said, NOW) == NOW + 3_000_000


@given(
    kind=st.sampled_from(CASCADE_KINDS),
    delay=st.integers(1, MAX_SECONDS),
    pick=st.integers(0, LEVELS),
    waited=st.floats(0, 1),
    sent_ms=st.integers(1_500_000_000_000, 1_900_000_000_000),
    lag_ms=st.lists(st.integers(0, levels.CLOCKS_MS // LEVELS), min_size=LEVELS, max_size=LEVELS),
    noted=st.booleans(),
    says=st.booleans(),
)
def test_the_due_instant_is_never_early_and_as_soon_as_known(
    kind: Kind, delay: int, pick: int, waited: float, sent_ms: int, lag_ms: list[int], noted: bool, says: bool
) -> None:
    """A message passes its levels, a little late at each, and is found in one of them."""
    cascade = Cascade(kind)
    path = [level for level in reversed(range(LEVELS)) if delay >> level & 1]
    met = pick % len(path)
    came_ms, died = sent_ms, []
    for level in path[:met]:
        came_ms += (1000 << level) + lag_ms[level]
        died = [*death(cascade.level(level), came_ms // 1000), *died]
    now_ms = came_ms + int(waited * (1000 << path[met]))
    headers: dict[bytes, object] = {X_DEATH: died} if noted and died else {}
    if says and kind.startswith("nservicebus"):
        headers |= sent(delay, sent_ms)
    due_ms = due_at_level(cascade, path[met], routing_key(delay, b"a"), headers, now_ms)
    late_ms = due_ms - (sent_ms + delay * 1000)
    assert late_ms >= 0
    if X_DEATH in headers or DELAY_IN_SECONDS in headers:
        assert late_ms <= 1000 + sum(lag_ms)
    else:
        assert late_ms <= (1000 << path[met]) + sum(lag_ms)


@given(
    delay=st.integers(1, MAX_SECONDS), waited=st.floats(0, 1), old_s=st.integers(0, 400_000_000), expires=st.booleans()
)
def test_an_old_time_sent_is_ignored(delay: int, waited: float, old_s: int, expires: bool) -> None:
    """A message waits again with the TimeSent of its first sending. It is early by at most the age of that sending, and
    only if the first sending could be this one."""
    level = delay.bit_length() - 1
    now_ms = NOW + int(waited * (1000 << level))
    headers = sent(delay, NOW - old_s * 1000)
    if expires:
        headers[EXPIRE] = wire_instant(NOW + delay * 1000)
    due_ms = due_at_level(NSB, level, routing_key(delay, b"a"), headers, now_ms)
    early_ms = NOW + delay * 1000 - due_ms
    believed = NOW + (delay - old_s) * 1000 >= now_ms + (delay - (1 << level)) * 1000 - levels.CLOCKS_MS
    assert early_ms <= (old_s * 1000 if believed and not expires else 0)
