"""A sound store, written by hand."""

from __future__ import annotations

from delayer.audit.rules.checks import CLAIM_HELD
from delayer.audit.rules.model import DAY_MS, GRACE_MS, HELD, PACKED, Context
from tests.audit.rows import DAY, NOTHING_FOUND, NOW, message, pointer, properties, segment, waiting

SOUND = [
    message(1),
    message(2, properties=properties(b"same"), body_digest=b"x" * 16),
    message(3, properties=properties(b"same"), body_digest=b"y" * 16),  # another body: not the same message
    message(4, properties=properties(b""), body_digest=b"x" * 16),
    message(5, properties=properties(b""), body_digest=b"x" * 16),  # no id: nothing can be said
    message(6, where=HELD, due_ms=NOW - 10 * DAY_MS),
    message(7, key=b"k"),
    message(8, where=PACKED),
    message(9, due_ms=NOW - GRACE_MS + 1),
    message(10, home=f"message_{DAY}", due_ms=DAY * DAY_MS + DAY_MS - 1),
    message(11, home="message_default", due_ms=(DAY + 500) * DAY_MS),
]
SEGMENTS = [segment(1), segment(2, cancelled=3, tombstones=3), segment(3, **NOTHING_FOUND)]
CLAIMS = [pointer(b"k", 7), waiting(b"k", 7), pointer(b"h", 6), waiting(b"h", 6, source=CLAIM_HELD, lane=5)]
CONTEXT = Context(NOW, {f"message_{DAY}": (DAY * DAY_MS, (DAY + 1) * DAY_MS)})
