"""Figures beside the ceilings of the same run and the targets set for them. Information: nothing fails here.

Judged is what was measured, with all of its digits; what is shown of a ratio has three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench import ceilings
from bench.figures import Figure, Result

Reading = Callable[[Result, Figure], float | None]
"""The number to judge, from a figure: its value, its ratio to a ceiling, or to the same with no backlog."""


@dataclass(frozen=True)
class Target:
    """Judges figures called ``what`` of ``section`` under the conditions ``at``: at most ``bound``, or at least."""

    section: str
    what: str
    bound: float
    text: str
    at_least: bool = False
    reading: Reading = lambda _, figure: figure.value
    at: tuple[tuple[str, int], ...] = ()
    only: Callable[[Figure], bool] = lambda _: True

    def concerns(self, figure: Figure) -> bool:
        named = (figure.section, figure.what) == (self.section, self.what)
        return named and dict(self.at).items() <= figure.at.items() and self.only(figure)

    def judge(self, result: Result, figure: Figure) -> None:
        found = self.reading(result, figure)
        if found is None:
            return
        met = found >= self.bound if self.at_least else found <= self.bound
        figure.targets.append({"text": self.text, "found": round(found, 3), "met": met})


def ratio(_: Result, figure: Figure) -> float | None:
    return figure.ratio


def beside_no_backlog(result: Result, figure: Figure) -> float | None:
    """A figure over the same figure without a backlog."""
    same = result.find(figure.section, figure.what, **(figure.at | {"backlog": 0}))
    return figure.value / same.value if same is not None and same.value else None


def has_backlog(figure: Figure) -> bool:
    """As many rows as the target speaks of; a quick run has fewer, and proves nothing."""
    return figure.at.get("backlog", 0) >= TEN_MILLION


def a_million(figure: Figure) -> bool:
    """As many rows as the target speaks of, about: of few it says how long Spark's start takes."""
    return 0.95 <= figure.at.get("rows", 0) / 1_000_000 <= 1.05


TEN_MILLION = 10_000_000
SMALL = (("body", 512),)
AT_5000 = (("rate", 5000),)
TARGETS = (
    Target("park", "park", 60_000, "≥ 60 k/s", at_least=True, at=SMALL),
    Target("park", "park", 0.6, "≥ 0.6 of the ceiling", at_least=True, reading=ratio),
    Target("release", "release", 35_000, "≥ 35 k/s", at_least=True, at=SMALL),
    Target("release", "release", 0.7, "≥ 0.7 of the ceiling", at_least=True, reading=ratio),
    *(
        Target(one, one, 0.9, "≥ 0.9 of no backlog", at_least=True, reading=beside_no_backlog, only=has_backlog)
        for one in ("park", "release")
    ),
    *(
        Target(one, "memory of daemon", 150, "≤ 150 MB", only=has_backlog, at=at)
        for one, at in (("park", SMALL), ("release", SMALL), ("steady", ()), ("start", ()))
    ),
    Target("steady", "early", 0, "none"),
    Target("steady", "missing", 0, "none"),
    *(Target(one, "repeated", 0, "none") for one in ("steady", "churn")),
    Target("steady", "lateness p99", 15, "≤ 15 ms", at=AT_5000),
    Target("steady", "lateness p99.9", 50, "≤ 50 ms", at=AT_5000),
    *(
        Target("steady", f"lateness {one}", 1.1, "≤ 1.1 of no backlog", reading=beside_no_backlog, only=has_backlog)
        for one in ("p50", "p99", "p99.9")
    ),
    Target("steady", "CPU of daemon", 60, "≤ 60 µs", at=AT_5000),
    Target("burst", "early", 0, "none"),
    Target("burst", "missing", 0, "none"),
    Target("burst", "drained, from the first due instant", 4, "≤ 4 s for 100,000", at=(("count", 100_000),)),
    Target("native", "into the cascade", 0.9, "≥ 0.9 of the straight client", at_least=True, reading=ratio),
    *(Target("native", one, 0, "none") for one in ("early", "missing")),
    Target("bodies", "memory of daemon", 400, "≤ 400 MB with 1,000", at=(("count", 1000),)),
    Target("bodies", "missing", 0, "none"),
    Target("start", "ready", 2, "≤ 2 s", only=has_backlog),
    Target("start", "first release", 2, "≤ 2 s", only=has_backlog),
    Target("processes", "smallest share, park", 0.25, "≥ a quarter", at_least=True, at=(("workers", 2),)),
    Target("processes", "smallest share, release", 0.25, "≥ a quarter", at_least=True, at=(("workers", 2),)),
    Target("adoption", "adopted, killed", 5, "≤ 5 s"),
    Target("adoption", "adopted, hanging", 5, "≤ 5 s"),
    Target("compaction", "shrinks by", 8, "≥ 8", at_least=True),
    Target("compaction", "compact, rate", 50_000, "≥ 50 k/s", at_least=True),
    Target("compaction", "restore, rate", 50_000, "≥ 50 k/s", at_least=True, only=a_million),
    Target("compaction", "restore, seconds with all around it", 20, "≤ 20 s for 1,000,000", only=a_million),
    Target("compaction", "beside compact, lateness p99", 100, "≤ 100 ms"),
    Target("compaction", "beside restore, lateness p99", 100, "≤ 100 ms"),
    *(Target("compaction", f"beside {one}, missing", 0, "none") for one in ("compact", "restore")),
    Target("churn", "early", 0, "none"),
    Target("churn", "missing", 0, "none"),
    Target("churn", "claim, at the end over before", 1.1, "≤ 1.1"),
    Target("churn", "partition, at the end over before", 1.1, "≤ 1.1"),
    Target("churn", "other tables, at the end over before", 1.1, "≤ 1.1"),
    Target("looking", "status", 50, "≤ 50 ms", only=has_backlog),
    *(
        Target("looking", one, 200, "≤ 200 ms", only=has_backlog)
        for verb in (
            "list, first page",
            "list, a later page",
            "list by due instant",
            "list by key",
            "list by route",
            "show",
            "reschedule",
            "cancel",
            "cancel what is gone",
            "`delayer status`",
            "`delayer status`, beside a daemon",
            "`delayer list`",
            "`delayer show`",
            "`delayer cancel`",
        )
        for one in (verb, f"{verb}, slowest")
    ),
    Target("importing", "import of TimeoutData", 10_000, "≥ 10 k/s", at_least=True, at=(("count", 1_000_000),)),
)


def compare(result: Result) -> None:
    """Fill in the ratios and judge every figure that has a target."""
    for figure in result.figures:
        figure.targets.clear()
        limit = _limit(result, figure)
        if limit is not None:
            figure.of = "one process" if figure.section == "processes" else limit.what
            figure.ratio = figure.value / limit.value  # as it is: what is rounded first may pass for what it is not
    judged = set()
    for figure in result.figures:
        for target in TARGETS:
            if target.concerns(figure):
                before = len(figure.targets)
                target.judge(result, figure)
                if len(figure.targets) > before:
                    judged.add(target)
    result.about["not_judged"] = [f"{one.section}: {one.what} {one.text}" for one in TARGETS if one not in judged]


def _limit(result: Result, figure: Figure) -> Figure | None:
    """What this figure could be at best, by the ceilings of the same run."""
    body = {"body": figure.at.get("body", 512)}
    publish = result.find("ceilings", ceilings.PUBLISH, **body)
    by_name: dict[tuple[str, str], list[Figure | None]] = {
        ("park", "park"): [
            result.find("ceilings", ceilings.CONSUME, **body),
            result.find("ceilings", ceilings.COPY, **body),
        ],
        ("release", "release"): [publish],
        ("burst", "rate"): [publish],
        ("native", "into the cascade"): [result.find("native", "straight client into the cascade")],
        ("processes", "park"): [result.find("processes", "park", workers=1)],
        ("processes", "release"): [result.find("processes", "release", workers=1)],
    }
    if figure.section == "peers" and figure.unit == "msg/s":
        by_name[figure.section, figure.what] = [ours(result, figure)]
    found = [one for one in by_name.get((figure.section, figure.what), []) if one is not None and one.value]
    return min(found, key=lambda one: one.value, default=None)


def ours(result: Result, peer: Figure) -> Figure | None:
    """Our figure for what a peer does."""
    if "poller" in peer.what:
        ours = [one for one in result.figures if (one.section, one.what) == ("release", "release")]
        # Both with rows that wait, if there are such figures: more beside ours than beside the poller.
        return max((one for one in ours if one.at.get("body") == 512), key=lambda one: one.at["backlog"], default=None)
    return result.find("native", "into the cascade")
