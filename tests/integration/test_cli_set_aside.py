"""`delayer strays` and `delayer refused`: more messages than a look takes, and looks that change nothing."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from delayer.amqp import edits, reading
from delayer.cli.set_aside import refused_of
from delayer.config.loading import load
from delayer.core import cascade
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Delivery, Parcel, Target
from delayer.intake import set_aside
from tests.faults.place import eventually
from tests.integration.cli import Run, ids, take
from tests.support.raw import Message, Props, Raw, number, text
from tests.support.servers import RabbitMQ

QUEUE = b"delayer.delay-strays"


def envelope(number: int, reason: str, body: bytes = b"body") -> tuple[Parcel, bytes]:
    """A message that is held, and the properties that it stands among the strays with."""
    now_ms = time.time_ns() // 1_000_000
    parcel = Parcel(now_ms, b"in", b"in", b"k", Target(b"out", b"k"), b"\0\0", body, None)
    held = edits.Held(Hold(HoldKind.RETURNED, reason), 10, None)
    return parcel, edits.enveloped(parcel, b"%032x" % number, held)


@pytest.mark.words
async def test_messages_beyond_the_look_are_reported(delayer: Run, vhost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_aside, "KEPT", 6)
    delayer("--mode", "native", "topology", "apply")
    async with await Raw.connect(vhost) as raw:

        async def stand(numbers: range) -> None:
            reasons = {n: "312" if n % 2 else "late: by 9 s" for n in numbers}
            await raw.publish(*(Message("", QUEUE, envelope(n, why)[1], b"body") for n, why in reasons.items()))

        await stand(range(6))
        assert "looked at" not in delayer("strays", "list").stderr
        await stand(range(6, 10))
        listed = delayer("strays", "list", "--json")
        assert (json.loads(listed.stdout)["depth"], len(json.loads(listed.stdout)["messages"])) == (10, 6)
        assert "The queue has 10 strays; only the first 6 were looked at" in delayer("strays", "list").stderr
        some = delayer("strays", "drop", "--reason", "late", "--yes", expect=1)
        assert "Dropped: 3." in some.stdout and "10 strays" in some.stderr
        far = delayer("strays", "drop", f"{9:032x}", expect=1)  # behind those that are looked at
        assert "0 of" in far.stdout and "were looked at" in far.stderr
        assert "Dropped: 6." in delayer("strays", "drop", "--all", "--yes", expect=1).stdout
        assert "Dropped: 1." in delayer("strays", "drop", "--all", "--yes").stdout


@pytest.mark.words
async def test_a_reason_selects_among_strays_without_an_id(delayer: Run, vhost: str) -> None:
    delayer("--mode", "native", "topology", "apply")
    newer = Props(headers=((b"x-delayer-envelope", number("l", 99)),), delivery_mode=2)
    async with await Raw.connect(vhost) as raw:
        await raw.publish(Message("", QUEUE, Props(delivery_mode=2), b"none"), Message("", QUEUE, newer, b"newer"))
    listed = json.loads(delayer("--mode", "native", "strays", "list", "--json").stdout)["messages"]
    reasons = {one["body"]: one["reason"] for one in listed}
    assert reasons.keys() == {"none", "newer"} and len(set(reasons.values())) == 2, reasons
    assert "Dropped: 1." in delayer("--mode", "native", "strays", "drop", "--reason", reasons["newer"], "--yes").stdout
    (left,) = json.loads(delayer("--mode", "native", "strays", "list", "--json").stdout)["messages"]
    assert left["body"] == "none"


def test_store_mode_has_none(delayer: Run) -> None:
    assert "There are no strays." in delayer("--mode", "store", "strays", "list").stdout
    assert "`delayer topology apply`" in delayer("--mode", "native", "strays", "list", expect=1).stderr


@pytest.mark.words
def test_only_the_beginning_of_a_large_stray_is_kept() -> None:
    parcel, properties = envelope(1, "312", b"x" * 1_000_000)
    delivery = Delivery(1, False, b"", QUEUE, properties, parcel.body)
    read = edits.stray(delivery, b"delayer.delay-delivery", b"delays.due", 10_000)
    shown = set_aside.Stray.of(delivery, read)
    assert len(pickle.dumps(shown)) < 1_000
    assert (shown.size, shown.hold.text) == (1_000_000, "312")


LIMIT = 20
"""Deliveries after which the broker deletes a message of a quorum queue, where nothing else is said (RabbitMQ 4)."""
LOOKS = LIMIT + 5
COUNT = 5


@pytest.mark.parametrize("store", ["with a store", "without a store"])
@pytest.mark.parametrize("verb", ["refused", "strays"])
async def test_looks_neither_delete_nor_reorder(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch, verb: str, store: str
) -> None:
    monkeypatch.setattr(cascade, "DELIVERY_LIMIT", LIMIT)
    environ: dict[str, str | None] = {"DELAYER_MODE": "native"}
    if store == "without a store":
        environ["DELAYER_STORE__URL"] = None
    if rabbitmq.counts_only_failed_deliveries:  # then not even a policy of such a limit does harm
        rabbitmq.api(
            "PUT",
            f"/api/policies/{urlsplit(vhost).path[1:]}/limit",
            {"pattern": ".*", "definition": {"delivery-limit": LIMIT}, "apply-to": "queues"},
        )
    delayer("topology", "apply", **environ)
    async with await Raw.connect(vhost) as raw:
        strays = [Message("", QUEUE, envelope(n, "312")[1], b"%d" % n) for n in range(COUNT)]
        await raw.publish(*(refused_ones(COUNT) if verb == "refused" else strays))
        names = [f"delayer.in-{n}" if verb == "refused" else f"{n:032x}" for n in range(COUNT)]

        async def listed() -> list[str]:
            # The broker may still be returning the messages of the look before.
            return ids(delayer, verb, "list", **environ)

        for _ in range(LOOKS):
            await eventually(listed, lambda found: found == names)


@pytest.fixture
def applied(delayer: Run) -> Iterator[Run]:
    delayer("topology", "apply")
    yield delayer


def refused_ones(count: int, exchange: str = "delayer.in", reason: str = "too long") -> list[Message]:
    """As the daemon puts them there."""
    return [
        Message(
            "delays.refused",
            b"orders.eu",
            Props(
                headers=(
                    (b"who", text("me")),
                    (b"x-delayer-id", text(f"{exchange}-{n}")),
                    (b"x-delayer-refused", text(reason)),
                    (b"x-delayer-exchange", text(exchange)),
                    (b"x-delayer-routing-key", text("orders.eu")),
                    (b"x-delayer-expiration", text("600000")),
                ),
                delivery_mode=2,
            ),
            b"%s %d" % (exchange.encode(), n),
        )
        for n in range(count)
    ]


async def test_refused_ones_are_listed_and_published_again(applied: Run, vhost: str) -> None:
    assert "No messages are refused." in applied("refused", "list").stdout
    async with await Raw.connect(vhost) as raw:
        await raw.publish(*refused_ones(250), *refused_ones(3, "missing", "wrong"))
    assert len(ids(applied, "refused", "list", "--limit", "500")) == 253

    async def listed() -> list[str]:
        # The broker may still be returning the messages of the look before.
        return ids(applied, "refused", "list", "--reason", "wro", "--limit", "500")

    await eventually(listed, lambda found: found == ["missing-0", "missing-1", "missing-2"])
    assert "the first 50 were looked at" in applied("refused", "list").stderr
    assert "250 of 253 refused messages match" in applied("refused", "retry", "--reason", "long", "--dry-run").stdout
    assert "Published again: 1." in applied("refused", "retry", "delayer.in-7").stdout
    failed = applied("refused", "retry", "--all", "--yes", expect=1)
    assert "Published again: 249." in failed.stdout
    assert failed.stderr.count("stays refused: it says that it came in through 'missing', and no route") == 3
    back = await take(vhost, "delays")
    assert sorted(one.body for one in back) == sorted(b"delayer.in %d" % n for n in range(250))
    for one in back:
        assert (one.exchange, one.routing_key, one.expiration) == ("delayer.in", "orders.eu", 600.0)
        # What the broker counts, now that they are delivered from a quorum queue again.
        counts = {"x-delivery-count", "x-acquired-count"}
        assert one.headers.keys() - counts == {"who", "x-delayer-id"}
    assert len(ids(applied, "refused", "list")) == 3
    told = json.loads(applied("audit-log", "--json").stdout)
    assert [(one["verb"], one["messages"]) for one in told] == [("refused retry", 249), ("refused retry", 1)]


async def test_large_ones_are_looked_at_without_being_kept(applied: Run, vhost: str) -> None:
    """The page shows them too, and it lives in the daemon: fifty of 100 MB must not be in its memory."""
    (one,) = refused_ones(1)
    async with await Raw.connect(vhost) as raw:
        await raw.publish(*(one._replace(body=b"\xc3\xa4" * 150_000) for _ in range(3)))
    settings = load(None, {}, {"broker.url": vhost})
    seen = await refused_of(settings).look(limit=2)
    found = seen.found
    assert (len(found), seen.depth) == (2, 3)
    assert {one.size for one in found} == {300_000}
    assert all(len(one.head) <= reading.PREVIEW + 1 for one in found)
    (told, *_) = json.loads(applied("refused", "list", "--json").stdout)["messages"]
    assert told["body_bytes"] == 300_000
    assert told["body"] == "\u00e4" * (reading.PREVIEW // 2)


async def test_refused_ones_are_dropped(applied: Run, vhost: str) -> None:
    async with await Raw.connect(vhost) as raw:
        await raw.publish(*refused_ones(5), *refused_ones(3, "other"))
    applied("refused", "drop", expect=2)
    applied("refused", "drop", "--all", "--from", "other", expect=2)
    assert "Dropped: 3." in applied("refused", "drop", "--from", "other", "--yes").stdout
    nobody = applied("refused", "drop", "nobody", "--yes", expect=1)
    assert '"nobody" was not found' in nobody.stderr
    assert ids(applied, "refused", "list") == [f"delayer.in-{n}" for n in range(5)]
    assert "Dropped: 5." in applied("refused", "drop", "--all", "--yes").stdout
    assert await take(vhost, "delays.refused") == []
    assert await take(vhost, "delays") == []
