"""delayer topology: declare, verify, show and remove the queues and exchanges on the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeVar

import click

from delayer.broker.admin import Admin, Removal
from delayer.broker.errors import mismatch_advice
from delayer.broker.pipelined_admin import pipelined_admin
from delayer.cli.errors import SEEING, ExitCode
from delayer.cli.options import Request, as_json, request_of, store_url
from delayer.cli.output import in_groups, note, print_json, print_queues, print_table, some
from delayer.cli.status import queue_depths
from delayer.config.model import Settings
from delayer.config.topology import intake_of, native_of, topology_of, uses_cascade
from delayer.core.readable import counted
from delayer.core.topology import Topology
from delayer.store.admin import setup

T = TypeVar("T")


def with_admin(settings: Settings, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Run ``work`` with a connection to the broker. Raises BrokerUnreachable, BrokerRefused."""

    async def connected() -> T:
        async with await Admin.connect(settings.broker_url, management_url=settings.management_url) as admin:
            return await work(admin)

    return asyncio.run(connected())


@click.group(short_help="Declare, verify, show or remove queues and exchanges.")
def topology() -> None:
    """Declare, verify, show or remove the queues and exchanges on the broker.

    In native mode (and in store mode if store.park_beyond is not "0s") these include the 28 levels of the cascade.
    """


@topology.command()
@click.option("--accept-broker", is_flag=True, help="Let the store belong to this broker from now on.")
@click.pass_obj
def apply(request: Request, accept_broker: bool) -> None:
    """Declare missing queues and exchanges. Existing objects are not changed; safe to repeat.

    A store belongs to one broker: daemons do not deliver its messages to another broker. After a broker was rebuilt,
    --accept-broker gives the store to the new broker.

    \b
    Examples:
      delayer topology apply
      delayer --mode native topology apply     # with the cascade, before the daemon is switched to it
    """
    settings = request.settings()
    url = store_url(settings) if accept_broker else ""
    whole = topology_of(settings)

    async def declare(admin: Admin) -> tuple[int, list[str]]:
        missing = [one for one in await admin.verify(whole) if one.state == "missing" and one.kind != "binding"]
        async with pipelined_admin(settings.broker_url, "delayer topology") as broker:
            await broker.declare(whole)
            if url:
                await setup.accept_broker(url, lambda store: broker.declare(Topology((store.exchange,), (), ())))
        destinations = dict.fromkeys(route.to for route in settings.routes)
        return len(missing), [name for name in destinations if not await admin.exchange_exists(name)]

    new, missing = with_admin(settings, declare)
    click.echo(
        f"In place: {counted(len(whole.exchanges), 'exchange')}, {counted(len(whole.queues), 'queue')}, "
        f"{counted(len(whole.bindings), 'binding')}. "
        f"New exchanges and queues: {new}."
    )
    if url:
        click.echo("The store belongs to this broker now.")
    if missing:
        note(
            f"Due messages go to exchanges that do not exist: {some(missing)}. Declare them, or add a [[destination]]."
        )
    note(
        "Next: `delayer db upgrade`, unless that is done; `delayer run`."
        if settings.store_url
        else "Next: `delayer run`."
    )


@topology.command()
@as_json
@click.pass_context
def verify(context: click.Context, as_json: bool) -> None:
    """Compare the broker with the configured topology. Changes nothing. Exit code 1 if anything is wrong or missing.

    Only the management API shows bindings, policies and the copies of queues: set broker.management_url.

    \b
    Examples:
      delayer topology verify
      delayer --set broker.management_url=http://localhost:15672 topology verify --json
    """
    settings = request_of(context).settings()
    findings = with_admin(settings, lambda admin: admin.verify(topology_of(settings)))
    off = [finding for finding in findings if finding.severity == "error"]
    fields = ("severity", "kind", "name", "expected", "found")
    rows = [{name: getattr(finding, name) for name in fields} for finding in findings]
    if as_json:
        print_json({"ok": not off, "findings": rows})
    elif findings:
        groups = in_groups(findings, lambda one: (one.severity, one.kind, one.state))
        table = [[getattr(one, name) for name in fields] for one, _ in groups]
        for row, (_, more) in zip(table, groups, strict=True):
            if more:
                row[2:] = [f"… and {more:,} more", "", "`--json` has all of them"]
        print_table(["", "what", *fields[2:]], table)
    if off:
        for advice in dict.fromkeys(filter(None, (mismatch_advice(one.found) for one in off))):
            note(f"Next: {advice}.")
        note("Next: `delayer topology apply` declares missing ones; `delayer check` says what to do about others.")
        context.exit(ExitCode.FOUND)
    unseen = [one for one in findings if one.severity == "unknown"]
    if unseen and not as_json:
        click.echo("What could be seen is as it should be. The rest is not known.")
        note(f"Next: {SEEING}.")
    elif not as_json:
        click.echo("Everything is as it should be.")


@topology.command()
@as_json
@click.pass_obj
def show(request: Request, as_json: bool) -> None:
    """Show the cascade's levels and how many messages wait in each.

    \b
    Examples:
      delayer topology show
      delayer topology show --json
    """
    settings = request.settings()
    seen = asyncio.run(queue_depths(settings))
    if as_json:
        print_json(asdict(seen))
        return
    used = uses_cascade(settings)
    print_queues(settings, seen, used=used, every_level=True)
    if not used:
        note("In store mode without store.park_beyond, new messages do not enter the cascade.")


@topology.command()
@click.option("--only-cascade", is_flag=True, help="Remove the cascade and the queue at its end; keep the intake.")
@click.option("--force", is_flag=True, help="Also with messages or consumers. The messages are lost.")
@click.pass_context
def remove(context: click.Context, only_cascade: bool, force: bool) -> None:
    """Remove what `topology apply` declared. Stop the daemon first.

    Without --force the command removes nothing while a queue holds messages or has consumers. A cascade that is shared
    with another system stays.

    \b
    Examples:
      delayer topology remove --only-cascade
    """
    settings = request_of(context).settings()
    intake, cascade = intake_of(settings), native_of(settings)
    whole = cascade + intake
    if only_cascade:
        whole = Topology(
            tuple(one for one in cascade.exchanges if one not in intake.exchanges),
            tuple(one for one in cascade.queues if one not in intake.queues),
            tuple(one for one in cascade.bindings if one not in intake.bindings),
        )
    result: Removal = with_admin(settings, lambda admin: admin.remove(whole, force=force))
    click.echo(f"Removed {len(result.removed)}; {len(result.left)} left.")
    if result.left:
        print_table(["left", "because"], sorted(result.left.items()))
    shared = {f"exchange {one.name}" for one in whole.exchanges if one.shared}
    shared |= {f"queue {one.name}" for one in whole.queues if one.shared}
    if not result.left.keys() <= shared:
        note("Next: let the queues drain (`delayer topology show`), stop the daemon, and call this again.")
        context.exit(ExitCode.FOUND)
