"""`delayer strays` and `delayer refused`: more messages than a look takes, and looks that change nothing."""

from __future__ import annotations

import json
import pickle
import time
from urllib.parse import urlsplit

import pytest

from delayer.amqp import edits
from delayer.core import cascade
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Delivery, Parcel, Target
from delayer.intake import set_aside
from tests.faults.place import eventually
from tests.integration.cli import Run
from tests.support.raw import Message, Props, Raw, number, text
from tests.support.servers import RabbitMQ

QUEUE = b"delayer.delay-strays"


def envelope(number: int, reason: str, body: bytes = b"body") -> tuple[Parcel, bytes]:
    """A message that is held, and the properties that it stands among the strays with."""
    now_ms = time.time_ns() // 1_000_000
    parcel = Parcel(now_ms, b"in", b"in", b"k", Target(b"out", b"k"), b"\0\0", body, None)
    held = edits.Held(Hold(HoldKind.RETURNED, reason), 10, None)
    return parcel, edits.enveloped(parcel, b"%032x" % number, held)


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


def stray(number: int) -> Message:
    parcel = Parcel(1, b"in", b"in", b"k", Target(b"out", b"k"), b"\0\0", b"%d" % number)
    properties = edits.enveloped(parcel, b"%032x" % number)
    return Message("", b"delayer.delay-strays", properties, parcel.body)


def refused(number: int) -> Message:
    headers = ((b"x-delayer-id", text(f"{number:032x}")), (b"x-delayer-refused", text("x-delay: found 'soon'")))
    return Message("", b"delays.refused", Props(headers=headers, delivery_mode=2), b"%d" % number)


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
        await raw.publish(*((refused if verb == "refused" else stray)(n) for n in range(COUNT)))

        async def listed() -> list[int]:
            # The broker may still be returning the messages of the look before.
            return [
                int(one["id"], 16) for one in json.loads(delayer(verb, "list", "--json", **environ).stdout)["messages"]
            ]

        for _ in range(LOOKS):
            await eventually(listed, lambda numbers: numbers == list(range(COUNT)))
