"""delayer check: find everything that could keep messages from arriving, before it does."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Final

import click

from delayer.amqp.address import Address
from delayer.amqp.errors import BrokerLost
from delayer.broker.addresses import addresses_of, losses_of
from delayer.broker.admin import Admin
from delayer.broker.errors import FREE, MAJORITY, BrokerRefused, BrokerUnreachable, TopologyFinding, mismatch_advice
from delayer.broker.pipelined_admin import PATIENCE, open_connection, why_silent
from delayer.cli import status
from delayer.cli.check_store import CheckReport, CheckResult, check_store
from delayer.cli.errors import SEEING, ExitCode, broker_advice
from delayer.cli.options import as_json, request_of
from delayer.cli.output import in_groups, note, print_json, print_table, quoted, some
from delayer.config.model import Settings
from delayer.config.sources import variables
from delayer.config.texts import duration_text, is_loopback
from delayer.config.topology import cascade_of, queues_at_work, takeovers_of, topology_of, uses_cascade, without_effect
from delayer.core.cascade import MAX_SECONDS
from delayer.core.clocks import FOLLOW_TIME, ClockOffset, differences
from delayer.core.errors import StoreLost
from delayer.core.topology import Binding
from delayer.store.admin import setup
from delayer.store.errors import STORE_RUNS, BadStoreUrl, SchemaOutdated


@click.command(short_help="Check configuration, broker, topology and store.")
@click.option("--offline", is_flag=True, help="Only read the configuration; ask neither broker nor store.")
@as_json
@click.pass_context
def check(context: click.Context, offline: bool, as_json: bool) -> None:
    """Check configuration, broker, topology and store; change nothing. Ask the daemon on this host too.

    These are off: queues and exchanges that differ, missing destinations, missing rights, a missing schema, overdue
    messages without a daemon that releases them, settings of the servers that lose messages (docs/operations.md),
    clocks more than a second apart, and a daemon on this host that is not ready. These are notes: what could not be
    seen, addresses of the broker that fail, queues that the daemon will declare or that have no consumer, changed keys
    for which the daemon needs a restart, refused and held messages.

    Offline, credentials that only the service may read (a unit's ExecReload may not) are left out, with a note.

    Exit code 0 if nothing is off, 1 if anything is. Exit code 2 if the configuration cannot be used, 3 if the broker or
    the store is unreachable.

    \b
    Examples:
      delayer check
      delayer --config new.toml check && systemctl reload delayer
      delayer check --offline                       # what `systemctl reload` does first
      delayer check --json | jq '.checks[] | select(.result != "ok")'
    """
    request = request_of(context)
    sealed: list[str] = []
    settings = request.settings(sealed if offline else None, tokens=True)
    report = CheckReport()
    where = f"read from {request.file}" if request.file else "no file"
    routes = some([route.from_ for route in settings.routes])
    report.add("configuration", "ok", f"{where}; {settings.mode} mode; routes from {routes}")
    if environment := variables(os.environ):
        report.add("environment", "ok", f"sets {', '.join(environment)}")
    if sealed:
        report.add("credentials", "note", f"not checked, because only the service may read them: {', '.join(sealed)}")
    _configuration(report, settings)
    if not offline:
        asyncio.run(_servers(report, settings))
    results = {row.result for row in report}
    away = {"refused", "out of reach"} & results
    code = ExitCode.OUT_OF_REACH if away else ExitCode.FOUND if "off" in results else ExitCode.DONE
    if as_json:
        print_json({"ok": code == ExitCode.DONE, "checks": [row._asdict() for row in report]})
    else:
        groups = in_groups(report, lambda row: (row.what, row.result, row.advice))
        rows = [
            row._replace(found=f"… and {more:,} more of these; `--json` has all") if more else row
            for row, more in groups
        ]
        print_table(["check", "result", "found", "next step"], rows)
    if code != ExitCode.DONE:
        note("Not all is well." if code == ExitCode.FOUND else "Something is out of reach, or refuses us.")
    context.exit(code)


OTHER_CONSUMERS: Final = 'set "one" by the steps of "The other value of consumers" in docs/operations.md'


def _configuration(report: CheckReport, settings: Settings) -> None:
    """Check the settings alone: who consumes, whether others reach the page, and which rates delay messages."""
    if settings.intake.consumers == "one":
        found = 'consumers = "one": keys are in order; one daemon consumes, and the others stand by'
        report.add("consumers", "ok", found)
    else:
        found = 'consumers = "shared": every daemon consumes; messages with a key or a cancel are refused'
        report.add("consumers", "note", found, f"nothing; or, for keys: {OTHER_CONSUMERS}")
        if keyed := [route.from_ for route in settings.routes if route.key_from]:
            found = f'every message of {some(keyed)} is refused: key_from needs consumers = "one"'
            report.add("consumers", "off", found, f"leave key_from out; or {OTHER_CONSUMERS}")
    http = settings.http
    if http.listen and not is_loopback(http.listen.rpartition(":")[0]):
        if http.open:
            found = f"listening on {http.listen}: anyone who can reach this address can read messages without a token"
            report.add("http", "note", found, "leave `open` out, or put a proxy with TLS and a login before it")
        elif not http.tokens_file:
            found = f"listening on {http.listen} without a token, so the page cannot be read"
            report.add("http", "note", found, "set http.tokens_file, or listen on 127.0.0.1 (docs/http.md)")
    for route in settings.routes:
        if route.max_rate and route.late_action == "hold":
            report.add(
                "routes",
                "note",
                f"{quoted(route.from_)} holds messages that wait longer than late_limit "
                f"({duration_text(route.late_limit_ms or 0)}), also if only max_rate ({route.max_rate}/s) delays them",
                "set a late_limit that is longer than a burst takes at that rate, or only one of the two",
            )
    if names := without_effect(settings):
        found = f"max_rate without effect in native mode: {some(names)}. It limits releases from the store only"
        report.add("routes", "note", found, 'set mode = "store", or leave max_rate out')


async def _servers(report: CheckReport, settings: Settings) -> None:
    clocks: dict[str, ClockOffset | None] = {"this machine": ClockOffset()}
    try:
        async with await Admin.connect(settings.broker_url, management_url=settings.management_url) as admin:
            rows = (
                CheckReport()
            )  # These rows are dropped if the connection is lost, because half of them would then look fine.
            await _broker(rows, admin, settings)
            await _bond(rows, admin, settings.store_url)
            report += rows
            clocks |= {"the broker": admin.clock}
    except (BrokerLost, BrokerRefused) as error:
        result: CheckResult = "refused" if isinstance(error, BrokerRefused) else "out of reach"
        report.add("broker", result, error, broker_advice(error))
    await _every_address(report, settings)
    if settings.store_url is not None:
        clocks |= {"the database": await check_store(report, settings, settings.store_url)}
    else:
        cascade_ms = math.inf if settings.native.strategy == "queue" else 1000 * MAX_SECONDS
        longest = duration_text(int(min(settings.intake.max_delay_ms, cascade_ms)))
        report.add("store", "ok", f"none configured: delays up to {longest}, no keys, no cancels")
    _clocks(report, clocks)
    await _daemon(report, settings)


def _clocks(report: CheckReport, clocks: Mapping[str, ClockOffset | None]) -> None:
    """Check that all clocks agree. A message is due by the clock of the database or, in native mode, by the later of
    broker and daemon; publishers use their own."""
    seen = {name: clock for name, clock in clocks.items() if clock is not None}
    for found in (different := differences(seen)):
        report.add("clocks", "off", found, FOLLOW_TIME)
    for name in clocks.keys() - seen.keys():
        step = STORE_RUNS if name == "the database" else SEEING
        report.add("clocks", "note", f"could not be seen: the clock of {name}", step)
    if len(clocks) == 1:
        report.add("clocks", "note", "compared with no other: the broker was not reached", "see the row of the broker")
    elif len(seen) == len(clocks) and not different:
        report.add("clocks", "ok", f"{', '.join(seen)}: none more than a second apart, as far as their answers show")


async def _daemon(report: CheckReport, settings: Settings) -> None:
    """Ask the daemon on this host, if there is one, whether it is ready, and compare that with the other rows."""
    listen = settings.http.listen or settings.http.metrics_listen
    if not listen:
        return
    try:
        readiness = await status.readiness(settings, listen)
    except status.NotAsked as unknown:
        report.add("daemon", "note", unknown, "check [http] listen: no daemon of this configuration answers there")
        return
    reasons = None if readiness is None else readiness.reasons
    if readiness is not None:
        report[:] = [row._replace(advice=WAITING) if row.advice == STARTING else row for row in report]
    if readiness is not None and readiness.restart_needed:
        found = f"the running daemon needs a restart for: {', '.join(readiness.restart_needed)}"
        report.add("daemon", "note", found, "restart the daemon")
    away = [row.what for row in report if row.result in ("refused", "out of reach")]
    if settings.mode != "store":
        away = [what for what in away if what != "store"]  # A daemon is ready without it.
    if reasons:
        found = f"the daemon at {listen} is not ready: {'; '.join(reasons)}"
        step = "see its log, which has the next step; only if systemd passes it new credentials, restart it"
        report.add("daemon", "note" if away else "off", found, step)
    elif reasons == [] and away:
        found = f"the daemon at {listen} is ready: it reaches what this command does not ({', '.join(away)})"
        advice = "run this as the daemon's user, with its configuration and environment"
        changed = "or the daemon connected before this changed, and will fail at its next attempt"
        report.add("daemon", "note", found, f"{advice}; {changed}")


async def _bond(report: CheckReport, admin: Admin, store_url: str | None) -> None:
    """Check that the store belongs to this broker."""
    try:
        store = None if store_url is None else await setup.identity(store_url)
    except (StoreLost, BadStoreUrl, SchemaOutdated):
        return  # The rows of the store say so.
    try:
        if store is not None:
            await store.check_broker(admin.exchange_exists)
    except StoreLost as wrong:
        report.add("broker", "off", wrong, wrong.advice)


async def _every_address(report: CheckReport, settings: Settings) -> None:
    """Note which of several addresses fail: while one of them works, nothing else shows it."""

    async def attempt(address: Address) -> None:
        await (await open_connection(address, "delayer check", PATIENCE)).close()

    with suppress(BrokerLost):  # The row of the broker names a missing file.
        for lost in await losses_of(addresses_of(settings.broker_url), attempt):
            report.add("broker", "note", f"one of its addresses fails: {lost}", broker_advice(lost))


async def _broker(report: CheckReport, admin: Admin, settings: Settings) -> None:
    report.add("broker", "ok", str(settings.broker.url))
    await _topology(report, admin, settings)
    await _rights(report, admin, settings)
    await _management(report, admin, settings)
    state = await admin.state(settings.intake.queue)
    if state is not None and not state.consumers:  # A missing queue is already reported.
        found = f"no consumer reads {quoted(settings.intake.queue)}; {state.messages} wait in it"
        result: CheckResult = "off" if state.messages else "note"
        report.add("intake", result, found, STARTING)
    ours = {exchange.name for exchange in topology_of(settings).exchanges}
    for name in dict.fromkeys(route.to for route in settings.routes if route.to):
        if await admin.exchange_exists(name):
            report.add("destination", "ok", f"exchange {quoted(name)}")
        elif name not in ours:  # The daemon declares the rest, and a note reports them.
            advice = "declare it, by a [[destination]] or by hand, or change `to`; until then due messages wait"
            report.add("destination", "off", f"exchange {quoted(name)} does not exist", advice)
    await _taken_over(report, admin, settings)
    if not uses_cascade(settings):
        await _left_in_the_cascade(report, admin, settings.native.due_queue)
    await _delayed_by_the_broker(report, admin, settings)
    await _unforwarded(report, admin, settings)
    await _set_aside(report, admin, settings)


WAITING: Final = "see in the daemon's log what it waits for"
STARTING: Final = "start the daemon, or see in its log what it waits for"
GIVE_RIGHTS: Final = "give the daemon's user the rights that docs/security.md lists, or run this with the daemon's URL"
DECLARED: Final = (
    "the daemon declares it at its start or reload, and within a minute after a loss; `delayer topology "
    'apply` does too, or says why it cannot. If it is lost again: docs/operations.md, "What the broker loses"'
)
_COPIES: Final = "nothing if it is yours; an earlier intake queue gets a copy of every message: unbind it, and empty it"


async def _rights(report: CheckReport, admin: Admin, settings: Settings) -> None:
    """Check that this user may bind, publish and consume as the daemon does. (_topology checks what it declares.)"""
    others, sources = takeovers_of(settings), [route.from_ for route in settings.routes]
    # Publishing and binding to an exchange need the same right. Nothing can be bound to the default exchange.
    targets = dict.fromkeys([*(route.to for route in settings.routes), *(other.delivery for other in others)])
    publishes = [Binding(source, to, "exchange", "") for source in sources[:1] for to in targets if to]
    due = [settings.native.due_queue] if uses_cascade(settings) else []
    consumed = [settings.intake.queue, *due, *chain(*others.values())]
    lacking = [f"bind {one}" for one in topology_of(settings).bindings if not await admin.may_bind(one)]
    if not lacking:  # Otherwise the right to read the source may be what is missing.
        lacking += [f"publish to exchange {quoted(b.destination)}" for b in publishes if not await admin.may_bind(b)]
    lacking += [f"consume queue {quoted(name)}" for name in consumed if not await admin.may_consume(name)]
    if lacking:
        report.add("rights", "off", f"this user may not {some(lacking)}", GIVE_RIGHTS)


async def _management(report: CheckReport, admin: Admin, settings: Settings) -> None:
    """Report resource alarms, and bindings of the intake queue that no route of this configuration knows. Only the
    management API shows them; without it a row of the topology says so."""
    try:
        alarms, sources = await admin.alarms(), await admin.sources_of(settings.intake.queue)
    except (BrokerRefused, BrokerUnreachable) as error:
        found = f"resource alarms and the bindings of {quoted(settings.intake.queue)} cannot be seen: {error}"
        tag = "give the user of broker.management_url the tag `monitoring`"
        report.add("alarms", "note", found, tag if isinstance(error, BrokerRefused) else SEEING)
        return
    for alarm in alarms:
        found = f"{alarm}: the broker accepts no publishes, so nothing goes in or out"
        report.add("alarms", "off", found, FREE)
    known = {route.from_ for route in settings.routes} | {cascade_of(settings).delivery, ""}
    if strange := sorted(sources - known):
        found = f"{quoted(settings.intake.queue)} is bound to {some(strange)}, of which this configuration has no route"
        advice = "all daemons of one queue need the same routes; a route that was removed leaves its binding: unbind it"
        report.add("intake", "note", found, advice)


async def _topology(report: CheckReport, admin: Admin, settings: Settings) -> None:
    topology = topology_of(settings)
    findings = await admin.verify(topology)
    wrong = [one for one in findings if one.severity == "error"]
    missing = [f"{one.kind} {one.name}" for one in wrong if one.state == "missing"]
    if missing:
        names = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        report.add("topology", "note", f"{len(missing)} missing: {names}", DECLARED)
    for one in wrong:
        if one.state != "missing":
            report.add("topology", "off", *(await _different(admin, one)))
    intake = next(one for one in topology.queues if one.name == settings.intake.queue)
    silent = intake.name not in {one.name for one in findings} and await why_silent(settings.broker_url, intake)
    if silent:  # Without the management API nothing else shows it.
        report.add("topology", "off", silent, MAJORITY)
    elif not any(one.severity in ("error", "unknown") for one in findings):
        report.add("topology", "ok", "everything is as it should be")
    for one in findings:
        if one.name == "*":
            report.add("topology", "note", one.found, SEEING)
        elif one.severity == "unknown":
            report.add("topology", "off", f"{one.name}: {one.found}", GIVE_RIGHTS)
        elif one.severity == "note":
            report.add("topology", "note", f"{one.name}: {one.found}", _COPIES)


ALONE: Final = (
    'quorum: `rabbitmq-queues grow NODE all` for further nodes; classic: set [intake] queue_type = "quorum" '
    '(docs/operations.md, "An existing queue with other arguments")'
)

_BY_STATE: Final = {
    "alone": ALONE,
    "minority": MAJORITY,
    "down": "see the broker's log; docs/versions.md says which messages end a queue",
}


async def _different(admin: Admin, one: TopologyFinding) -> tuple[str, str]:
    """Return the difference, and a next step that never deletes a queue with messages."""
    found = f"{one.kind} {one.name}: expected {one.expected}, found {one.found}"
    if one.kind == "policy":
        return found, "give the policy a pattern that does not match this queue (docs/versions.md)"
    if advice := _BY_STATE.get(one.state) or mismatch_advice(one.found):
        return found, advice
    state = await admin.state(one.name) if one.kind == "queue" else None
    if state is not None and state.messages:
        advice = 'choose another name; bring them over (docs/operations.md, "An existing queue with other arguments")'
        return f"{found}; messages in it, which deleting it loses: {state.messages}", advice
    how = (
        "delete it while it has no consumer and no messages, delayed ones included,"
        if one.kind == "queue"
        else "delete it"
    )
    return found, f"{how} or choose another name; the broker names the first difference only"


async def _taken_over(report: CheckReport, admin: Admin, settings: Settings) -> None:
    """Check the cascades of other systems, whose owners declare missing parts."""
    for cascade, queues in takeovers_of(settings).items():
        of = f"{cascade.owner} {cascade.kind}".lstrip()
        try:
            depths = await admin.depths(queues)
            missing = [f"queue {name}" for name, depth in depths.items() if depth is None]
            missing += [] if await admin.exchange_exists(cascade.delivery) else [f"exchange {cascade.delivery}"]
        except BrokerRefused as refused:
            # RabbitMQ 4.3 shows them only to users with the configure right, which the daemon does not need.
            report.add("takeover", "note", f"{of}: could not be seen: {refused}")
            continue
        if missing:
            found = f"{of}: {len(missing)} missing: {missing[0]}" + (", …" if len(missing) > 1 else "")
            report.add("takeover", "note", found, "nothing: its owner declares it, and the daemon waits for that")
        else:
            waiting = sum(depth or 0 for depth in depths.values())
            report.add("takeover", "ok", f"{of}: {len(depths)} levels, {waiting} ready messages in them")


async def _left_in_the_cascade(report: CheckReport, admin: Admin, due_queue: str) -> None:
    """Check that a daemon in store mode may consume what native mode left. The rights of store mode do not allow it."""
    try:
        # Query this first, because a broker also denies the right to read a missing queue.
        if not await admin.queue_exists(due_queue) or await admin.may_consume(due_queue):
            return
    except BrokerRefused:  # RabbitMQ 4.3 shows queues only to users with the configure right, so this queue is unknown.
        return
    found = f"left from native mode, and this user may not consume it: {quoted(due_queue)}. The daemon is not ready"
    advice = "the rights of native mode until the cascade is empty, or `delayer topology remove --only-cascade`"
    report.add("cascade", "off", found, f"{advice} (docs/security.md)")


async def _delayed_by_the_broker(report: CheckReport, admin: Admin, settings: Settings) -> None:
    """Report messages that RabbitMQ itself delays: envelopes in the due queue, and in other queues messages delayed by
    their publishers, which delayer cannot list, cancel or limit."""
    delayed = await admin.delayed(queues_at_work(settings), fresh=False)
    if None in delayed.values():
        found = "RabbitMQ 4.3 and later can delay messages in these queues, and only its management API shows them"
        report.add("broker's delays", "note", found, SEEING)
        return
    own = delayed.pop(settings.native.due_queue) or 0
    for name, count in delayed.items():
        if count:
            found = f"{count} in {quoted(name)}: not parked, listed, cancellable or bounded by max_delay before due"
            advice = "let publishers send x-deliver-at instead of x-opt-delivery-time (docs/versions.md)"
            report.add("broker's delays", "note", found, advice)
    if own:
        report.add("broker's delays", "ok", f"{own} wait in {quoted(settings.native.due_queue)}")


async def _unforwarded(report: CheckReport, admin: Admin, settings: Settings) -> None:
    """Note expired messages that the cascade's levels have not forwarded, if the management API counts them."""
    levels = [one.name for one in topology_of(settings).queues if one.forwards]
    counts = {} if admin.management is None else await admin.delayed(levels, levels, fresh=False)
    if waiting := {name: count for name, count in counts.items() if count}:
        found = f"{sum(waiting.values())} expired messages are not forwarded yet, in {some([*waiting])}"
        advice = "run this again: if they stay, see `Cannot forward any dead-letter messages` in the broker's log"
        report.add("cascade", "note", found, f"{advice} (docs/operations.md, What the broker loses)")


async def _set_aside(report: CheckReport, admin: Admin, settings: Settings) -> None:
    refused, strays = settings.refused.queue, cascade_of(settings).strays
    depths = await admin.depths([refused])
    try:
        depths |= await admin.depths([strays])
    except BrokerRefused:
        # RabbitMQ 4.3 shows it only to users with the configure right, which a daemon in store mode does not need.
        if uses_cascade(settings):
            raise
    advice = {
        refused: "`delayer refused list` has the reasons; fix their publisher, then `delayer refused retry` or `drop`",
        strays: "`delayer strays list` has the reasons; `delayer strays retry` puts them back on their way",
    }
    for name, depth in depths.items():
        if depth:
            report.add("refused, strays", "note", f"{depth} in {quoted(name)}", advice[name])
