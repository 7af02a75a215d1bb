"""Configurations with hundreds of routes: commands answer with a few lines, and programs get every one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pamqp.base import Frame

from delayer.amqp.channel import Channel
from delayer.broker.pipelined_admin import pipelined_admin
from delayer.core.topology import Exchange
from tests.integration.cli import Run
from tests.support.servers import RabbitMQ

MANY = 300


@pytest.fixture
def many(tmp_path: Path, rabbitmq: RabbitMQ) -> dict[str, str]:
    """The environment of a command with many routes."""
    file = tmp_path / "many.toml"
    routes = (f'[[route]]\nfrom = "in{n}"\nto = "out{n}"\nmax_rate = 5\n' for n in range(MANY))
    file.write_text('mode = "native"\n' + "".join(routes))
    return {"DELAYER_CONFIG": str(file), "DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}


def test_check_groups_what_is_equal(delayer: Run, many: dict[str, str]) -> None:
    table = delayer("check", expect=1, **many).stdout.splitlines()
    of_destinations = [line for line in table if line.startswith("destination")]
    assert len(of_destinations) == 6 and len(table) < 25
    assert "… and 295 more" in of_destinations[-1]
    assert any("max_rate without effect" in line and "(300 in all)" in line for line in table)
    assert max(map(len, table)) < 400
    checks = json.loads(delayer("check", "--json", expect=1, **many).stdout)["checks"]
    assert sum(one["what"] == "destination" for one in checks) == MANY


def test_verify_groups_what_is_equal(delayer: Run, many: dict[str, str]) -> None:
    table = delayer("topology", "verify", expect=1, **many).stdout.splitlines()
    assert len(table) == 1 + 6 + 6
    assert [line.split()[1] for line in table if "more" in line] == ["exchange", "queue"]
    told = json.loads(delayer("topology", "verify", "--json", expect=1, **many).stdout)
    assert sum(one["kind"] == "exchange" for one in told["findings"]) > MANY
    said = delayer("topology", "apply", **many).stderr
    assert "(300 in all)" in said and len(said) < 400
    assert "Everything is as it should be." in delayer("topology", "verify", **many).stdout
    told = delayer("send", "--delay", "1s", expect=2, **many).stderr
    assert "(300 in all)" in told and len(told) < 400


def test_a_difference_among_many_is_found(
    delayer: Run, many: dict[str, str], rabbitmq: RabbitMQ, vhost_name: str
) -> None:
    delayer("topology", "apply", **many)
    rabbitmq.api("DELETE", f"/api/exchanges/{vhost_name}/in7")
    rabbitmq.api("DELETE", f"/api/exchanges/{vhost_name}/in250")
    rabbitmq.api("PUT", f"/api/exchanges/{vhost_name}/in250", {"type": "direct", "durable": True})
    rabbitmq.api("DELETE", f"/api/bindings/{vhost_name}/e/in9/q/delays/%23")
    told = json.loads(delayer("topology", "verify", "--json", expect=1, **many).stdout)["findings"]
    assert [(one["kind"], one["name"]) for one in told] == [
        ("exchange", "in7"), ("exchange", "in250"), ("binding", "in9"), ("binding", "in250"),
    ]  # fmt: skip
    assert "inequivalent arg 'type'" in told[1]["found"]


async def test_refusals_do_not_multiply_the_requests(vhost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal closes the channel, with all questions that wait on it."""
    asked = 0
    call = Channel.call

    async def counted(self: Channel, method: Frame, *answers: type[Frame]) -> Frame:
        nonlocal asked
        asked += 1
        return await call(self, method, *answers)

    monkeypatch.setattr(Channel, "call", counted)
    parts = [Exchange(f"nowhere-{n}", "topic") for n in range(MANY)]
    async with pipelined_admin(vhost, "test") as broker:
        assert await broker.missing(parts) == parts
    assert asked < 256 + 2 * MANY
