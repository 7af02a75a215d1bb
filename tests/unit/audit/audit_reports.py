"""Reports to print and to draw: one with every part and with hostile names, and one of an empty store."""

from __future__ import annotations

import math
import random

from delayer.audit.findings import AuditReport, Bar, Calendar, Finding, LaneFigures, Past, Peak, RuleRun, Share, Totals

NOW_MS = 1_763_769_602_481
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
HOSTILE = (
    b"<script>document.title='owned'</script>",
    b'"><img src=x onerror="document.title=\'owned\'">',
    b"nul\x00and\x1b[31mescape\nnew line",
    b"\xff\xfe not UTF-8 \xc3",
    "\u202eright to left, ünïcödé {{ 7 * 7 }} {% raw %} [bold]markup[/]".encode(),
    b"</title></style></svg>" + b"long" * 50,
)
RULES = (
    "conservation",
    "segments",
    "integrity",
    "overdue",
    "lanes",
    "repeats",
    "keys",
    "schedules",
    "inbox",
    "peaks",
    "destinations",
)


def bars(width: int, count: int, scale: float, seed: int, before: int = 0) -> tuple[Bar, ...]:
    """A few overdue bars, then waves with gaps and peaks."""
    rng = random.Random(seed)
    start = NOW_MS // width * width - before * width
    found = []
    for n in range(count):
        messages = round(scale * (1.2 + math.sin(n / 9)) * rng.random() ** 2 * (8 if rng.random() < 0.01 else 1))
        if messages:
            found.append(Bar(start + n * width, width, messages, messages * 640))
    return tuple(found)


def share(messages: int, days: int, *names: bytes, verdict: str = "routed", way: str = "") -> Share:
    """Messages to a destination, due within these days."""
    exchange, key = names
    first_ms, last_ms = NOW_MS + HOUR, NOW_MS + days * DAY
    return Share(messages, messages * 640, first_ms, last_ms, to_exchange=exchange, to_key=key,
                 verdict=verdict, way=way)  # fmt: skip


def calendar() -> Calendar:
    midnight = NOW_MS // DAY * DAY + 10 * DAY
    shares = [
        share(5_200_000, 400, b"orders.out", b"order.reminder"),
        share(812_400, 30, b"", b"mail.inbox"),
        share(96_001, 9, b"payments.eu", b"capture", verdict="missing"),
        share(5_011, 9, b"orders.out", b"order.old", verdict="alternate", way="orders.unrouted"),
        share(901, 2, b"events", b"a.b", verdict="not asked"),
        share(77, 2, b"plugin", b"", verdict="not known", way="exchange 'plugin' is of type 'x-random'"),
        *(share(7 - n, 1, name, name, verdict="unroutable") for n, name in enumerate(HOSTILE)),
    ]
    routes = [
        Share(5_206_912, 3_310_000_000, NOW_MS + HOUR, NOW_MS + 400 * DAY, route=b"orders.in"),
        Share(812_400, 510_000_000, NOW_MS + 3 * HOUR, NOW_MS + 30 * DAY, route=b"mail.in"),
        Share(77, 60_000, NOW_MS + DAY, NOW_MS + 2 * DAY),
        Share(3, 700, NOW_MS + DAY, NOW_MS + DAY, route=HOSTILE[0]),
    ]
    return Calendar(
        release_rate=36_000.0,
        minutes=bars(MINUTE, 1500, 900, 1, before=60),
        hours=bars(HOUR, 768, 20_000, 2, before=24),
        days=(*bars(DAY, 900, 60000, 3, before=2), Bar(NOW_MS // DAY * DAY + 3650 * DAY, DAY, 12, 9000)),
        peaks=(
            Peak(midnight, 1000, 4_200_000, 2_700_000_000, 4_200_000 / 36_000),
            Peak(midnight + DAY + 9 * HOUR, MINUTE, 310_000, 190_000_000, 310_000 / 36_000),
            Peak(midnight + 2 * DAY, HOUR, 2_020_000, 1_190_000_000, 2_020_000 / 36_000),
        ),
        routes=tuple(routes),
        routes_more=2,
        destinations=tuple(shares),
        destinations_more=1_204,
    )


def findings() -> tuple[Finding, ...]:
    return (
        Finding("conservation", "violation", "lane 2: waiting", 3, None,
                {"expected": 2_011_006, "found": 2_011_003, "counters": {"parked": 2_100_003, "released": 88_997}}),
        Finding("integrity", "violation", "lane 1, waiting: the checksum does not match its bytes", 1, NOW_MS + 3 * DAY,
                {"examples": [81_230_411]}),
        Finding("destinations", "violation", 'exchange "payments.eu"', 96_001, NOW_MS + 2 * DAY,
                {"verdict": "missing", "why": "", "keys": 2, "routing_keys": ["capture", "refund"]}),
        *(Finding("destinations", "violation", f'queue "{name.decode("utf-8", "backslashreplace")}"', 1, NOW_MS + DAY,
                  {"verdict": "missing", "keys": 1, "routing_keys": [name.decode("utf-8", "backslashreplace")]})
          for name in HOSTILE),
        Finding("overdue", "warning", "lane 3", 312, NOW_MS - 4 * MINUTE,
                {"ages": {"1 min": 312}, "owned": True, "routes": {"orders.in": 312}}),
        Finding("lanes", "warning", "lane 4: no owner", 12, NOW_MS + 40 * DAY,
                {"waiting": 12, "held": 0, "last_owner": "worker-3 pid 4711"}),
        Finding("peaks", "warning", "2025-12-02T00:00:00Z: 4,200,000 due in 1 s", 4_200_000, NOW_MS + 10 * DAY,
                {"drain_seconds": 116.667, "release_rate": 36_000.0}),
    )  # fmt: skip


def lanes() -> tuple[LaneFigures, ...]:
    def lane(
        number: int, parked: int, released: int, waiting: int, held: int = 0, packed: int = 0, owner: str = "broker-1"
    ) -> LaneFigures:
        counters = {"parked": parked, "restored": 0, "released": released, "cancelled": 14, "compacted": packed}
        alive = {"": None, "worker-3": False}.get(owner, True)
        return LaneFigures(number, owner, alive, counters | {"held": held}, waiting, held, packed)

    return (
        lane(1, 9_000_500, 4_000_000, 3_000_486, packed=2_000_000),
        lane(2, 2_100_017, 89_000, 2_011_000),
        lane(3, 60_000, 58_000, 1_946, held=40, owner="broker-2"),
        lane(4, 26, 0, 12, owner="worker-3"),
        lane(5, 14, 0, 0, owner=""),
    )


def past() -> Past:
    """Two days of three routes, one of them with a hostile name."""
    first_ms = NOW_MS // HOUR * HOUR - 2 * DAY
    figures = ("start_ms", "released", "held", "cancelled", "p50_ms", "p99_ms", "worst_ms")
    hours = [
        dict(zip(figures, (first_ms + n * HOUR, 900 + n, n % 5, 3, 2, 9 + 40 * n, 5_000 * n), strict=True))
        for n in range(48)
    ]
    whole = dict(zip(figures, (first_ms, 44_328, 94, 144, 2, 1_889, 235_000), strict=True))
    worse = ("to_exchange", "to_key", "messages", "held_before", "held_now", "p99_before_ms", "p99_now_ms")
    odd = ("route", "to_exchange", "to_key", "messages", "odd", "odd_ms", "usual_ms")
    most = Bar(first_ms, 1_000, 812, 0), Bar(NOW_MS + DAY, 1_000, 4_200_000, 0)
    return Past(
        first_ms,
        NOW_MS,
        whole,
        hours,
        [{"route": name, "whole": whole, "hours": hours} for name in (b"orders.in", b"", HOSTILE[0])],
        [{"width_ms": 1_000, "released": most[0], "coming": most[1]},
         {"width_ms": HOUR, "released": None, "coming": None}],
        [dict(zip(worse, (b"payments.eu", b"capture", 5_300, 0.002, 0.125, 9, 61_000), strict=True)),
         dict(zip(worse, (b"", HOSTILE[1], 20, 0.0, 1.0, 0, 0), strict=True))],
        [dict(zip(odd, (b"orders.in", b"orders.out", b"order.reminder", 4_000, 312, 3_598, 3_600_000), strict=True)),
         dict(zip(odd, (HOSTILE[2], b"", HOSTILE[3], 4, 1, 9, 9_100), strict=True))],
    )  # fmt: skip


def full() -> AuditReport:
    """A report with every part."""
    found = findings()
    runs = tuple(
        RuleRun(
            rule,
            sum(one.rule == rule and one.severity == "violation" for one in found),
            sum(one.rule == rule and one.severity == "warning" for one in found) + 12 * (rule == "overdue"),
            {"repeats": "a sample was read, and this rule needs the whole store"}.get(rule, ""),
            12 if rule == "overdue" else 0,
            sum(one.count for one in found if one.rule == rule and one.severity == "violation"),
        )
        for rule in RULES
    )
    figures = lanes()
    totals = Totals(
        sum(lane.waiting for lane in figures), sum(lane.waiting for lane in figures) + 3, 40, 204, 2_000_000,
        4_900_000_000, 212_000_000, 1_200, NOW_MS - 4 * MINUTE, NOW_MS + 3650 * DAY,
    )  # fmt: skip
    return AuditReport(NOW_MS, 41.7, None, totals, figures, calendar(), runs, found, past=past())


def empty() -> AuditReport:
    """The report of an empty store."""
    runs = tuple(RuleRun(rule, 0, 0) for rule in RULES)
    return AuditReport(NOW_MS, 6.2, None, Totals(0, 0, 0, 0, 0, 0, 0, 0, None, None), (), Calendar(36_000.0), runs, ())
