"""What a running daemon says of its last minutes: rates and lateness, over HTTP; and looking again and again.

The store knows how many there are; how fast they pass, and how late, only the daemons know.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import click

from delayer.commands.common import print_table
from delayer.settings import Settings

PATIENCE: Final = 3.0
WINDOWS: Final = (("60", "1 min"), ("300", "5 min"), ("900", "15 min"))
_CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"
_HERE: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


async def look(settings: Settings) -> dict[str, Any]:
    """Rates a second and lateness in seconds over the last minutes, of the daemon at ``[http] listen`` and its workers;
    or why they are not known. No error: that daemon may run on another machine, or serve nothing."""
    listen = settings.http.listen
    if not listen:
        return {"error": "[http] listen is off", "last": {}}
    return await asyncio.to_thread(_ask, listen)


def _ask(listen: str) -> dict[str, Any]:
    import http.client  # noqa: PLC0415 - for this alone, and often there is nobody to ask

    host, _, port = listen.rpartition(":")
    connection = http.client.HTTPConnection(_HERE.get(host, host).strip("[]"), int(port), timeout=PATIENCE)
    try:
        connection.request("GET", "/api/live")
        answer = connection.getresponse()
        said = json.loads(answer.read())
        if answer.status != http.client.OK:
            return {"error": f"{listen} answers {answer.status}", "last": {}}
        return {"error": None, "workers": said["workers"], "last": said["last"], "blocked": said["blocked"]}
    except OSError as error:
        return {"error": f"no daemon answers at {listen}: {error.strerror or error}", "last": {}}
    except (ValueError, KeyError, TypeError, http.client.HTTPException):
        return {"error": f"what answers at {listen} is no daemon of this version", "last": {}}
    finally:
        connection.close()


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
    columns = ["over the last", "in/s", "out/s", "late: median", "99 of 100", "at most"]
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
