"""What had to be refused: each of them stands in the refused queue, as it came, with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from delayer.core.message import Delivery
from tests.faults.fleet import Fleet
from tests.rig.letters import NUMBER, doomed
from tests.rig.raw import Inbox, Props, Raw, content

REASON = b"x-delayer-refused"


class Doomed(NamedTuple):
    """``again``: how many stand there more than once. ``wrong``: what is not as it was sent, or is there more often
    than it was read, in words."""

    sent: int
    missing: list[int]
    again: int
    wrong: list[str]

    @property
    def kept(self) -> bool:
        return not (self.missing or self.wrong)


async def refused(fleet: Fleet) -> Doomed:
    """Read the refused queue to its end, with the daemons stopped."""
    found = [one.delivery for one in (await emptied(fleet, "delays.refused")).arrivals]
    readings = fleet.ledger.account.readings
    return judged(fleet.ledger.doomed, found, None if readings is None else readings.doomed)


async def emptied(fleet: Fleet, queue: str) -> Inbox:
    """Everything that stands in a queue."""
    depth = (await fleet.ledger.depths(queue))[queue]
    async with await Raw.connect(fleet.place.broker) as raw:
        inbox = await raw.inbox(queue)
        await inbox.until(lambda: len(inbox.arrivals) >= depth)
        return inbox


def judged(sent: int, found: Iterable[Delivery], read: Callable[[int], int] | None = None) -> Doomed:
    """``read``: how often the doomed message of a number was read, where that is known. Pure."""
    counts: Counter[int] = Counter()
    wrong = []
    for one in found:
        number = NUMBER.unpack_from(one.body)[0] if len(one.body) >= NUMBER.size else sent
        if number >= sent or (why := _differs(number, one)):
            wrong.append(f"refused and none of the doomed: {one}" if number >= sent else f"doomed {number}: {why}")
            continue
        counts[number] += 1
    if read is not None:
        wrong += [
            f"doomed {number}: stands there {count} times, and was read {read(number)} times"
            for number, count in sorted(counts.items())
            if count > read(number)
        ]
    missing = [number for number in range(sent) if number not in counts]
    return Doomed(sent, missing, sum(count > 1 for count in counts.values()), wrong)


def _differs(number: int, found: Delivery) -> str:
    """In what the message is another one than was sent, beside what it has to have gained."""
    letter, props = doomed(number), Props.decode(found.properties)
    headers = dict(props.headers or ())
    if found.body != letter.body:
        return f"its body is {found.body!r}"
    said = {name: value.kind + value.raw for name, value in headers.items()}
    if any(said.get(name) != value for name, value in letter.kept):
        return f"its headers are {headers}"
    if props.message_id != b"doomed-%d" % number:
        return f"its message_id is {props.message_id!r}"
    if REASON not in headers or not content(headers[REASON]).startswith(b"x-delay: "):
        return f"its reason is {headers.get(REASON)}"
    return ""
