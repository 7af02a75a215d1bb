"""delayer check: everything that could keep messages from arriving, before it does."""

from __future__ import annotations

import asyncio
from typing import Final, Literal, NamedTuple

import click

from delayer.amqp.address import Address
from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused
from delayer.broker.verify import DOWN
from delayer.cli.errors import BROKER_RIGHTS, DONE, FOUND, OUT_OF_REACH, STORE_RUNS, broker_advice
from delayer.cli.options import as_json, request_of
from delayer.cli.output import note, print_json, print_table, quoted
from delayer.config import Settings, duration_text
from delayer.config.topology import cascade_of, queues_at_work, topology_of, uses_cascade, without_effect
from delayer.config.values import is_loopback
from delayer.core.cascade import LEVELS, Cascade
from delayer.core.delay_headers import in_words
from delayer.core.errors import BrokerLost, StoreLost
from delayer.store import schema
from delayer.store.admin import stats
from delayer.store.errors import BadStoreUrl
from delayer.store.lanes.locks import ONE_BROKER, broker_mark

Result = Literal["ok", "note", "off", "out of reach"]


class Row(NamedTuple):
    """One thing that was looked at. ``advice`` is the next step where there is one to take."""

    what: str
    result: Result
    found: str
    advice: str = ""


@click.command(short_help="Check configuration, broker, topology and store.")
@click.option("--offline", is_flag=True, help="Only read the configuration; ask neither broker nor store.")
@as_json
@click.pass_context
def check(context: click.Context, offline: bool, as_json: bool) -> None:
    """Check configuration, broker, topology and store; change nothing.

    These are off: queues and exchanges that differ, missing destinations, a missing schema of the store, and overdue
    messages without a daemon that releases them. These are notes: queues that the daemon will declare, queues without
    a consumer, refused and held messages.

    Offline, credentials that only the service may read (a unit's ExecReload may not) are left out, with a note.

    Exit code 0 if nothing is off, 1 if anything is. Exit code 2 if the configuration cannot be used, 3 if the broker or
    the store is out of reach.

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
    rows += _open_to_others(settings) + _paced_and_held(settings) + _unpaced(settings)
    if not offline:
        of_broker, mark = asyncio.run(_broker(settings))
        rows += of_broker + asyncio.run(_store(settings, mark))
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
    found = f"listening on {listen}: anyone who can reach this address can read messages without a token"
    return [Row("http", "note", found, "127.0.0.1, and a proxy with TLS and a login before it (docs/http.md)")]


def _paced_and_held(settings: Settings) -> list[Row]:
    """Routes whose rate makes messages late, and whose late limit then holds them."""
    both = [route for route in settings.routes if route.max_rate and route.late_action == "hold"]
    return [
        Row(
            "routes",
            "note",
            f"{quoted(route.from_)} holds messages that wait longer than late_limit "
            f"({duration_text(route.late_limit_ms or 0)}), also if only max_rate ({route.max_rate}/s) delays them",
            "set a late_limit that is longer than a burst takes at that rate, or only one of the two",
        )
        for route in both
    ]


def _unpaced(settings: Settings) -> list[Row]:
    """Rates that no process enforces."""
    names = ", ".join(map(quoted, without_effect(settings)))
    found = f"max_rate without effect in native mode: {names}. It limits releases from the store only"
    return [Row("routes", "note", found, 'set mode = "store", or leave max_rate out')] if names else []


async def _broker(settings: Settings) -> tuple[list[Row], str]:
    """The rows about the broker, and its mark for the store's lanes."""
    shown, mark = str(settings.broker.url), ""
    try:
        async with await Admin.connect(settings.broker_url, management_url=settings.management_url) as admin:
            mark = broker_mark(admin.cluster, Address.parse(settings.broker_url).vhost)
            rows = [Row("broker", "ok", shown)]
            rows += await _topology(admin, settings)
            rows += await _intake(admin, settings)
            rows += await _destinations(admin, settings)
            rows += await _taken_over(admin, settings)
            rows += await _left_in_the_cascade(admin, settings)
            rows += await _delayed_by_the_broker(admin, settings)
            return rows + await _set_aside(admin, settings), mark
    except BrokerLost as lost:
        return [Row("broker", "out of reach", str(lost), broker_advice(lost))], mark
    except BrokerRefused as refused:
        return [Row("broker", "out of reach", str(refused), BROKER_RIGHTS)], mark


async def _topology(admin: Admin, settings: Settings) -> list[Row]:
    findings = await admin.verify(topology_of(settings))
    off = [one for one in findings if one.severity == "error"]
    rows = []
    missing = [one for one in off if one.found == "nothing"]
    if missing:
        names = ", ".join(f"{one.kind} {one.name}" for one in missing[:3]) + (", …" if len(missing) > 3 else "")
        advice = "nothing: the daemon declares it at its start or reload (or you: `delayer topology apply`)"
        rows.append(Row("topology", "note", f"{len(missing)} missing: {names}", advice))
    for one in off:
        if one.found != "nothing":
            found = f"{one.kind} {one.name}: expected {one.expected}, found {one.found}"
            rows.append(Row("topology", "off", *(await _different(admin, one.kind, one.name, found))))
    rows = rows or [Row("topology", "ok", "everything that could be seen is as it should be")]
    rows += [
        Row("topology", "note", one.found if one.name == "*" else f"{one.name}: {one.found}")
        for one in findings
        if one.severity != "error"
    ]
    return rows


async def _different(admin: Admin, kind: str, name: str, found: str) -> tuple[str, str]:
    """The difference, and the next step, which never deletes a queue with messages."""
    if kind == "policy":
        return found, "give the policy a pattern that does not match this queue (docs/versions.md)"
    if found.endswith(DOWN):
        return found, "see the broker's log; docs/versions.md says which messages end a queue"
    state = await admin.state(name) if kind == "queue" else None
    if state is not None and state.messages:
        advice = 'choose another name; bring them over (docs/operations.md, "An existing queue with other arguments")'
        return f"{found}; messages in it, which deleting it loses: {state.messages}", advice
    how = "delete it while it is empty and has no consumer," if kind == "queue" else "delete it"
    return found, f"{how} or choose another name; the broker names the first difference only"


async def _intake(admin: Admin, settings: Settings) -> list[Row]:
    """Whether a consumer reads the intake queue, as the broker knows it."""
    state = await admin.state(settings.intake.queue)
    if state is None or state.consumers:
        return []  # The missing queue was reported already.
    found = f"no consumer reads {quoted(settings.intake.queue)}; {state.messages} wait in it"
    return [Row("intake", "note", found, "start the daemon, or see in its log what it waits for")]


async def _destinations(admin: Admin, settings: Settings) -> list[Row]:
    ours = {exchange.name for exchange in topology_of(settings).exchanges}
    rows = []
    for name in dict.fromkeys(route.to for route in settings.routes if route.to):
        if await admin.exchange_exists(name):
            rows.append(Row("destination", "ok", f"exchange {quoted(name)}"))
        elif name not in ours:  # The daemon declares the others, and a note reports them.
            advice = "declare it, or change the route's `to`; due messages would be held"
            rows.append(Row("destination", "off", f"exchange {quoted(name)} does not exist", advice))
    return rows


async def _taken_over(admin: Admin, settings: Settings) -> list[Row]:
    """The cascades of other systems. Their owners declare missing parts."""
    rows = []
    for table in settings.takeovers:
        cascade = Cascade(table.cascade, owner=table.prefix)
        of = f"{cascade.owner} {cascade.kind}".lstrip()
        try:
            depths = await admin.depths(cascade.level(level) for level in range(table.levels_from, LEVELS))
            missing = [f"queue {name}" for name, depth in depths.items() if depth is None]
            missing += [] if await admin.exchange_exists(cascade.delivery) else [f"exchange {cascade.delivery}"]
        except BrokerRefused as refused:
            # RabbitMQ 4.3 shows them only to users that may configure them. The daemon needs no such right.
            rows.append(Row("takeover", "note", f"{of}: could not be seen: {refused}"))
            continue
        if missing:
            found = f"{of}: {len(missing)} missing: {missing[0]}" + (", …" if len(missing) > 1 else "")
            rows.append(Row("takeover", "note", found, "nothing: its owner declares it, and the daemon waits for that"))
        else:
            waiting = sum(depth or 0 for depth in depths.values())
            rows.append(Row("takeover", "ok", f"{of}: {len(depths)} levels, {waiting} messages in them"))
    return rows


async def _is_there(admin: Admin, queue: str) -> bool:
    """Whether the queue exists. Asked first, because a broker also refuses the right to read a missing queue."""
    try:
        return await admin.queue_exists(queue)
    except BrokerRefused:  # RabbitMQ 4.3 shows queues only to users that may configure them, so this one is unknown.
        return False


async def _left_in_the_cascade(admin: Admin, settings: Settings) -> list[Row]:
    """Whether a daemon in store mode may consume the rest of native mode. The rights of store mode do not allow it."""
    if uses_cascade(settings):
        return []
    name = settings.native.due_queue
    if not await _is_there(admin, name) or await admin.may_consume(name):
        return []
    found = f"left from native mode, and this user may not consume it: {quoted(name)}"
    advice = "the rights of native mode until the cascade is empty, or `delayer topology remove --only-cascade`"
    return [Row("cascade", "off", f"{found}. The daemon is not ready", f"{advice} (docs/security.md)")]


async def _delayed_by_the_broker(admin: Admin, settings: Settings) -> list[Row]:
    """Messages that RabbitMQ itself delays in delayer's queues, where nobody can list, cancel or bound them."""
    delayed = await admin.delayed(queues_at_work(settings), fresh=False)
    if None in delayed.values():
        found = "RabbitMQ 4.3 and later can delay messages in these queues, and only its management API shows them"
        return [Row("broker's delays", "note", found, "set broker.management_url")]
    return [
        Row(
            "broker's delays",
            "note",
            f"{count} in {quoted(name)}: not parked, listed, cancellable or bounded by max_delay before they are due",
            "let publishers send x-deliver-at instead of x-opt-delivery-time (docs/versions.md)",
        )
        for name, count in delayed.items()
        if count
    ]


async def _set_aside(admin: Admin, settings: Settings) -> list[Row]:
    """Messages on the broker that wait for an operator."""
    refused, strays = settings.refused.queue, cascade_of(settings).strays
    depths = await admin.depths([refused])
    if strays:
        try:
            depths |= await admin.depths([strays])
        except BrokerRefused:
            # RabbitMQ 4.3 shows it only to users that may configure it. In store mode a daemon needs no such right.
            if uses_cascade(settings):
                raise
    advice = {
        refused: "`delayer refused list` has the reasons; mend their publisher, then `delayer refused retry` or `drop`",
        strays: "`delayer strays list` has the reasons; `delayer strays retry` puts them back on their way",
    }
    return [
        Row("set aside", "note", f"{depth} in {quoted(name)}", advice[name]) for name, depth in depths.items() if depth
    ]


UNOWNED_MS: Final = 30_000
"""A message may be overdue for so long in a lane without an owner: daemons take such lanes within seconds."""


async def _store(settings: Settings, mark: str) -> list[Row]:
    url = settings.store_url
    if url is None:
        longest = duration_text(min(settings.intake.max_delay_ms, 268_435_455_000))
        return [Row("store", "ok", f"none configured: delays up to {longest}, no keys, no cancels")]
    try:
        seen = await stats.overview(url, settings.store.restore_ahead_ms)
    except StoreLost as lost:
        return [Row("store", "out of reach", str(lost), lost.advice or STORE_RUNS)]
    except BadStoreUrl as bad:
        return [Row("store", "off", str(bad), "write the URL as postgresql://user@host:port/database")]
    rows = [Row("store", "ok", str(settings.store.url or url))]
    if (wrong := schema.outdated(seen.schema_found)) is not None:
        return [*rows, Row("schema", "off", f"{wrong.found or 'missing'}; needed: {wrong.expected}", wrong.advice)]
    rows.append(Row("schema", "ok", schema.HEAD))
    if (wrong_owner := await schema.mistaken(url)) is not None:
        found = f"its tables belong to {wrong_owner.tables}, and the database to {wrong_owner.database}"
        advice = f"`db upgrade` is {wrong_owner.database}'s to run; docs/security.md says how to give the tables back"
        rows.append(Row("schema", "note", found, advice))
    rows.append(_locks(await schema.looked(url)))
    rows += _lanes(seen) + _shared_lanes(seen, mark)
    if seen.held:
        advice = "`delayer held list` has the reasons; the daemon tries them again, except those marked *by hand*"
        rows.append(Row("set aside", "note", f"{seen.held} held in the store", advice))
    if seen.late.segments:
        found = f"{seen.late.segments} with {seen.late.messages} messages should be restored by now"
        rows.append(Row("segments", "off", found, "see the daemons' logs, or run `delayer restore`"))
    if seen.segments.broken:
        found = f"{seen.segments.broken} do not read back, with {seen.segments.broken_messages} messages"
        rows.append(Row("segments", "off", found, "see docs/backlog.md; their bytes are kept"))
    return rows


def _locks(need: schema.LockNeed) -> Row:
    """Whether the server's lock table is large enough for all locks that the store may take at once."""
    found = f"max_locks_per_transaction is {need.allowed}"
    if need.enough:
        return Row("locks", "ok", f"{found}; needed: {need.needed}")
    found += f"; {need.lanes} lanes and {need.partitions} partitions may need {need.needed}"
    advice = (
        f"ALTER SYSTEM SET max_locks_per_transaction = {need.needed}, and restart Postgres: a full lock table fails "
        "transactions of every database of the server"
    )
    return Row("locks", "note", found, advice)


def _shared_lanes(seen: stats.StoreOverview, mark: str) -> list[Row]:
    """Whether daemons of another broker or virtual host own lanes. ``mark``: that of our broker; "" if unknown."""
    strange = [lane for lane in seen.lanes if lane.alive and lane.broker and mark and lane.broker != mark]
    if not strange:
        return []
    owned = f"{len(strange)} owned by {', '.join(sorted({lane.owner for lane in strange}))}"
    return [Row("lanes", "off", f"{owned} for another broker or virtual host", ONE_BROKER)]


def _lanes(seen: stats.StoreOverview) -> list[Row]:
    """Whether every due message has a daemon that releases it."""
    rows = []
    owners = {lane.owner for lane in seen.lanes if lane.alive}
    if owners:
        rows.append(
            Row("lanes", "ok", f"{sum(lane.alive for lane in seen.lanes)} owned by {', '.join(sorted(owners))}")
        )
    left = [lane for lane in seen.lanes if not lane.alive and lane.overdue_ms(seen.store_now_ms) > UNOWNED_MS]
    if left:
        since = in_words(max(lane.overdue_ms(seen.store_now_ms) for lane in left))
        lanes = f"lane {left[0].number}" if len(left) == 1 else f"{len(left)} lanes"
        found = f"messages are overdue by {since} in {lanes} that no daemon owns"
        rows.append(Row("lanes", "off", found, "start a daemon: it takes them within seconds; or see its log"))
    return rows
