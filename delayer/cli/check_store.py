"""The rows of ``delayer check``, and those about the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from delayer.cli.output import SHOWN, quoted
from delayer.config.model import Settings
from delayer.core.clocks import ClockOffset
from delayer.core.errors import StoreLost
from delayer.core.readable import counted, duration
from delayer.schedule.schedule import ScheduleState
from delayer.schedule.zone_data import zone_data, zone_directories
from delayer.store import foreign_locks, schema, servers
from delayer.store.admin import needs, stats
from delayer.store.errors import STORE_RUNS, BadStoreUrl, StoreUnfit, check_arrow
from delayer.store.schedules import reading
from delayer.store.session import connect_for

SPARE_CONNECTIONS: Final = 20
"""Connections to advise beyond the daemons': for commands, a backup, and Postgres's reserved connections."""
UNOWNED_MS: Final = 30_000
"""How long a message may be overdue in a lane without an owner. Daemons acquire such lanes within seconds."""

STUCK: Final = 'see the broker and that daemon\'s log; docs/operations.md, "A lane that does not advance"'


CheckResult = Literal["ok", "note", "off", "refused", "out of reach"]


class Row(NamedTuple):
    """A checked item. ``advice``: the next step, if any."""

    what: str
    result: CheckResult
    found: str
    advice: str = ""


class CheckReport(list[Row]):
    def add(self, what: str, result: CheckResult, found: object, advice: str = "") -> None:
        self.append(Row(what, result, str(found), advice))


async def check_store(report: CheckReport, settings: Settings, url: str) -> ClockOffset | None:
    """Returns the database's clock, if that was seen."""
    try:
        await servers.check(url)
        seen = await stats.overview(url, settings.store.restore_ahead_ms)
        async with connect_for(url, "delayer check", "look at the server") as connection:
            server = await servers.state(connection)
            if (wrong := schema.find_mismatch(seen.schema_found)) is None:
                need = await needs.lock_need(connection, settings.store.history_days)
                connections = await needs.connection_need(connection)
                rights = await needs.missing_rights(connection, history=settings.store.history_days > 0)
                open_to_all = await needs.open_functions(connection)
                zones = await reading.zone_version(connection)
                daemons = await reading.zone_versions(connection)
                failed = await reading.find(connection, SHOWN, state=ScheduleState.FAILED)
                # The lanes of routes that no daemon has used yet.
                limited = len({route.from_ for route in settings.routes if route.max_rate})
                need = need._replace(limited=max(need.limited, limited))
                tokens = bool(settings.http.listen and settings.http.tokens_file)
                connections = connections._replace(limited=max(connections.limited, limited), tokens=tokens)
    except StoreUnfit as unfit:
        report.add("store", "off", unfit, unfit.advice)
        return None
    except StoreLost as lost:
        report.add("store", "refused" if lost.advice else "out of reach", lost, lost.advice or STORE_RUNS)
        return None
    except BadStoreUrl as bad:
        report.add("store", "off", str(bad), "write the URL as postgresql://user@host:port/database")
        return None
    report.add("store", "ok", str(settings.store.url or url))
    if server.unsafe:
        found = f"off in Postgres: {', '.join(server.unsafe)}; a crash of its machine loses or damages messages"
        report.add("durability", "off", found, server.advice)
    if wrong is not None:
        report.add("schema", "off", f"{wrong.found or 'missing'}; needed: {wrong.expected}", wrong.advice)
        return server.clock
    report.add("schema", "ok", schema.HEAD)
    for one in rights:
        found = f"{one.role} lacks {one.right} on {one.on}: the daemon cannot park, release, or maintain its tables"
        report.add("rights", "off", found, f"{one.advice} (docs/security.md)")
    if open_to_all:
        found = f"every role may call {counted(open_to_all, 'function')} of the SQL inbox, as after `pg_restore -x`"
        report.add("rights", "off", found, 'revoke it: docs/security.md, "Postgres: applications that send by SQL"')
    for foreign in seen.foreign:
        report.add("locks", "off", foreign, foreign_locks.ADVICE)
    _locks(report, need)
    _connections(report, connections)
    _lanes(report, seen)
    _messages(report, seen)
    _zones(report, zones, daemons)
    for record in failed.schedules:
        advice = f"correct it (`delayer schedule edit {record.name}`), then `delayer schedule resume {record.name}`"
        report.add("schedule", "off", f"{quoted(record.name)} sends nothing: {record.why}", advice)
    return server.clock


def _zones(report: CheckReport, used: str, daemons: Mapping[str, Sequence[str]]) -> None:
    """Compare this host's zone data, and those of the live daemons, with the oldest by which a daemon may have computed
    the times of schedules."""
    if not used:
        return
    data = zone_data(zone_directories())
    found = ["none here" if data is None else f"{data.version} in {data.path}"]
    if data is None or data.version != used:
        found.append(f"the schedules of this store use {used}")
    found += [f"{version} on {', '.join(owners)}" for version, owners in daemons.items() if version != used]
    if len(found) == 1:
        report.add("zone data", "ok", *found)
    else:
        advice = "install the same tzdata on every host of a daemon, the newest one"
        report.add("zone data", "note", "; ".join(found), advice)


def _messages(report: CheckReport, seen: stats.StoreOverview) -> None:
    """Check held messages and segments."""
    if seen.held:
        advice = "`delayer held list` has the reasons; the daemon tries them again, except those marked *by hand*"
        report.add("held", "note", f"{seen.held} in the store", advice)
    if seen.inbox is None:
        found = f"not counted within {stats.INBOX_SECONDS} s"
        report.add("SQL inbox", "note", found, 'see docs/operations.md, "An SQL inbox that is not read"')
    elif seen.inbox.unread_ms:
        age = duration(seen.inbox.unread_ms / 1000)
        found = f"{counted(seen.inbox.messages, 'message')} not read yet; the oldest was sent {age} ago"
        report.add("SQL inbox", "off", found, "the owner of the first lane reads it: see its log, or start a daemon")
    if seen.late.segments:
        found = f"{seen.late.segments} with {counted(seen.late.messages, 'message')} should be restored by now"
        report.add("segments", "off", found, "see the daemons' logs, or run `delayer restore`")
    if seen.segments.segments:
        try:
            check_arrow()
        except StoreLost as lost:
            report.add("segments", "off", lost, lost.advice)
    if seen.segments.broken:
        found = f"{seen.segments.broken} unreadable, with {counted(seen.segments.broken_messages, 'message')}"
        report.add("segments", "off", found, "see docs/backlog.md; their bytes are kept")


def _connections(report: CheckReport, need: needs.ConnectionNeed) -> None:
    number = need.needed + SPARE_CONNECTIONS
    advice = f"ALTER SYSTEM SET max_connections = {number}, and restart Postgres"
    advice = f"{need.command} {number}" if need.command else advice
    found = f"the server allows {need.allowed}; the daemons need up to {need.needed}"
    enough = need.needed <= need.allowed
    report.add("connections", "ok" if enough else "off", found, "" if enough else advice)


def _locks(report: CheckReport, need: needs.LockNeed) -> None:
    """Check that the server's lock table holds all locks that the store may take at once."""
    found = f"max_locks_per_transaction is {need.allowed}"
    if need.enough:
        report.add("locks", "ok", f"{found}; needed: {need.needed}")
        return
    found += f"; {need.lanes} lanes and {need.partitions + need.of_history} partitions may need {need.needed}"
    advice = f"ALTER SYSTEM SET max_locks_per_transaction = {need.needed}, and restart Postgres"
    report.add(
        "locks", "note", found, f"{advice}: a full lock table fails transactions of every database of the server"
    )


def _lanes(report: CheckReport, seen: stats.StoreOverview) -> None:
    owned = [lane for lane in seen.lanes if lane.alive]
    if owned:
        report.add("lanes", "ok", f"{len(owned)} owned by {', '.join(sorted({lane.owner for lane in owned}))}")
    left = [lane for lane in seen.lanes if not lane.alive and lane.overdue_ms(seen.store_now_ms) > UNOWNED_MS]
    if left:
        since = duration(max(lane.overdue_ms(seen.store_now_ms) for lane in left) / 1000)
        lanes = f"lane {left[0].number}" if len(left) == 1 else f"{len(left)} lanes"
        found = f"messages are overdue by {since} in {lanes} that no daemon owns"
        advice = "a daemon takes such lanes within seconds: see the logs of those that run for why not, or start one"
        report.add("lanes", "off", found, advice)
    for lane in owned:
        of = f"lane {lane.number} of {lane.owner} "
        if lane.stuck_ms:
            found = f"{of}has had due messages for {duration(lane.stuck_ms / 1000)}, and releases none"
            report.add("lanes", "off", found, STUCK)
        elif lane.behind_ms and lane.route is None:
            found = f"{of}advances, but a message has been due for {duration(lane.behind_ms / 1000)}"
            report.add("lanes", "note", found, 'nothing while a burst goes out; else see "row skipped" in its log')
