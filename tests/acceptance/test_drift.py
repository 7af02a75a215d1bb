"""Objects lost by the broker while the daemon runs are restored and logged. If one cannot be restored, the daemon is
unready."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote

import pytest

from tests.acceptance.conftest import Notices
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.test_http import ANY_PORT
from tests.acceptance.test_store_bond import refusal
from tests.acceptance.world import BROKER_SECRET, USER
from tests.support.daemon import DaemonProcess
from tests.support.place import eventually
from tests.support.store import sql
from tests.support.web import Web

PROGRAM = (
    sys.executable,
    "-c",
    "from delayer.daemon import drift; drift.ROUND_SECONDS = 0.3\nfrom delayer.cli.main import main; main()",
)
"""The daemon with three rounds a second instead of one a minute."""
GONE = 503


@asynccontextmanager
async def watched(place: OwnVhost, environ: dict[str, str]) -> AsyncIterator[tuple[DaemonProcess, Web]]:
    """A ready daemon with many rounds, and its health."""
    async with DaemonProcess(environ | ANY_PORT, program=PROGRAM) as daemon:
        web = await Web.of(await daemon.ready())
        assert await reasons(web, 200) == []
        yield daemon, web


async def reasons(web: Web, status: int) -> Any:
    """Why the daemon is not ready, as soon as /health/ready answers with this status."""
    answer = await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == status)
    return answer.json["reasons"]


def rights(place: OwnVhost, configure: str) -> None:
    place.rabbitmq.add_user(USER, BROKER_SECRET, vhost=place.vhost, configure=configure, read=".*", write=".*")


async def restored(daemon: DaemonProcess, part: str) -> dict[str, Any]:
    return await daemon.event("topology restored", where=lambda event: part in event["parts"].split(", "))


async def test_lost_exchanges_and_queues_come_back(place: OwnVhost) -> None:
    async with watched(place, place.environ("native")) as (daemon, web), await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        for kind, name in (
            ("exchange", "in"), ("queue", "delays.refused"), ("queue", "delays"),
            ("queue", "delayer.delay-level-05"), ("exchange", "delayer.delay-level-05"),
        ):  # fmt: skip
            place.things._call("DELETE", f"{kind}s", name)
            told = await restored(daemon, f"{kind} {name}")
            assert "a policy with `expires`" in told["next_step"]
            assert await reasons(web, 200) == []  # It consumes again, so it no longer declares anything.
        await raw.publish(delayed("through", 1_000))
        await inbox.got([b"through"])
        assert await daemon.stop() == 0


@pytest.mark.parametrize("managed", [True, False])
async def test_a_lost_binding_comes_back(place: OwnVhost, store: str, managed: bool) -> None:
    """AMQP does not show that it was lost."""
    environ = place.environ("store", store)
    if managed:
        environ["BROKER__MANAGEMENT_URL"] = place.rabbitmq.management_url
    async with watched(place, environ) as (daemon, _), await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        at = f"/api/bindings/{quote(place.vhost, safe='')}/e/in/q/delays"

        def lost() -> bool:
            """Delete it, and again if a round that had already looked for it restored it without a word."""
            for binding in place.rabbitmq.api("GET", at):
                place.rabbitmq.api("DELETE", f"{at}/{binding['properties_key']}")
            return not managed or any(event["event"] == "topology restored" for event in daemon.events)

        await eventually(lost)
        if managed:
            await restored(daemon, "binding in -> queue delays with key '#'")
        await eventually(lambda: place.rabbitmq.api("GET", at))
        await raw.publish(delayed("through", 100))
        await inbox.got([b"through"])
        assert await daemon.stop() == 0
        assert managed or not [event for event in daemon.events if event["event"] == "topology restored"]


async def test_a_part_that_cannot_be_restored_makes_the_daemon_unready(
    place: OwnVhost, store: str, notices: Notices
) -> None:
    async with watched(place, place.environ("store", store)) as (daemon, web):
        rights(place, r"^(?!delays\.refused$).*")
        place.things._call("DELETE", "queues", "delays.refused")
        place.things._call("DELETE", "exchanges", "in")
        (reason,) = await reasons(web, GONE)
        assert reason.startswith("the topology is not in place: ")
        assert "'delays.refused': ACCESS_REFUSED" in reason
        assert "this permission" in (await daemon.event("topology not in place"))["next_step"]
        await eventually(lambda: notices.said("STATUS=", "the topology is not in place"))
        assert (await web.metrics())["delayer_ready",] == 0
        place.things.queue("delays.refused", "classic")
        rights(place, ".*")
        told = await daemon.event("topology not in place", where=lambda event: "x-queue-type" in event["reason"])
        assert told["next_step"] == "delayer topology verify"
        (reason,) = await reasons(web, GONE)
        assert "error: queue delays.refused: expected" in reason
        place.things._call("DELETE", "queues", "delays.refused")
        await restored(daemon, "queue delays.refused")
        await daemon.event("topology in place")
        assert await reasons(web, 200) == []
        assert await daemon.stop() == 0


async def test_a_part_that_is_lost_again_and_again_makes_the_daemon_unready(place: OwnVhost) -> None:
    """The queue keeps disappearing, as with a policy with a short ``expires``."""
    again = "the topology is not in place: lost again after the daemon restored it: queue delays.refused"
    async with watched(place, place.environ("native")) as (daemon, web):

        async def delete() -> bool:
            with suppress(RuntimeError):  # The queue is gone.
                place.things._call("DELETE", "queues", "delays.refused")
            return (await web.get("/health/ready")).json["reasons"] == [again]

        await eventually(delete)
        told = await daemon.event("topology not in place", where=lambda event: event["reason"] == again)
        assert "a policy with `expires`" in told["next_step"]
        assert await reasons(web, 200) == []
        assert await daemon.stop() == 0


async def test_the_mark_of_the_store_comes_back(place: OwnVhost, store: str) -> None:
    async with watched(place, place.environ("store", store)) as (daemon, web):
        exchange = f"delayer.store.{await id_of(store)}"
        place.things._call("DELETE", "exchanges", exchange)
        await restored(daemon, f"exchange {exchange}")
        assert await reasons(web, 200) == []
        assert await daemon.stop() == 0
    async with watched(place, place.environ("store", store)):
        pass


async def test_a_daemon_leaves_a_store_that_was_given_to_another_broker(place: OwnVhost, store: str) -> None:
    """`--accept-broker` waits for live daemons, but not for one that has lost the store at that moment."""
    async with watched(place, place.environ("store", store)) as (daemon, web):
        async with sql(store) as connection:
            await connection.execute("UPDATE store SET id = 'another'")
        assert await refusal(daemon)
        assert "nothing is delivered: no connection to publish by" in await reasons(web, GONE)
        await daemon.event("lane dropped")


async def id_of(store: str) -> str:
    async with sql(store) as connection:
        return str(await connection.fetchval("SELECT id FROM store"))
