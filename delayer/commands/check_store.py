"""What delayer check finds in the store."""

from __future__ import annotations

from typing import Final

from delayer.commands.checking import Row
from delayer.commands.common import STORE_RUNS
from delayer.core.delay import in_words
from delayer.core.errors import StoreLost
from delayer.settings import Settings, duration_text
from delayer.store import roles, schema
from delayer.store import status as store_status
from delayer.store.errors import BadStoreUrl
from delayer.store.owners import APART

UNOWNED_MS: Final = 30_000
"""How long something may be overdue in a lane without an owner: daemons adopt such lanes within seconds."""


async def looked_at(settings: Settings, mark: str) -> list[Row]:
    url = settings.store_url
    if url is None:
        longest = duration_text(min(settings.intake.max_delay_ms, 268_435_455_000))
        return [Row("store", "ok", f"none configured: delays up to {longest}, no keys, no cancels")]
    try:
        seen = await store_status.overview(url, settings.store.restore_ahead_ms)
    except StoreLost as lost:
        return [Row("store", "out of reach", str(lost), lost.advice or STORE_RUNS)]
    except BadStoreUrl as bad:
        return [Row("store", "off", str(bad), "write the URL as postgresql://user@host:port/database")]
    rows = [Row("store", "ok", str(settings.store.url or url))]
    if (wrong := schema.outdated(seen.schema_found)) is not None:
        return [*rows, Row("schema", "off", f"{wrong.found or 'missing'}; needed: {wrong.expected}", wrong.advice)]
    rows.append(Row("schema", "ok", schema.HEAD))
    if (wrong_owner := await roles.mistaken(url)) is not None:
        found = f"its tables belong to {wrong_owner.tables}, and the database to {wrong_owner.database}"
        advice = f"`db upgrade` is {wrong_owner.database}'s to run; docs/security.md says how to give the tables back"
        rows.append(Row("schema", "note", found, advice))
    rows += _lanes(seen) + _shared(seen, mark)
    if seen.held:
        advice = "`delayer held list` has the reasons; they are tried again by themselves, those marked *by hand* not"
        rows.append(Row("set aside", "note", f"{seen.held} held in the store", advice))
    if seen.late.segments:
        found = f"{seen.late.segments} with {seen.late.messages} messages should be restored by now"
        rows.append(Row("segments", "off", found, "see the daemons' logs, or run `delayer restore`"))
    if seen.segments.broken:
        found = f"{seen.segments.broken} do not read back, with {seen.segments.broken_messages} messages"
        rows.append(Row("segments", "off", found, "see docs/backlog.md; their bytes are kept"))
    return rows


def _shared(seen: store_status.StoreOverview, mark: str) -> list[Row]:
    """Whether daemons of another broker, or virtual host, own lanes in it. ``mark``: ours; "" where it is not known."""
    strange = [lane for lane in seen.lanes if lane.alive and lane.broker and mark and lane.broker != mark]
    if not strange:
        return []
    owned = f"{len(strange)} owned by {', '.join(sorted({lane.owner for lane in strange}))}"
    return [Row("lanes", "off", f"{owned} for another broker or virtual host", APART)]


def _lanes(seen: store_status.StoreOverview) -> list[Row]:
    """Whether what is due has somebody to release it."""
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
        rows.append(Row("lanes", "off", found, "start a daemon: it adopts them within seconds; or see its log"))
    return rows
