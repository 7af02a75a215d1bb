"""docs/frameworks.md: its settings with the real libraries, a real broker and a daemon.

Each program of `tests/acceptance/frameworks` continues the code of its section. It prints "ready" when it consumes,
waits for a line, publishes one message for now and one for later, and prints when they arrived.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.acceptance.own_vhost import OwnVhost
from tests.support.daemon import DaemonProcess, command
from tests.support.raw import Message, Props, now_ms, text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
PROGRAMS = Path(__file__).with_name("frameworks")
INSTALLED = ROOT / ".frameworks"
SYMFONY = Path("/usr/share/php/Symfony/Component/Messenger")
DELAY_MS = 3_000
BEFORE = {
    "py": "AMQP_URL = {url!r}\nDELAY_MS = {delay}\n",
    "js": "const AMQP_URL = {url!r}, DELAY_MS = {delay};\n",
    "php": f"<?php\nrequire '{SYMFONY}/autoload.php';\nrequire '{SYMFONY}/Bridge/Amqp/autoload.php';\n"
    "const AMQP_URL = {url!r}, DELAY_MS = {delay};\n",
}
LANGUAGES = {"py": "python", "js": "js", "php": "php"}


def block(section: str, language: str) -> str:
    """The first block of code in this language in the section of that title."""
    _, _, after = PAGE.read_text().partition(f"\n## {section}\n")
    found = re.search(rf"```{language}\n(.*?)```", after.partition("\n## ")[0], flags=re.S)
    assert found is not None, (section, language)
    return found[1]


def configuration(place: OwnVhost, store: str, section: str) -> dict[str, str]:
    """The environment of a daemon with the tables of the section."""
    # A task that waits a minute in Celery's cascade waits seconds here.
    tables = tomllib.loads(block(section, "toml").replace("levels_from = 6", "levels_from = 1"))
    environ = place.environ("store", store)
    del environ["ROUTE"]
    return environ | {name.upper(): json.dumps(table) for name, table in tables.items()}


def interpreter(kind: str) -> str:
    """The program that runs this kind of file; skips the test if the library is not installed."""
    here = {"py": INSTALLED / "venv/bin/python", "js": INSTALLED / "node_modules", "php": SYMFONY / "Bridge/Amqp"}
    program = shutil.which({"py": str(here["py"]), "js": "node", "php": "php"}[kind])
    if program is None or not here[kind].exists():
        pytest.skip("the libraries are not installed: `.ci/setup frameworks`")
    return program


@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    ("section", "program"),
    [
        ("Celery", "celery.py"),
        ("Dramatiq", "dramatiq.py"),
        ("taskiq", "taskiq.py"),
        ("NestJS", "nest.js"),
        ("Moleculer", "moleculer.js"),
        ("Symfony Messenger", "symfony.php"),
    ],
)
async def test_a_framework(place: OwnVhost, store: str, tmp_path: Path, section: str, program: str) -> None:
    kind = program.rpartition(".")[2]
    runs, whole = interpreter(kind), tmp_path / f"program.{kind}"
    before = BEFORE[kind].format(url=place.rabbitmq.url(place.vhost), delay=DELAY_MS)
    whole.write_text("\n".join((before, block(section, LANGUAGES[kind]), (PROGRAMS / program).read_text())))
    environ = configuration(place, store, section)
    await command(None, "topology", "apply", environ=environ)
    child = await asyncio.create_subprocess_exec(
        runs, str(whole), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"NODE_PATH": str(INSTALLED / "node_modules")}, cwd=tmp_path,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    try:
        while (line := await child.stdout.readline()) != b"ready\n":  # Celery introduces itself first
            assert line
        async with DaemonProcess(environ) as daemon:
            await daemon.ready()
            child.stdin.write(b"go\n")
            arrivals = json.loads((await child.stdout.read()).splitlines()[-1])
            assert await child.wait() == 0
            assert await daemon.stop() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    [(first, _), (last, waited_ms)] = arrivals
    assert (first, last) == ("now", "later")
    assert waited_ms >= DELAY_MS
    [end] = [event for event in daemon.events if event["event"] == "stopped"]
    assert (end["parked"], end["released"]) == (1, 1)


async def test_an_exchange_that_a_framework_declares_as_fanout(place: OwnVhost, store: str) -> None:
    """Its queue passes the messages on, as the section on Foundatio says."""
    environ = configuration(place, store, "Foundatio")
    await command(None, "topology", "apply", environ=environ)
    found = re.search(r"set_policy passes '(.*?)' '(\{.*?\})' --apply-to queues", PAGE.read_text())
    assert found is not None
    policy = {"pattern": found[1], "definition": json.loads(found[2]), "apply-to": "queues"}
    path = f"/api/policies/{quote(place.vhost, safe='')}/passes"
    await asyncio.to_thread(place.rabbitmq.api, "PUT", path, policy)
    for exchange in ("orders.later", "orders"):  # as the publishers and the subscribers declare their topics
        await asyncio.to_thread(place.things.exchange, exchange, "fanout")
    await asyncio.to_thread(place.things.bind, "orders", "inbox")
    async with place.working(environ) as (daemon, raw, inbox):
        began = now_ms()
        props = Props(headers=((b"x-delay", text(str(DELAY_MS))),), delivery_mode=2)
        await raw.publish(Message("orders.later", b"", props, b"later"))
        await inbox.got([b"later"])
        assert inbox.only(b"later").at_ms - began >= DELAY_MS
        assert await daemon.stop() == 0
