"""Keys (``x-delay-key``): does each stand for exactly one waiting message, and each such message behind its key? Pure.

A held message need not be behind its key: it was perhaps held without ever having waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from delayer.audit.findings import Finding
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.message import EXAMPLES
from delayer.audit.rules.tally import Key, Partial, Tally, combined

RULE: Final = "keys"
KIND: Final = "key fault"
COLLIDES = "several waiting messages have one key"
UNREACHABLE = "a waiting message that its key does not stand for"
DANGLES = "a key that stands for no message"

POINTER, HELD, WAITING = 0, 1, 2


class Claim(NamedTuple):
    """``source`` is POINTER (a row of message_key, which says where its message is), HELD or WAITING. Sorted by these
    three, a key's pointer comes first, and of two messages always the same one."""

    key: bytes
    source: int
    id: int
    lane: int
    due_ms: int


def judged(claims: Iterable[Claim]) -> Iterator[Partial]:
    """The faults of keys. ``claims`` must be sorted; one key's are looked at one by one and never held together."""
    found: dict[Key, Tally] = {}
    for _, group in groupby(claims, attrgetter("key")):
        for fault, tally in _faults(group):
            key = Key(KIND, 0, fault.encode())
            found[key] = combined(found[key], tally) if key in found else tally
    yield from found.items()


def _faults(claims: Iterable[Claim]) -> Iterator[tuple[str, Tally]]:
    pointer: Claim | None = None
    met = False
    waiting: Tally | None = None
    for claim in claims:
        if claim.source == POINTER:
            pointer = claim
            continue
        if pointer is not None:
            met = met or _meets(pointer, claim)
        if claim.source == WAITING:
            waiting = _with(waiting, claim)
    if waiting is not None and waiting.messages > 1:
        yield COLLIDES, waiting
    elif waiting is not None and not met:
        yield UNREACHABLE, waiting
    elif pointer is not None and not met:
        yield DANGLES, _with(None, pointer)


def _meets(pointer: Claim, message: Claim) -> bool:
    """Would a cancel by the key find this message? A held one is looked for by its id alone."""
    return pointer.id == message.id and (message.source == HELD or pointer[3:] == message[3:])


def _with(tally: Tally | None, claim: Claim) -> Tally:
    if tally is None:
        return Tally(1, 0, claim.due_ms, claim.due_ms, (claim.id,))
    examples = tally.examples if len(tally.examples) == EXAMPLES else (*tally.examples, claim.id)
    return Tally(
        tally.messages + 1, 0, min(tally.first_due_ms, claim.due_ms), max(tally.last_due_ms, claim.due_ms), examples
    )


def findings(evidence: Evidence) -> list[Finding]:
    return [
        Finding(
            RULE,
            "violation",
            key.first.decode(),
            tally.messages,
            tally.first_due_ms,
            {"examples": list(tally.examples)},
        )
        for key, tally in evidence.of(KIND)
    ]
