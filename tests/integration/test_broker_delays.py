"""A quorum queue whose messages RabbitMQ 4.4 itself delays, by ``x-opt-delivery-time``, never counts as empty."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import aio_pika
import pytest

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerUnreachable
from delayer.core.cascade import Cascade, due_topology, intake_topology
from tests.integration.cli import Run, channel_to
from tests.support.servers import RabbitMQ

WHOLE = intake_topology() + Cascade().topology() + due_topology(Cascade())
QUEUES = [queue.name for queue in WHOLE.queues]
HOUR_MS = 3_600_000


async def publish(vhost: str, *queues: str, when: int | None = None) -> None:
    """Publish a message to each queue, which the broker delays by an hour; and declare the destination for `check`."""
    at = time.time_ns() // 1_000_000 + HOUR_MS if when is None else when
    async with channel_to(vhost) as channel:
        await channel.declare_exchange("delayer.out", "topic", durable=True)
        for queue in queues:
            message = aio_pika.Message(b"hidden", headers={"x-opt-delivery-time": at}, message_id=queue)
            await channel.default_exchange.publish(message, queue)


def told(rabbitmq: RabbitMQ) -> dict[str, str]:
    return {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url, "DELAYER_MODE": "native"}


async def test_no_queue_with_a_delayed_message_is_removed_unless_forced(
    delayer: Run, delaying: RabbitMQ, vhost: str
) -> None:
    delayer("topology", "apply", **told(delaying))
    await publish(vhost, *QUEUES)
    unknown = delayer("topology", "remove", expect=1, DELAYER_MODE="native")
    assert unknown.stdout.count("only broker.management_url can show them") == len(QUEUES)
    for kind in ("refused", "strays"):  # They see no such message, and end none.
        delayer(kind, "drop", "--all", "--yes", expect=1, **told(delaying))
    hidden = "holds 1 message that the broker itself delays"
    cascade = delayer("topology", "remove", "--only-cascade", expect=1, **told(delaying))
    assert cascade.stdout.count(hidden) == len(QUEUES) - len(intake_topology().queues)
    kept = delayer("topology", "remove", expect=1, **told(delaying))
    assert kept.stdout.count(hidden) == len(QUEUES)
    delayer("topology", "verify", **told(delaying))
    delayer("topology", "remove", "--force", **told(delaying))
    delayer("topology", "verify", expect=1, **told(delaying))


async def test_check_and_drain_name_queues_with_delayed_messages(delayer: Run, delaying: RabbitMQ, vhost: str) -> None:
    delayer("db", "upgrade")
    delayer("topology", "apply", **told(delaying))
    await publish(vhost, *QUEUES)
    to_store = {**told(delaying), "DELAYER_MODE": "store"}
    drained = json.loads(delayer("drain", "--to", "store", "--yes", "--json", **to_store).stdout)
    outside = {"delays", "delays.refused"}
    assert {row["where"] for row in drained["left"]} == {f"queue {name}" for name in QUEUES if name not in outside}
    rows = json.loads(delayer("check", "--json", **told(delaying)).stdout)["checks"]
    delays = [row for row in rows if row["what"] == "broker's delays"]
    assert {row["found"].split('"')[1] for row in delays} == set(QUEUES)
    # In the due queue the broker delays the daemon's own messages.
    assert [row["found"].split('"')[1] for row in delays if "x-deliver-at" not in row["advice"]] == ["delays.due"]


@pytest.mark.parametrize("source", ["hold-queues", "cascade"])
async def test_an_import_names_the_messages_that_its_source_delays(
    delayer: Run, delaying: RabbitMQ, vhost: str, source: str
) -> None:
    delayer("db", "upgrade")
    delayer("topology", "apply", **told(delaying))
    queue = "held.60s" if source == "hold-queues" else Cascade().level(20)
    async with channel_to(vhost) as channel:
        if source == "hold-queues":
            arguments: dict[str, Any] = {
                "x-queue-type": "quorum",
                "x-message-ttl": 7_200_000,
                "x-dead-letter-exchange": "",
            }
            await channel.declare_queue(queue, durable=True, arguments=arguments)
    await publish(vhost, queue)
    chosen = ["--queue", queue] if source == "hold-queues" else []
    run = delayer("import", source, "run", *chosen, "--yes", "--unverified", "--json", expect=1, **told(delaying))
    (left,) = json.loads(run.stdout)["left"].items()
    assert left == ("that their broker delays itself: not examined before they are due", 1)


async def test_a_queue_that_a_publisher_ended_is_off(delayer: Run, delaying: RabbitMQ, vhost: str) -> None:
    """The publisher gave microseconds in place of milliseconds. Some builds survive that, and the message waits."""
    delayer("db", "upgrade")
    delayer("topology", "apply", **told(delaying))
    await publish(vhost, "delays.refused", when=time.time_ns() // 1_000)
    async with await Admin.connect(vhost, management_url=delaying.management_url) as admin:
        await admin.delayed(["delays.refused"])  # By then its process has ended.
        findings = [one.name for one in await admin.verify(WHOLE) if one.state == "down"]
    if not findings:
        pytest.skip("this build survives such a time")
    assert findings == ["delays.refused"]
    rows = json.loads(delayer("check", "--json", expect=1, **told(delaying)).stdout)["checks"]
    (off,) = [row for row in rows if row["result"] == "off"]
    assert "down: it gives" in off["found"] and "docs/versions.md" in off["advice"]


class Api:
    """A management API with this answer, or one out of reach."""

    def __init__(self, *answer: dict[str, int]) -> None:
        self._answer = answer

    async def delayed(self) -> dict[str, int]:
        if not self._answer:
            raise BrokerUnreachable("gone")
        return self._answer[0]


@pytest.mark.parametrize(
    ("version", "api", "found"),
    [
        ((3, 10, 8), None, 0), ((4, 2, 1), Api(), 0), ((4, 3, 0), None, None), ((4, 4, 0), Api(), None),
        ((4, 4, 0), Api({}), 0), ((4, 4, 0), Api({"delays": 7}), 7),
    ],
)  # fmt: skip
async def test_an_unknown_count_is_not_reported_as_empty(version: tuple[int, ...], api: Any, found: int | None) -> None:
    link: Any = SimpleNamespace(version=version)
    assert await Admin(link, api).delayed(["delays"], fresh=False) == {"delays": found}
