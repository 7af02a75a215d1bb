"""A quorum queue whose messages RabbitMQ 4.4 itself delays, by ``x-opt-delivery-time``, never counts as empty."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import aio_pika
import pytest
from click.testing import Result

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerUnreachable
from delayer.core.cascade import Cascade, due_topology, intake_topology
from tests.integration.cli import Run, channel_to
from tests.support.place import counted
from tests.support.servers import RabbitMQ
from tests.support.topology import declare

WHOLE = intake_topology() + Cascade().topology() + due_topology(Cascade())
QUEUES = [queue.name for queue in WHOLE.queues]
OTHERS = [Cascade("nservicebus-v2"), Cascade("celery")]
"""The cascades of other systems, which imports empty, and a daemon with takeovers."""
TAKEOVERS = json.dumps([{"cascade": cascade.kind, "levels_from": 6} for cascade in OTHERS])
HOUR_MS = 3_600_000
HOLDING: dict[str, Any] = {"x-queue-type": "quorum", "x-message-ttl": 7_200_000, "x-dead-letter-exchange": ""}


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


def names(run: Result, pattern: str) -> int:
    """How often the pattern occurs in the output; runs of blanks are treated as one."""
    return len(re.findall(pattern, " ".join(run.output.split())))


SET_ASIDE: Mapping[str, tuple[int, int]] = {
    f"{queue} {verb}": (0, 1)
    for queue in ("refused", "strays")
    for verb in ("list", "retry --all --yes", "drop --all --yes")
}
VERBS: Mapping[str, tuple[int, int]] = {
    "status": (0, len(QUEUES)),
    "topology show": (0, len(QUEUES)),
    "check": (0, len(QUEUES) + len(OTHERS)),
    "topology remove": (1, len(QUEUES)),
    "topology remove --only-cascade": (1, len(QUEUES) - len(intake_topology().queues)),
    **SET_ASIDE,
    "--mode store drain --to store --yes": (0, len(QUEUES) - len(intake_topology().queues)),
    "import cascade preview": (1, 1),
    "import cascade run --yes --unverified": (1, 1),
    "import cascade run --yes --unverified --kind nservicebus-v2": (1, 1),
    "import cascade run --yes --unverified --kind celery": (1, 1),
    "import hold-queues preview --queue held.60s": (1, 1),
    "import hold-queues run --yes --unverified --queue held.60s": (1, 1),
}
"""Every verb that reads, deletes or empties a queue of delayer or an import: its exit code, and how often it mentions
messages delayed by the broker, one in each queue."""
NAMED = '(the broker itself|their broker) delays|, delayed or forwarded by RabbitMQ itself 1|1 (wait )?in "'
HELD = "--queue held.60s --ttl 2h --exchange= --routing-key work"
UNTOLD: Mapping[str, tuple[int, int]] = {
    "status": (0, 1),
    "topology show": (0, 1),
    "check": (0, 1),
    "topology remove": (1, len(QUEUES)),
    "topology remove --only-cascade": (1, len(QUEUES) - len(intake_topology().queues)),
    **SET_ASIDE,
    "--mode store drain --to store --dry-run": (0, 1),
    "--mode store drain --to store --yes": (0, 1),
    "import cascade preview": (0, 1),
    "import cascade run --yes --unverified": (0, 1),
    "import cascade run --yes --unverified --kind nservicebus-v2": (0, 1),
    "import cascade run --yes --unverified --kind celery": (0, 1),
    f"import hold-queues preview {HELD}": (0, 1),
    f"import hold-queues run --yes --unverified {HELD}": (0, 1),
}
"""The same verbs without a management API: how often each says that it does not know what the broker delays."""
UNKNOWN = (
    "broker.management_url is not set, or gives no count|see broker.management_url|"
    "no management URL, answer or count yet|only its management API shows"
)
EMPTY = (
    "There are no (refused|strays)|Nothing (is|would be) left|delayed or forwarded by RabbitMQ itself up to 12 s ago 0"
)


@pytest.mark.deadline(240)
async def test_no_verb_deletes_a_delayed_message_or_calls_its_queue_empty(
    delayer: Run, delaying: RabbitMQ, vhost: str
) -> None:
    delayer("db", "upgrade")
    delayer("topology", "apply", **told(delaying))
    await declare(vhost, *(cascade.topology() for cascade in OTHERS))
    async with channel_to(vhost) as channel:
        await channel.declare_queue("held.60s", durable=True, arguments=HOLDING)
    whole = [*QUEUES, "held.60s", *(cascade.level(20) for cascade in OTHERS)]
    await publish(vhost, *whole)
    await counted(delaying, vhost)
    known = {**told(delaying), "DELAYER_TAKEOVER": TAKEOVERS}
    # The broker's counts may not include these messages yet.
    for kind in ("refused", "strays"):
        run = delayer(kind, "list", **known)
        assert names(run, "up to 12 s ago|the broker itself delays") == 1 and not names(run, EMPTY), run.output
    for verb, (code, unknown) in UNTOLD.items():
        run = delayer(*verb.split(), expect=code, DELAYER_MODE="native", DELAYER_TAKEOVER=TAKEOVERS)
        assert names(run, UNKNOWN) == unknown and not names(run, EMPTY), f"{verb}: {run.output}"
    async with await Admin.connect(vhost, management_url=delaying.management_url) as admin:
        assert set((await admin.delayed(whole)).values()) == {1}  # After that the broker's counts include them.
    for verb, (code, named) in VERBS.items():
        run = delayer(*verb.split(), expect=code, **known)
        assert names(run, NAMED) == named and not names(run, EMPTY), f"{verb}: {run.output}"
    for kind in ("refused", "strays"):
        assert json.loads(delayer(kind, "list", "--json", **told(delaying)).stdout)["delayed"] == 1
    delayer("topology", "verify", **told(delaying))
    async with channel_to(vhost) as channel:
        for name in whole:  # A purge counts them.
            assert (await (await channel.get_queue(name)).purge()).message_count == 1, name


async def test_force_removes_delayed_messages(delayer: Run, delaying: RabbitMQ, vhost: str) -> None:
    delayer("topology", "apply", **told(delaying))
    await publish(vhost, *QUEUES)
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
            await channel.declare_queue(queue, durable=True, arguments=HOLDING)
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
    """A management API with this answer, or an unreachable one."""

    def __init__(self, *answer: dict[str, int]) -> None:
        self._answer = answer

    async def delayed(self, _queues: object) -> dict[str, int]:
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
