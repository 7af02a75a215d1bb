"""What delayer check finds on the broker."""

from __future__ import annotations

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused
from delayer.commands.checking import Row
from delayer.commands.common import BROKER_RIGHTS, broker_advice, quoted
from delayer.core.cascade import LEVELS, Cascade
from delayer.core.errors import BrokerLost
from delayer.settings import Settings
from delayer.store.owners import mark_of
from delayer.wire.address import Address
from delayer.wiring import cascade_of, topology_of, uses_cascade


async def looked_at(settings: Settings) -> tuple[list[Row], str]:
    """And its mark, for the store's lanes."""
    shown, mark = str(settings.broker.url), ""
    try:
        async with await Admin.connect(settings.broker_url, management_url=settings.management_url) as admin:
            mark = mark_of(admin.cluster, Address.parse(settings.broker_url).vhost)
            rows = [Row("broker", "ok", shown)]
            rows += await _topology(admin, settings)
            rows += await _intake(admin, settings)
            rows += await _destinations(admin, settings)
            rows += await _taken_over(admin, settings)
            rows += await _left_in_the_cascade(admin, settings)
            return rows + await _set_aside(admin, settings), mark
    except BrokerLost as lost:
        return [Row("broker", "out of reach", str(lost), broker_advice(lost))], mark
    except BrokerRefused as refused:
        return [Row("broker", "out of reach", str(refused), BROKER_RIGHTS)], mark


async def _topology(admin: Admin, settings: Settings) -> list[Row]:
    cascade = cascade_of(settings) if uses_cascade(settings) else None
    findings = await admin.verify(topology_of(settings), cascade=cascade)
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
    """What is found, and what to do about it: never to delete what holds messages."""
    state = await admin.state(name) if kind == "queue" else None
    if state is not None and state.messages:
        advice = 'choose another name, and bring them over (docs/operations.md, "A queue that is there already")'
        return f"{found}; messages in it, which deleting it loses: {state.messages}", advice
    how = "delete it while it is empty and nobody consumes it," if kind == "queue" else "delete it"
    return found, f"{how} or choose another name; the broker names the first difference only"


async def _intake(admin: Admin, settings: Settings) -> list[Row]:
    """Whether anybody is at work, as the broker knows it."""
    state = await admin.state(settings.intake.queue)
    if state is None or state.consumers:
        return []  # what is missing was told already
    found = f"nobody consumes {quoted(settings.intake.queue)}; {state.messages} wait in it"
    return [Row("intake", "note", found, "start the daemon, or see in its log what it waits for")]


async def _destinations(admin: Admin, settings: Settings) -> list[Row]:
    ours = {exchange.name for exchange in topology_of(settings).exchanges}
    rows = []
    for name in dict.fromkeys(route.to for route in settings.routes if route.to):
        if await admin.exchange_exists(name):
            rows.append(Row("destination", "ok", f"exchange {quoted(name)}"))
        elif name not in ours:  # else the daemon declares it, and its absence was told as a note
            advice = "declare it, or change the route's `to`; due messages would be held"
            rows.append(Row("destination", "off", f"exchange {quoted(name)} does not exist", advice))
    return rows


async def _taken_over(admin: Admin, settings: Settings) -> list[Row]:
    """The cascades of other systems; what is missing there is theirs to declare."""
    rows = []
    for table in settings.takeovers:
        cascade = Cascade(table.cascade, owner=table.prefix)
        of = f"{cascade.owner} {cascade.kind}".lstrip()
        try:
            depths = await admin.depths(cascade.level(level) for level in range(table.levels_from, LEVELS))
            missing = [f"queue {name}" for name, depth in depths.items() if depth is None]
            missing += [] if await admin.exchange_exists(cascade.delivery) else [f"exchange {cascade.delivery}"]
        except BrokerRefused as refused:
            # RabbitMQ 4.3 shows them only to who may configure them, which the daemon need not.
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
    """Asked before the right to read it, which a broker turns down for a queue that is not there too."""
    try:
        return await admin.queue_exists(queue)
    except BrokerRefused:  # RabbitMQ 4.3 shows queues only to who may configure them: nothing can be said of it
        return False


async def _left_in_the_cascade(admin: Admin, settings: Settings) -> list[Row]:
    """Whether a daemon in store mode may empty what native mode left: with the rights of store mode it may not."""
    if uses_cascade(settings):
        return []
    closed = []
    for name in (settings.native.due_queue, cascade_of(settings).strays):
        if name and await _is_there(admin, name) and not await admin.may_consume(name):
            closed.append(name)
    if not closed:
        return []
    found = f"left from native mode, and this user may not consume it: {', '.join(map(quoted, closed))}"
    advice = "the rights of native mode until the cascade is empty, or `delayer topology remove --only-cascade`"
    return [Row("cascade", "off", f"{found}. The daemon is not ready", f"{advice} (docs/security.md)")]


async def _set_aside(admin: Admin, settings: Settings) -> list[Row]:
    """Messages on the broker that wait for a person."""
    refused, strays = settings.refused.queue, cascade_of(settings).strays
    depths = await admin.depths([refused])
    if strays:
        try:
            depths |= await admin.depths([strays])
        except BrokerRefused:
            # RabbitMQ 4.3 shows it only to who may configure it, which a daemon in store mode need not.
            if uses_cascade(settings):
                raise
    advice = {
        refused: "`delayer refused list` has the reasons; mend their publisher, then `delayer refused retry` or `drop`",
        strays: "`delayer strays list` has the reasons; they are tried again by themselves, those marked *by hand* not",
    }
    return [
        Row("set aside", "note", f"{depth} in {quoted(name)}", advice[name]) for name, depth in depths.items() if depth
    ]
