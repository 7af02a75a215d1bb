"""delayer status: the backlog, the lanes and queues that hold it, and the next due instants."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from delayer.amqp.errors import BrokerLost
from delayer.broker.cascade_depths import CascadeDepths, cascade_depths
from delayer.broker.errors import BrokerRefused
from delayer.cli.errors import ExitCode, broker_advice
from delayer.cli.options import as_json, request_of
from delayer.cli.output import json_of_lane, note, print_json, print_lanes, print_queues, print_table, when
from delayer.config.model import Settings
from delayer.config.texts import is_loopback, names_of, service_of
from delayer.config.tokens import Role, parse_tokens
from delayer.config.topology import cascade_of, uses_cascade
from delayer.core.errors import StoreLost
from delayer.core.readable import counted, duration
from delayer.core.secret import Secret
from delayer.store import schema
from delayer.store.admin import stats
from delayer.store.errors import STORE_RUNS, BadStoreUrl
from delayer.store.foreign_locks import ADVICE

WINDOWS: Final = (("60", "1 min"), ("300", "5 min"), ("900", "15 min"))
SLOW: Final = {
    "publish": "broker: a batch, until its last confirm",
    "claim": "store: to claim due messages",
    "settle": "store: to commit a release",
    "park": "store: to commit new messages",
    "loop_lag": "this daemon: lag of its event loop",
}
"""What can make a message late, by the names of counters.DURATIONS."""
_HERE: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


async def look(settings: Settings, patience: float = 3.0) -> dict[str, Any]:
    """Ask the daemon at ``[http] listen`` for its mode, rates per second and lateness in seconds over the last minutes,
    or say why they are unknown. Does not raise, because that daemon may be on another machine or run without HTTP."""
    http, listen = settings.http, settings.http.listen
    if not listen:
        return {"error": "[http] listen is off", "last": {}}
    token = None if http.open or is_loopback(listen.rpartition(":")[0]) else _token(http.tokens_file)
    try:
        said = await _said(
            settings, listen, "/api/live", ("mode", "last", "blocked", "intake"), patience=patience, token=token
        )
    except NotAsked as why:
        return {"error": str(why), "last": {}}
    except OSError as error:
        return {"error": f"no daemon answers at {listen}: {_reason(error, patience)}", "last": {}}
    return {"error": None, **said}


def _token(file: str | None) -> Secret | None:
    """A token that may read; None if there is none, or only its hash."""
    with suppress(OSError, UnicodeDecodeError):
        tokens = parse_tokens(Path(file).read_text("utf-8")).tokens if file else ()
        return next((one.plain for one in tokens if one.plain and one.role.allows(Role.READ)), None)
    return None


class NotAsked(Exception):
    """The daemon's state is unknown. The text says why."""


class Readiness(NamedTuple):
    """Why a daemon is not ready, and the changed keys for which it needs a restart."""

    reasons: list[str]
    restart_needed: Sequence[str] = ()


async def readiness(settings: Settings, listen: str, patience: float = 10.0) -> Readiness | None:
    """Ask the daemon at ``listen``; None if nothing listens there. Raises NotAsked."""
    found = Readiness([])
    for _ in range(3):  # A store query that takes longer than 3 s is in the next answer.
        try:
            found = Readiness(**await _said(settings, listen, "/health/ready", Readiness._fields, patience=patience))
        except ConnectionRefusedError:
            return None
        except (TimeoutError, ConnectionError) as error:
            return Readiness([f"it accepts connections, but does not answer: {_reason(error, patience)}"])
        except OSError as error:
            raise NotAsked(f"{listen} cannot be asked: {_reason(error, patience)}") from None
        if not found.reasons:
            break
    return found


async def _said(
    settings: Settings, listen: str, path: str, names: Sequence[str], *, patience: float, token: Secret | None = None
) -> dict[str, Any]:
    """Return these values of the daemon's answer. Raises NotAsked if the answer is another program's, and OSError."""
    status, body = await _ask(listen, path, patience, token)
    try:
        said = json.loads(body)
        service, found = said["service"], {name: said[name] for name in names}
    except (ValueError, KeyError, TypeError):
        locked = (
            ", or reading it needs http.tokens_file, in this configuration too, with a token in plain text"
            if status == "401"
            else ""
        )
        raise NotAsked(f"the program at {listen} is not a daemon of this version{locked}") from None
    if service != service_of(settings):
        # If a configuration was copied, another service on this host may have this address.
        raise NotAsked(f"the daemon at {listen} works with another broker, virtual host or queue")
    return found


async def _ask(listen: str, path: str, patience: float, token: Secret | None = None) -> tuple[str, bytes]:
    """Return the status (empty if the answer is not HTTP) and the body. HTTP/1.0 by hand, because an HTTP library takes
    longer to load than the daemon to answer. Raises OSError."""
    host, _, port = listen.rpartition(":")
    host = _HERE.get(host, host)
    login = f"Authorization: Bearer {token.reveal()}\r\n" if token else ""
    # In a thread, because asyncio would hide a refusal if the host has several addresses. A timeout around this or the
    # next step would leave the socket open.
    made = await asyncio.to_thread(socket.create_connection, (host.strip("[]"), int(port)), patience)
    reader, writer = await asyncio.open_connection(sock=made)
    try:
        async with asyncio.timeout(patience):
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n{login}\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    version, _, rest = head.partition(b" ")
    return (rest[:3].decode("ascii", "replace") if version.startswith(b"HTTP/") else ""), body


def _reason(error: OSError, patience: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing within {patience:g} s"
    # Numbers below 0 come from the resolver.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error)


def show(live: dict[str, Any]) -> None:
    """Print rates and lateness as a table."""
    click.echo()
    if live["error"] is not None:
        click.echo(f"rates and lateness: not known ({live['error']})")
        return
    rows: list[tuple[object, ...]] = []
    for seconds, name in WINDOWS:
        last = live["last"][seconds]
        if last["seconds"] < int(seconds) and rows:
            continue  # The process has run for less than that, so the figures would repeat.
        rates = last["rates"]
        into = rates["parked"] + rates["cascaded"]
        rows.append(
            (name, f"{into:.1f}", f"{rates['released']:.1f}", *(duration(last[key]) for key in ("p50", "p99", "worst")))
        )
    columns = ["this host, over the last", "in/s", "out/s", "late: p50", "p99", "max"]
    print_table(columns, rows, right=(1, 2, 3, 4, 5))
    click.echo()
    slow: list[tuple[object, ...]] = [
        (text, *(duration(live["last"][one]["slowest"][name]) for one, _ in WINDOWS)) for name, text in SLOW.items()
    ]
    print_table(["the slowest took at most", *(name for _, name in WINDOWS)], slow, right=(1, 2, 3))
    if live["blocked"]:
        click.echo(
            "BLOCKED: a resource alarm of the broker (memory, disk): it accepts no publishes, so nothing is released"
        )


def mode_text(mode: str, live: dict[str, Any]) -> str:
    """Format the configured mode, the running daemon's mode if different, and the daemon's role at the intake."""
    if live.get("mode", mode) == mode:
        return f"mode: {mode}" + (f"   intake: {role}" if (role := live.get("intake")) else "")
    return (
        f"mode: {mode} in the file; the daemon works in {live['mode']} mode. Next: systemctl reload delayer, or SIGHUP"
    )


def watch_status(look_once: Callable[[], int]) -> int:
    """Refresh every two seconds until interrupted. On a terminal, each refresh replaces the last."""
    code = 0
    try:
        while True:
            click.clear()
            code = look_once()
            sys.stdout.flush()
            time.sleep(2.0)
    except KeyboardInterrupt:
        return code


@click.command(short_help="Show the backlog, where it waits, and the next due instant.")
@as_json
@click.option(
    "--watch", is_flag=True, help="Refresh every two seconds until interrupted; with --json, print one object per line."
)
@click.pass_context
def status(context: click.Context, as_json: bool, watch: bool) -> None:
    """Show the broker, the database, the mode, the lanes, the counts of waiting, held and compacted messages, and the
    next due instant. Show rates and lateness over the last minutes, and the depths of all queues, the cascade's levels
    among them.

    It names parts that do not answer. Exit code 3 if the broker or a configured store is unreachable. Exit code 1 if
    this program needs another schema of the store.

    \b
    Examples:
      delayer status
      delayer status --watch
      delayer status --json | jq .store.waiting
    """
    settings = request_of(context).settings()
    if watch:
        context.exit(watch_status(lambda: asyncio.run(_once(settings, as_json=as_json, on_one_line=True))))
    context.exit(asyncio.run(_once(settings, as_json=as_json)))


async def _once(settings: Settings, *, as_json: bool, on_one_line: bool = False) -> int:
    """Query and print. Returns the exit code."""
    # Concurrently, so that none waits for another's timeout.
    (depths, broker), store, now = await asyncio.gather(_broker(settings), _store(settings), look(settings))
    names = names_of(settings)
    answer = {"names": names, "mode": settings.mode, "broker": broker, "store": store, "live": now}
    if as_json and on_one_line:
        click.echo(json.dumps(answer))
    elif as_json:
        print_json(answer)
    else:
        click.echo("   ".join(f"{name.replace('_', ' ')}: {value}" for name, value in names.items()))
        click.echo(mode_text(settings.mode, now))
        _print_store(store)
        show(now)
        if depths is not None:
            click.echo()
            print_queues(settings, depths, used=uses_cascade(settings), every_level=False)
            for step in next_steps(settings, depths, (store or {}).get("held", 0)):
                note(step)
    parts = {"broker": broker, "store": store or {}}
    unreached = {name: part for name, part in parts.items() if part.get("error")}
    for name, part in unreached.items():
        advice = part.get("advice")
        note(f"The {name} is out of reach: {part['error']}" + (f". Next: {advice}." if advice else "."))
    if unreached:
        return ExitCode.OUT_OF_REACH
    if store is not None and store["advice"]:
        note(f"The store's schema is {store['schema'] or 'missing'}; needed: {schema.HEAD}. Next: {store['advice']}.")
        return ExitCode.FOUND
    return ExitCode.DONE


def next_steps(settings: Settings, seen: CascadeDepths, held: int) -> list[str]:
    """Advise the operator on missing queues, and on ``held`` and other messages set aside. Pure."""
    used, strays = uses_cascade(settings), cascade_of(settings).strays
    needed = {settings.intake.queue, settings.refused.queue} | (seen.queues.keys() if used else set())
    missing = [name for name, depth in seen.queues.items() if depth is None and name in needed - {*seen.hidden}]
    steps = [f"Missing on the broker: {', '.join(missing)}. Next: start the daemon, or `delayer topology apply`."]
    aside = {"refused": seen.queues[settings.refused.queue], "strays": seen.queues.get(strays), "held": held}
    told = [f"Next: `delayer {verb} list` says why these messages were set aside." for verb, n in aside.items() if n]
    return (steps if missing else []) + told


async def queue_depths(settings: Settings) -> CascadeDepths:
    """Query the cascade, and the queues around it. Raises BrokerLost, BrokerRefused."""
    queues = [settings.intake.queue, settings.native.due_queue, settings.refused.queue]
    cascade, management_url = cascade_of(settings), settings.management_url
    return await cascade_depths(settings.broker_url, "delayer status", cascade, queues, management_url=management_url)


async def _broker(settings: Settings) -> tuple[CascadeDepths | None, dict[str, Any]]:
    try:
        seen = await queue_depths(settings)
    except (BrokerLost, BrokerRefused) as error:
        return None, {"error": str(error), "advice": broker_advice(error)}
    levels = [{"level": one.level, "queue": one.name, "ttl_ms": one.ttl_ms, "depth": one.depth} for one in seen.levels]
    return seen, {"error": None, "queues": dict(seen.queues), "cascade": levels, "delayed": dict(seen.delayed)}


async def _store(settings: Settings) -> dict[str, Any] | None:
    if settings.store_url is None:
        return None
    try:
        seen = await stats.overview(settings.store_url, settings.store.restore_ahead_ms)
    except (StoreLost, BadStoreUrl) as error:
        advice = "" if isinstance(error, BadStoreUrl) else error.advice or STORE_RUNS
        return {"error": str(error), "upgrade_pending": False, "advice": advice}
    wrong = schema.find_mismatch(seen.schema_found)
    return {
        "error": None,
        "upgrade_pending": wrong is not None and not wrong.newer,
        "advice": "" if wrong is None else wrong.advice,
        "schema": seen.schema_found,
        **{name: getattr(seen, name) for name in ("waiting", "held", "counters", "next_due_ms", "store_now_ms")},
        "inbox": seen.inbox and seen.inbox._asdict(),
        "foreign_locks": list(map(str, seen.foreign)),
        "lanes": list(map(json_of_lane, seen.lanes)),
        "segments": {
            "count": seen.segments.segments,
            **{name: getattr(seen.segments, name) for name in ("messages", "next_due_ms", "broken", "broken_messages")},
            "late": seen.late.segments,
            "late_messages": seen.late.messages,
        },
    }


def _print_store(store: dict[str, Any] | None) -> None:
    if store is None:
        click.echo("store: none configured, so waiting messages can be counted, but not listed or cancelled")
        return
    if store["error"] is not None or store["advice"]:
        return
    now_ms = store["store_now_ms"]
    next_due = when(store["next_due_ms"], now_ms)
    click.echo(f"waiting: {store['waiting']}   held: {store['held']}   next due in the store: {next_due}")
    for one in store["foreign_locks"]:
        click.echo(f"LOCKED: {one}. Next: {ADVICE}.")
    if store["inbox"] is None:
        click.echo(f"SQL inbox: not counted within {stats.INBOX_SECONDS} s")
    elif store["inbox"]["messages"]:
        age = duration(store["inbox"]["age_ms"] / 1000)
        click.echo(f"SQL inbox: {store['inbox']['messages']} not moved yet; the oldest was sent {age} ago")
    if store["segments"]["count"]:
        _print_segments(store["segments"], now_ms)
    if not store["lanes"]:
        click.echo("lanes: none; run `delayer db upgrade`")
        return
    click.echo()
    print_lanes(store["lanes"], now_ms)


def _print_segments(segments: dict[str, Any], now_ms: int) -> None:
    click.echo(
        f"compacted: {segments['messages']} in {counted(segments['count'], 'segment')}   "
        f"next due: {when(segments['next_due_ms'], now_ms)}"
    )
    if segments["late"]:
        click.echo(
            f"LATE: {counted(segments['late'], 'segment')} with {counted(segments['late_messages'], 'message')} "
            "should be restored by now; see the daemons' logs, or run `delayer restore`"
        )
    if segments["broken"]:
        click.echo(
            f"BROKEN: {counted(segments['broken'], 'segment')} with {counted(segments['broken_messages'], 'message')}, "
            "unreadable; the bytes are kept, see docs/backlog.md"
        )
