"""Limits of virtual hosts and users, and long names of virtual hosts: the next step names them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.integration.cli import Run
from tests.support.daemon import DaemonProcess
from tests.support.servers import RabbitMQ

RAISE = "raise the limit of the virtual host"
COMMANDS = (
    ("check",), ("topology", "verify"), ("topology", "apply"), ("topology", "show"), ("send", "--delay", "1s"),
    ("refused", "list"), ("strays", "list"), ("status",),
)  # fmt: skip


@pytest.fixture
def small(rabbitmq: RabbitMQ, vhost_name: str) -> Iterator[str]:
    """The URL of a user with all permissions in the vhost, for whom the test can set limits."""
    rabbitmq.api("PUT", "/api/users/small", {"password": "small", "tags": ""})
    rights = {"configure": ".*", "write": ".*", "read": ".*"}
    rabbitmq.api("PUT", f"/api/permissions/{vhost_name}/small", rights)
    yield rabbitmq.url(vhost_name, user="small:small")
    rabbitmq.api("DELETE", "/api/users/small")


def limit(rabbitmq: RabbitMQ, of: str, name: str, value: int) -> None:
    rabbitmq.api("PUT", f"/api/{of}/{name}", {"value": value})


async def daemon_says(url: str, event: str, *, mode: str = "native") -> dict[str, str]:
    async with DaemonProcess({"MODE": mode, "BROKER__URL": url}) as daemon:
        return await daemon.event(event)


async def test_a_limit_of_queues_is_not_reported_as_a_difference(
    delayer: Run, rabbitmq: RabbitMQ, vhost: str, vhost_name: str
) -> None:
    limit(rabbitmq, f"vhost-limits/{vhost_name}", "max-queues", 10)
    native = {"DELAYER_MODE": "native", "DELAYER_STORE__URL": None}
    told = delayer("topology", "apply", expect=3, **native).stderr
    assert "queue limit in vhost" in told and RAISE in told
    assert "differ" not in told and "delete" not in told
    rows = json.loads(delayer("check", "--json", expect=1, **native).stdout)["checks"]
    assert [one["result"] for one in rows if one["what"] == "topology"] == ["note", "note"]
    async with DaemonProcess({"MODE": "native", "BROKER__URL": vhost}) as daemon:
        event = await daemon.event("consuming interrupted")
        assert "queue limit in vhost" in event["reason"] and RAISE in event["next_step"]
        rabbitmq.api("DELETE", f"/api/vhost-limits/{vhost_name}/max-queues")
        await daemon.ready()


async def test_a_difference_is_reported_even_if_a_limit_is_reached(
    delayer: Run, rabbitmq: RabbitMQ, vhost_name: str
) -> None:
    arguments = {"durable": True, "arguments": {"x-queue-type": "classic"}}
    rabbitmq.api("PUT", f"/api/queues/{vhost_name}/delays", arguments)
    limit(rabbitmq, f"vhost-limits/{vhost_name}", "max-queues", 1)
    told = delayer("topology", "apply", expect=1).stderr
    assert "queue delays: expected" in told and "queue limit" not in told


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_limit_of_connections_is_named(
    delayer: Run, rabbitmq: RabbitMQ, vhost_name: str, command: tuple[str, ...]
) -> None:
    limit(rabbitmq, f"vhost-limits/{vhost_name}", "max-connections", 0)
    told = delayer(*command, expect=3).output.replace("\n", " ")
    assert "connection limit (0) is reached" in told and RAISE in told
    assert "password" not in told


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("name", "says"), [("max-connections", "user connection limit (0)"), ("max-channels", "user limit of (0)")]
)
def test_a_limit_of_the_user_is_named(
    delayer: Run, rabbitmq: RabbitMQ, small: str, name: str, says: str, command: tuple[str, ...]
) -> None:
    limit(rabbitmq, "user-limits/small", name, 0)
    told = delayer(*command, expect=3, DELAYER_BROKER__URL=small).output.replace("\n", " ")
    assert says in told and RAISE in told
    assert "that the broker runs" not in told and "password" not in told


@pytest.mark.parametrize(
    ("name", "event"), [("max-connections", "broker refused"), ("max-channels", "consuming interrupted")]
)
async def test_the_daemon_names_a_limit_of_its_user(rabbitmq: RabbitMQ, small: str, name: str, event: str) -> None:
    limit(rabbitmq, "user-limits/small", name, 0)
    said = await daemon_says(small, event)
    assert "limit" in said["reason"] and RAISE in said["next_step"]


async def test_the_daemon_names_a_limit_of_connections(rabbitmq: RabbitMQ, vhost: str, vhost_name: str) -> None:
    limit(rabbitmq, f"vhost-limits/{vhost_name}", "max-connections", 0)
    said = await daemon_says(vhost, "broker refused")
    assert "connection limit (0) is reached" in said["reason"] and RAISE in said["next_step"]


async def test_the_longest_name_of_a_virtual_host_works(delayer: Run, rabbitmq: RabbitMQ) -> None:
    name = "é" * 63 + "v"
    path = quote(name, safe="")
    rabbitmq.api("PUT", f"/api/vhosts/{path}")
    try:
        rabbitmq.api("PUT", f"/api/permissions/{path}/guest", {"configure": ".*", "write": ".*", "read": ".*"})
        ours = {"DELAYER_BROKER__URL": rabbitmq.url(name), "DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
        delayer("topology", "apply", **ours)
        delayer("topology", "verify", **ours)
        delayer("send", "--delay", "1s", **ours)
        async with DaemonProcess({"MODE": "native", "BROKER__URL": rabbitmq.url(name)}) as daemon:
            await daemon.ready()
    finally:
        rabbitmq.api("DELETE", f"/api/vhosts/{path}")


@pytest.mark.parametrize("name", ["v" * 128, "é" * 64], ids=["characters", "bytes"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_longer_name_is_refused(delayer: Run, rabbitmq: RabbitMQ, command: tuple[str, ...], name: str) -> None:
    told = delayer(*command, expect=2, DELAYER_BROKER__URL=rabbitmq.url(name)).stderr
    assert "broker.url: expected the name of a vhost of at most 127 bytes, found 128" in told
