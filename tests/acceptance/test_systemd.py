"""The service as an operator installs and runs it: by docs/install.md, under a systemd of our own (tests/support)."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delayer.store.segments.compact import FEWEST
from tests.acceptance.own_vhost import delayed
from tests.acceptance.world import Things, secret_broker_url, secret_store_url
from tests.support import ports, systemd
from tests.support.place import eventually
from tests.support.proxy import Proxy
from tests.support.raw import Raw
from tests.support.servers import Postgres, RabbitMQ
from tests.support.systemd import Machine
from tests.support.web import Web

ROOT = Path(__file__).parents[2]
PYTHON = Path(f"/usr/bin/python3.{sys.version_info.minor}")
CONFIG = "/etc/delayer/delayer.toml"
LOG = "/var/log/delayer.json"
NOT_HERE = ("-m pip", "createuser", "rabbitmqctl")
"""Lines of docs/install.md about programs and users that exist already."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deadline(120),
    pytest.mark.skipif(bool(systemd.missing()), reason=systemd.missing()),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"the service cannot run without {PYTHON}"),
]


def readme() -> list[str]:
    """The commands of "Install as a service"."""
    (block,) = re.findall(
        r"### Install as a service\n.*?```sh\n(.*?)```", (ROOT / "docs" / "install.md").read_text(), re.DOTALL
    )
    return [line for line in block.splitlines() if not any(word in line for word in NOT_HERE)]


@dataclass
class Service:
    machine: Machine
    rabbitmq: RabbitMQ
    vhost: str
    config: str
    """The configuration file after the README's steps."""

    def shown(self, *properties: str) -> dict[str, str]:
        return self.machine.shown("delayer", *properties)

    @property
    def status(self) -> str:
        return self.shown("StatusText")["StatusText"]

    def start(self, *changes: tuple[str, str], drop_in: str = "") -> None:
        """Start with the README's configuration, with these strings replaced."""
        self.machine.run("systemctl", "stop", "delayer")
        self.change(*changes)
        directory = self.machine.file(f"{systemd.UNITS}/delayer.service.d")
        directory.mkdir(exist_ok=True)
        (directory / "test.conf").write_text(f"[Service]\nStandardError=append:{LOG}\n{drop_in}")
        self.machine.file(LOG).unlink(missing_ok=True)
        self.machine.run("systemctl", "daemon-reload")
        self.machine.run("systemctl", "start", "delayer")

    def change(self, *changes: tuple[str, str]) -> None:
        text = self.config
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        self.machine.file(CONFIG).write_text(text)

    def events(self) -> list[dict[str, Any]]:
        lines = self.machine.file(LOG).read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]  # ExecReload writes there too

    def names(self) -> list[str]:
        return [one["event"] for one in self.events()]

    def say(self, *verb: str) -> Any:
        """Run a verb from a shell of the machine, as the README has it."""
        done = self.machine.run("sudo", "delayer", *verb)
        return json.loads(done.stdout) if "--json" in verb else done.stdout

    async def raw(self) -> Raw:
        return await Raw.connect(self.rabbitmq.url(self.vhost))

    @asynccontextmanager
    async def behind_a_proxy(self) -> AsyncIterator[Proxy]:
        """Route the broker's URL through a proxy for the block."""
        url = self.machine.file("/etc/delayer/broker-url")
        before = url.read_text()
        async with Proxy(self.rabbitmq.port) as proxy:
            url.write_text(before.replace(str(self.rabbitmq.port), str(proxy.port)))
            try:
                yield proxy
            finally:
                url.write_text(before)


@pytest.fixture(scope="module")
def service(rabbitmq: RabbitMQ, postgres: Postgres) -> Iterator[Service]:
    """Installed with the README's commands, on its own vhost and database."""
    vhost, database = rabbitmq.add_vhost(), postgres.add_database()
    things = Things(rabbitmq, vhost)
    things.exchange("delayer.out")
    things.queue("inbox")
    things.bind("delayer.out", "inbox")
    with Machine() as machine:
        machine.install("/usr/local/bin/sudo", ["#!/bin/sh", 'exec env "$@"'])
        machine.run(str(PYTHON), "-m", "venv", "--without-pip", "/opt/delayer")
        packages = next(machine.file("/opt/delayer/lib").glob("python3.*")) / "site-packages"
        (packages / "delayer.pth").write_text("\n".join(systemd.PATHS) + "\n")
        machine.install(
            "/opt/delayer/bin/delayer", ["#!/opt/delayer/bin/python", "from delayer.cli.main import main", "main()"]
        )
        share = machine.file("/opt/delayer/share/delayer")
        share.mkdir(parents=True)
        for file in (ROOT / "config" / "service.toml", *(ROOT / "systemd").iterdir()):
            shutil.copy(file, share)
        text = "\n".join(["set -e", *readme()])
        for theirs, ours in (
            ("amqp://delayer:PASSWORD@localhost:5672/", secret_broker_url(rabbitmq, vhost)),
            ("postgresql://delayer:PASSWORD@localhost/delayer", secret_store_url(postgres, database)),
        ):
            assert text.count(theirs) == 1
            text = text.replace(theirs, ours)
        machine.run("sh", "-c", text)
        listen = f"127.0.0.1:{ports.reserve()}"
        config = machine.file(CONFIG).read_text().replace("127.0.0.1:9419", listen)
        yield Service(machine, rabbitmq, vhost, config)
    rabbitmq.drop_vhost(vhost)
    postgres.drop_database(database)


async def test_the_service_starts_delivers_and_stops_cleanly(service: Service) -> None:
    service.start()
    assert service.shown("ActiveState", "SubState", "StatusText", "UnitFileState", "User") == {
        "ActiveState": "active", "SubState": "running", "StatusText": "mode store; intake active",
        "UnitFileState": "enabled", "User": "delayer",
    }  # fmt: skip
    assert "consuming" in service.names(), "started means ready"
    async with await service.raw() as raw:
        inbox = await raw.inbox("inbox")
        await raw.publish(delayed("soon", 200, through="delayer.in"), delayed("later", 3_600_000, through="delayer.in"))
        await inbox.got([b"soon"])
    lanes = service.say("status", "--json")["store"]["lanes"]
    assert sum(lane["waiting"] for lane in lanes) == 1
    service.say("check")
    service.machine.run("systemctl", "stop", "delayer")
    stopped = service.shown("ActiveState", "Result", "ExecMainStatus")
    assert stopped == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}
    assert "stopped" in service.names()
    assert not [one for one in service.events() if one["level"] == "error"]


async def test_a_reload_is_over_when_it_is_in_force(service: Service) -> None:
    """The reload waits for the broker: here the broker answers the declaration of the new route late."""
    async with service.behind_a_proxy() as proxy:
        await asyncio.to_thread(service.start)
        proxy.stall()
        service.change(('mode = "store"', 'mode = "native"'))
        reload = asyncio.create_task(asyncio.to_thread(service.machine.run, "systemctl", "reload", "delayer"))
        await eventually(lambda: asyncio.to_thread(service.shown, "SubState"), {"SubState": "reload"}.__eq__)
        await asyncio.wait([reload], timeout=3)
        assert not reload.done(), "its broker has not answered yet"
        assert "reloaded" not in service.names()
        proxy.resume()
        await reload
        assert "reloaded" in service.names()
        assert service.status == "mode native; intake active"
        assert service.shown("ActiveState", "SubState") == {"ActiveState": "active", "SubState": "running"}
        await asyncio.to_thread(service.machine.run, "systemctl", "stop", "delayer")


async def test_a_waiting_start_names_its_reason(service: Service) -> None:
    machine = service.machine
    machine.run("systemctl", "stop", "delayer")

    async def status(expected: str) -> None:
        await eventually(lambda: asyncio.to_thread(lambda: service.status), expected.__eq__)

    async with service.behind_a_proxy() as proxy:
        await proxy.refuse()
        service.change()
        machine.run("systemctl", "start", "--no-block", "delayer")
        await status("starting; the broker is out of reach")
        assert service.shown("ActiveState", "SubState") == {"ActiveState": "activating", "SubState": "start"}
        await proxy.accept()
        await status("mode store; intake active")
        await proxy.refuse()
        await status("mode store; the broker is out of reach")
        await proxy.accept()
        await status("mode store; intake active")
        await asyncio.to_thread(machine.run, "systemctl", "stop", "delayer")


def test_a_file_with_mistakes_fails_the_reload_and_changes_nothing(service: Service) -> None:
    service.start()
    service.change(('mode = "store"', 'mode = "nativ"'))
    done = service.machine.run("systemctl", "reload", "delayer", check=False)
    assert done.returncode != 0
    assert service.status == "mode store; intake active"
    assert not {"reloaded", "reload refused"} & set(service.names())
    assert "mode: expected" in service.machine.file(LOG).read_text(), "and the journal names the mistake"
    # The daemon does not start with such a file either, and systemd does not retry.
    assert service.machine.run("systemctl", "restart", "delayer", check=False).returncode != 0
    assert service.shown("ActiveState", "ExecMainStatus", "NRestarts") == {
        "ActiveState": "failed", "ExecMainStatus": "2", "NRestarts": "0",
    }  # fmt: skip
    service.machine.run("systemctl", "reset-failed", "delayer")


async def test_a_daemon_that_hangs_is_replaced(service: Service) -> None:
    service.start(drop_in="WatchdogSec=3\n")
    first = service.shown("MainPID")["MainPID"]
    service.machine.signal("delayer", signal.SIGSTOP)
    expected = {"NRestarts": "1", "ActiveState": "active", "SubState": "running"}
    await eventually(lambda: asyncio.to_thread(service.shown, *expected), expected.__eq__)
    assert service.shown("MainPID")["MainPID"] != first
    await eventually(lambda: asyncio.to_thread(service.names), lambda names: names.count("ready") == 2)
    service.machine.run("systemctl", "stop", "delayer")


INSTANCES = ("delayer@1", "delayer@2")


async def test_two_instances_share_the_lanes(service: Service) -> None:
    """Installed by the lines of docs/operations.md. If one instance dies, its messages do not wait for its return."""
    machine = service.machine
    (block,) = re.findall(
        r"```sh\n(sudo install [^`]*?delayer@.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL
    )
    addresses = [f"127.0.0.1:{ports.reserve()}" for _ in INSTANCES]
    for ours, theirs in zip(addresses, ("127.0.0.1:9421", "127.0.0.1:9422"), strict=True):
        assert block.count(theirs) == 1
        block = block.replace(theirs, ours)
    service.change()
    await asyncio.to_thread(machine.run, "sh", "-ec", block)
    try:
        for instance, address in zip(INSTANCES, addresses, strict=True):
            shown = machine.shown(instance, "ActiveState", "UnitFileState")
            assert shown == {"ActiveState": "active", "UnitFileState": "enabled"}
            status = machine.shown(instance, "StatusText")["StatusText"]
            assert re.fullmatch("mode store; intake (active|standby)", status)
            answer = await eventually(lambda at=address: Web(at).get("/health/ready"), lambda one: one.status == 200)
            assert answer.json["ready"]

        async def owners() -> set[str]:
            lanes = (await asyncio.to_thread(service.say, "status", "--json"))["store"]["lanes"]
            return {lane["owner"] for lane in lanes if lane["alive"]}

        await eventually(owners, lambda found: len(found) == len(INSTANCES))
        async with await service.raw() as raw:
            inbox = await raw.inbox("inbox")
            messages = [delayed(f"shared {n}", 3000 + n, through="delayer.in") for n in range(300)]
            await raw.publish(*messages)
            machine.signal(INSTANCES[0], signal.SIGKILL)
            await inbox.got(message.body for message in messages)
        running = {"ActiveState": "active", "SubState": "running", "NRestarts": "1"}
        await eventually(lambda: asyncio.to_thread(machine.shown, INSTANCES[0], *running), running.__eq__)
        await eventually(owners, lambda found: len(found) == len(INSTANCES))
    finally:
        machine.run("systemctl", "disable", "--now", *INSTANCES)
        machine.run("systemctl", "enable", "delayer")


def test_the_service_has_only_the_rights_that_it_needs(service: Service) -> None:
    """Only the service can read its credentials, they are not in the environment, and its rights match the unit."""
    service.start()
    pid = service.shown("MainPID")["MainPID"]
    status = service.machine.run("cat", f"/proc/{pid}/status").stdout
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    assert re.search(r"^Seccomp:\s+2$", status, re.MULTILINE)
    assert not re.search(r"^Uid:\s+0", status, re.MULTILINE)
    environ = service.machine.run("cat", f"/proc/{pid}/environ").stdout
    assert "CREDENTIALS_DIRECTORY=" in environ
    assert "://" not in environ
    service.machine.run("systemctl", "stop", "delayer")


JOBS = ("audit", "compact")
BEGAN = "ExecMainStartTimestampMonotonic"
SOON = "[Timer]\nOnActiveSec=1s\nRandomizedDelaySec=0\nAccuracySec=100ms\n"
"""The timer fires as if it were night."""


def after(machine: Machine, unit: str, before: dict[str, str]) -> dict[str, str]:
    """The state of a service, once it was started again."""
    shown = machine.shown(unit, BEGAN, "ActiveState", "Result", "ExecMainStatus")
    return {} if {BEGAN: shown.pop(BEGAN)} == before else shown


@pytest.mark.long
@pytest.mark.deadline(700)
async def test_the_jobs_of_the_night_and_their_timers(service: Service) -> None:
    """Follow docs/backlog.md: run the audit by hand, and the compaction by its timer. Both can write only to the
    directories systemd creates for them."""
    if shutil.which("java") is None:
        pytest.skip("Java is not installed: `.ci/setup servers`")
    machine, far = service.machine, 20 * 24 * 3_600_000
    (block,) = re.findall(r"```sh\n(sudo install .*?)```", (ROOT / "docs" / "backlog.md").read_text(), re.DOTALL)
    await asyncio.to_thread(service.start)
    async with await service.raw() as raw:
        # The daemon parks bulk into its four lanes in turn, so one lane gets enough for a segment.
        await raw.publish(*(delayed(f"far {n}", far + n, through="delayer.in") for n in range(4 * FEWEST)))

    async def waiting() -> int:
        lanes = (await asyncio.to_thread(service.say, "status", "--json"))["store"]["lanes"]
        return sum(int(lane["waiting"]) for lane in lanes)

    await eventually(waiting, lambda count: count >= 4 * FEWEST)
    for job in JOBS:
        directory = machine.file(f"{systemd.UNITS}/delayer-{job}.service.d")
        directory.mkdir()
        (directory / "test.conf").write_text(f"[Service]\nStandardOutput=append:{LOG}.{job}\nStandardError=inherit\n")

    def told(job: str) -> str:
        return machine.file(f"{LOG}.{job}").read_text()

    done = await asyncio.to_thread(machine.run, "bash", "-ec", f"cd /root\n{block}", check=False, timeout=400)
    assert done.returncode == 0, done.stderr + told("audit")
    assert "<html" in machine.file("/root/audit.html").read_text()
    assert machine.file("/var/lib/delayer-audit/audit.html").exists()

    for job in JOBS:
        timer = f"delayer-{job}.timer"
        shown = machine.shown(timer, "ActiveState", "UnitFileState", "Unit", "NextElapseUSecRealtime")
        assert re.search(r" 0[24]:[2-4]\d:\d\d", shown.pop("NextElapseUSecRealtime")), "at night"
        assert shown == {"ActiveState": "active", "UnitFileState": "enabled", "Unit": f"delayer-{job}.service"}
        machine.run("systemctl", "stop", timer)
    never = machine.shown("delayer-compact", BEGAN)
    directory = machine.file(f"{systemd.UNITS}/delayer-compact.timer.d")
    directory.mkdir()
    (directory / "test.conf").write_text(SOON)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "delayer-compact.timer")
    ended = partial(asyncio.to_thread, after, machine, "delayer-compact", never)
    seen = await eventually(ended, lambda shown: shown.get("ActiveState") in ("inactive", "failed"), timeout=300)
    assert seen == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}, told("compact")
    segments = service.say("status", "--json")["store"]["segments"]
    assert (segments["messages"] >= FEWEST, segments["broken"]) == (True, 0), told("compact")
    assert service.status == "mode store; intake active", "the daemon has seen nothing of it"
    machine.run("systemctl", "stop", "delayer", "delayer-compact.timer")


async def test_a_token_for_the_page(service: Service) -> None:
    """Follow the lines of docs/http.md."""
    (block,) = re.findall(r"```sh\n(token=.*?)```", (ROOT / "docs" / "http.md").read_text(), re.DOTALL)
    service.start()
    config = service.machine.file(CONFIG)
    try:
        service.machine.run("sh", "-ec", block)
        token = service.machine.file("/etc/delayer/http-tokens").read_text().split()[2]
        (listen,) = re.findall(r'^listen = "([^"]*)"', config.read_text(), re.MULTILINE)
        form, program = {"verb": "cancel", "id": "id:1"}, {"Accept": "application/json"}
        answer = await Web(listen).post("/actions/messages", form, Authorization=f"Bearer {token}", **program)
        assert (answer.status, answer.json["done"]) in ((200, 0), (200, 1))
        assert (await Web(listen).post("/actions/messages", form, **program)).status == 401
        # The check before a reload does not see the token.
        service.machine.run("systemctl", "reload", "delayer")
        service.machine.run("systemctl", "stop", "delayer")
    finally:
        service.machine.file(f"{systemd.UNITS}/delayer.service.d/http-tokens.conf").unlink()


def test_an_instance_for_another_broker(service: Service) -> None:
    """delayer@orders.service, with its own configuration and credentials."""
    machine = service.machine
    machine.run("systemctl", "stop", "delayer")
    share, files = "/opt/delayer/share/delayer", ["delayer.toml", "broker-url", "store-url"]
    machine.run("cp", f"{share}/delayer@.service", systemd.UNITS)
    machine.run("install", "-Dt", f"{systemd.UNITS}/delayer@.service.d", f"{share}/credentials.conf")
    service.change()
    machine.run("mkdir", "/etc/delayer/orders")
    machine.run("mv", *(f"/etc/delayer/{name}" for name in files), "/etc/delayer/orders")
    machine.file("/etc/delayer/orders.env").write_text("DELAYER_CONFIG=/etc/delayer/orders/delayer.toml\n")
    directory = machine.file(f"{systemd.UNITS}/delayer@orders.service.d")
    directory.mkdir()
    own = (f"LoadCredential={name}:/etc/delayer/orders/{name}" for name in files[1:])
    (directory / "orders.conf").write_text("\n".join(["[Service]", "LoadCredential=", *own]) + "\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "delayer@orders")
    shown = machine.shown("delayer@orders", "ActiveState", "User", "StatusText")
    assert shown == {"ActiveState": "active", "User": "delayer", "StatusText": "mode store; intake active"}
    machine.run("systemctl", "stop", "delayer@orders")
    assert machine.shown("delayer@orders", "Result") == {"Result": "success"}
    machine.run("mv", *(f"/etc/delayer/orders/{name}" for name in files), "/etc/delayer")
