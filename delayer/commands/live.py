"""What a running daemon says of its last minutes: rates and lateness, over HTTP; and looking again and again.

The store knows how many there are; how fast they pass, and how late, only the daemons know.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import click

from delayer.commands.common import print_table
from delayer.settings import Settings
from delayer.settings.service import same, service_of

PATIENCE: Final = 3.0
WINDOWS: Final = (("60", "1 min"), ("300", "5 min"), ("900", "15 min"))
_CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"
_HERE: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


async def look(settings: Settings) -> dict[str, Any]:
    """Rates a second and lateness in seconds over the last minutes, of the daemon at ``[http] listen``; or why
    they are not known. No error: that daemon may run on another machine, or serve nothing."""
    listen = settings.http.listen
    if not listen:
        return {"error": "[http] listen is off", "last": {}}
    try:
        async with asyncio.timeout(PATIENCE):
            status, body = await _ask(listen)
    except (OSError, UnicodeError) as error:  # the latter of a host that can be none
        return {"error": f"no daemon answers at {listen}: {_reason(error)}", "last": {}}
    if status not in ("200", ""):
        return {"error": f"{listen} answers {status}", "last": {}}
    try:
        said = json.loads(body)
        if not same(said["service"], service_of(settings)):
            # Of two services on one host, only one has this address; and a configuration may have been copied.
            return {"error": f"what answers at {listen} works with another broker or store", "last": {}}
        return {"error": None, "last": said["last"], "blocked": said["blocked"]}
    except (ValueError, KeyError, TypeError):
        return {"error": f"what answers at {listen} is no daemon of this version", "last": {}}


async def _ask(listen: str) -> tuple[str, bytes]:
    """Status, empty where that was no HTTP, and body. One line of HTTP/1.0, whose answer ends with the connection: to
    load an HTTP library takes longer than the daemon's answer. Raises OSError, UnicodeError."""
    host, _, port = listen.rpartition(":")
    host = _HERE.get(host, host)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(f"GET /api/live HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    version, _, rest = head.partition(b" ")
    return (rest[:3].decode("ascii", "replace") if version.startswith(b"HTTP/") else ""), body


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing within {PATIENCE:g} s"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:  # those below are of the resolver
        return os.strerror(error.errno)
    return str(error)


def show(live: dict[str, Any]) -> None:
    """As a table."""
    click.echo()
    if live["error"] is not None:
        click.echo(f"rates and lateness: not known ({live['error']})")
        return
    rows: list[tuple[object, ...]] = []
    for seconds, name in WINDOWS:
        last = live["last"][seconds]
        if last["seconds"] < int(seconds) and rows:
            continue  # it runs for less than that: the same figures once more
        rates = last["rates"]
        into = rates["parked"] + rates["cascaded"]
        rows.append(
            (name, f"{into:.1f}", f"{rates['released']:.1f}", *(_late(last[key]) for key in ("p50", "p99", "worst")))
        )
    columns = ["this host, over the last", "in/s", "out/s", "late: median", "99 of 100", "at most"]
    print_table(columns, rows, right=(1, 2, 3, 4, 5))
    if live["blocked"]:
        click.echo(
            "BLOCKED: a resource alarm of the broker (memory, disk): it takes no publishes, so nothing is released"
        )


def _late(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def again_and_again(look_once: Callable[[], int], every: float) -> int:
    """Look, and look again, until somebody interrupts. On a terminal each look takes the place of the last one."""
    code = 0
    try:
        while True:
            if sys.stdout.isatty():
                click.echo(_CLEAR, nl=False)
            code = look_once()
            sys.stdout.flush()
            time.sleep(every)
    except KeyboardInterrupt:
        return code
