"""Looks at refused messages and at strays: any number of them deletes nothing and reorders nothing."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest

from delayer.amqp import edits
from delayer.core import cascade
from delayer.core.message import Parcel, Target
from tests.faults.place import eventually
from tests.integration.test_cli import Run, delayer
from tests.support.raw import Message, Props, Raw, text
from tests.support.servers import RabbitMQ

__all__ = ["delayer"]

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
