"""delayer check: everything that could keep messages from arriving, before it does."""

from __future__ import annotations

import asyncio

import click

from delayer.commands import check_broker, check_store
from delayer.commands.checking import Row
from delayer.commands.common import (
    DONE,
    FOUND,
    OUT_OF_REACH,
    note,
    print_json,
    print_table,
    quoted,
    request_of,
)
from delayer.core.hosts import is_loopback
from delayer.settings import Settings, duration_text
from delayer.wiring import uses_cascade, without_effect


@click.command(short_help="Check configuration, broker, topology and store.")
@click.option("--offline", is_flag=True, help="Only read the configuration; ask neither broker nor store.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def check(context: click.Context, offline: bool, as_json: bool) -> None:
    """Check configuration, broker, topology and store; change nothing.

    What is only missing on the broker is a note: the daemon declares it when it starts or reloads. What is there but
    different, and what nobody but you can make (destinations, the store's schema), is off; so are messages that are
    overdue where no daemon releases them. A queue that nobody consumes, refused and held messages are told in notes.

    Offline, credentials that only the service may read (a unit's ExecReload may not) are left out, with a note.

    Exit code 0 if nothing is off, 1 if anything is, 2 if the configuration cannot be used, 3 if the broker or the store
    is out of reach.

    \b
    Examples:
      delayer check
      delayer --config new.toml check && systemctl reload delayer
      delayer check --offline                       # what `systemctl reload` does first
      delayer check --json | jq '.checks[] | select(.result != "ok")'
    """
    request = request_of(context)
    sealed: list[str] = []
    settings = request.settings(sealed if offline else None)
    where = f"read from {request.file}" if request.file else "defaults, environment and flags; no file"
    rows = [Row("configuration", "ok", f"{where}; {settings.mode} mode, routes: {len(settings.routes)}")]
    if sealed:
        found = f"not looked into, as only the service may read them: {', '.join(sealed)}"
        rows.append(Row("credentials", "note", found))
    rows += (
        _open_to_others(settings) + _finished_by_the_broker(settings) + _paced_and_held(settings) + _unpaced(settings)
    )
    if not offline:
        of_broker, mark = asyncio.run(check_broker.looked_at(settings))
        rows += of_broker + asyncio.run(check_store.looked_at(settings, mark))
    results = {row.result for row in rows}
    code = OUT_OF_REACH if "out of reach" in results else FOUND if "off" in results else DONE
    if as_json:
        print_json({"ok": code == DONE, "checks": [row._asdict() for row in rows]})
    else:
        print_table(["check", "result", "found", "next step"], rows)
    if code != DONE:
        note("Not all is well." if code == FOUND else "Something is out of reach.")
    context.exit(code)


def _open_to_others(settings: Settings) -> list[Row]:
    """Whether others than this machine reach the page."""
    listen = settings.http.listen
    if not listen or is_loopback(listen.rpartition(":")[0]):
        return []
    found = f"listens at {listen}: who reaches it reads messages without a token, by whatever name he calls it"
    return [Row("http", "note", found, "127.0.0.1, and a proxy with TLS and a login before it (docs/http.md)")]


def _finished_by_the_broker(settings: Settings) -> list[Row]:
    """Which routes put everybody's punctuality into the hands of their destinations."""
    if not uses_cascade(settings):
        return []
    names = ", ".join(quoted(route.from_) for route in settings.routes if route.finish == "broker")
    found = (
        f"finished by the broker: {names}. One destination queue of theirs that is full (reject-publish) or without "
    )
    found += "majority stops a level of the cascade for all"
    advice = 'finish = "daemon", unless they have to come while no daemon runs'
    return [Row("routes", "note", found, advice)] if names else []


def _paced_and_held(settings: Settings) -> list[Row]:
    """Which routes make messages late by themselves, and then hold them for it."""
    both = [route for route in settings.routes if route.max_rate and route.late_action == "hold"]
    return [
        Row(
            "routes",
            "note",
            f"{quoted(route.from_)} holds for a person what waits longer than late_limit "
            f"({duration_text(route.late_limit_ms or 0)}), be it only for its turn under max_rate ({route.max_rate}/s)",
            "a late_limit that is longer than a flood takes at that rate, or only one of the two",
        )
        for route in both
    ]


def _unpaced(settings: Settings) -> list[Row]:
    """Which rates nothing keeps to."""
    names = ", ".join(map(quoted, without_effect(settings)))
    found = f"max_rate without effect in native mode: {names}. It is for what the store releases"
    return [Row("routes", "note", found, 'mode = "store", or leave max_rate out')] if names else []
