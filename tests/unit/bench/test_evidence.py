"""Which deliveries belong to one stall, and which evidence names its cause."""

from __future__ import annotations

import pytest

from bench.evidence import Span, Stall, cause_of, covered, merged, of_postgres, shares, stalls, weigh

STALL = Stall(99.0, 101.0, 40, 400.0, 100.0)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        pytest.param([], ("unknown", ""), id="nothing was slow"),
        pytest.param([("confirm of the probe", 100.0, 100.4)], ("broker", "confirm of the probe"), id="broker"),
        pytest.param([("confirm of the probe", 100.0, 100.19)], ("unknown", ""), id="too short to explain it"),
        pytest.param([("confirm of the probe", 99.0, 100.0)], ("unknown", ""), id="over before it"),
        pytest.param([("COMMIT", 99.0, 99.9), ("COMMIT", 100.5, 101.0)], ("unknown", ""), id="beside the worst"),
        pytest.param([("commit of the probe", 99.9, 100.3)], ("database", "commit of the probe"), id="database"),
        pytest.param(
            [("confirm of the probe", 100.0, 100.4), ("commit of the probe", 100.1, 100.4)],
            ("machine", "confirm and commit of the probes"),
            id="both at the same time: their disk",
        ),
        pytest.param(
            [("confirm of the probe", 100.0, 100.21), ("commit of the probe", 100.21, 100.4)],
            ("broker", "confirm of the probe"),
            id="one after the other",
        ),
        pytest.param(
            [("loop_lag", 100.0, 100.4), ("publish", 100.0, 100.4)], ("ours", "loop_lag"), id="our event loop"
        ),
        pytest.param([("loop_lag", 100.0, 100.4), ("gc", 100.0, 100.4)], ("ours", "gc"), id="our garbage"),
        pytest.param(
            [("loop_lag", 100.0, 100.4), ("run queue", 100.0, 100.3)], ("machine", "run queue"), id="no CPU for anyone"
        ),
        pytest.param(
            [("lock wait", 100.0, 100.4), ("settle", 100.0, 100.4)], ("ours", "lock wait"), id="our own locks"
        ),
        pytest.param([("publish", 100.0, 100.3)], ("broker", "publish"), id="only our queue's confirms"),
        pytest.param([("settle", 100.0, 100.1), ("settle", 100.2, 100.3)], ("ours", "settle"), id="two in a row"),
        pytest.param([("claim", 100.0, 100.3), ("COMMIT", 100.0, 100.3)], ("database", "COMMIT"), id="its log says so"),
        pytest.param([("park", 100.0, 100.4)], ("unknown", ""), id="a park delays no delivery"),
        pytest.param(
            [("claim", 100.0, 100.4), ("CPU pressure", 100.0, 100.4)], ("machine", "CPU pressure"), id="too little CPU"
        ),
        pytest.param(
            [("CPU pressure", 100.0, 100.4), ("confirm of the probe", 100.0, 100.4)],
            ("broker", "confirm of the probe"),
            id="pressure explains less than a probe",
        ),
        pytest.param([("checkpoint", 0.0, 999.0)], ("unknown", ""), id="a checkpoint alone slows nothing"),
    ],
)
def test_the_cause_of_a_stall(spans: list[tuple[str, float, float]], expected: tuple[str, str]) -> None:
    assert cause_of(STALL, weigh(STALL, [Span(*one) for one in spans])) == expected


def test_late_deliveries_that_overlap_are_one_stall() -> None:
    late = [(1_000, 1_300), (1_320, 1_400), (1_100, 1_180), (2_000, 2_060)]
    assert stalls(late) == [Stall(1.0, 1.4, 3, 300, 1.0), Stall(2.0, 2.06, 1, 60, 2.0)]


@pytest.mark.parametrize(
    ("touched", "cause"), [pytest.param(0, "database", id="the worst"), pytest.param(100, "unknown", id="another one")]
)
def test_evidence_counts_only_where_the_worst_delivery_was_late(touched: int, cause: str) -> None:
    """Of deliveries that are equally late, the first is the worst."""
    [stall] = stalls((40 * n, 40 * n + 55) for n in range(250))
    assert stall.deliveries == 250
    begin = 0.04 * touched + 0.01
    assert cause_of(stall, weigh(stall, [Span("COMMIT", begin, begin + 0.03)]))[0] == cause


def test_spans_that_overlap_cover_their_time_once() -> None:
    spans = [Span("a", 0.0, 2.0), Span("b", 1.0, 3.0), Span("c", 5.0, 9.0), Span("d", 1.5, 1.6)]
    assert covered(spans, 0.5, 6.0) == pytest.approx(3.5)


def test_spans_of_a_kind_that_touch_are_one() -> None:
    spans = [Span("a", 2.0, 3.0), Span("a", 1.0, 2.0), Span("b", 2.5, 4.0), Span("a", 3.1, 4.0), Span("a", 1.1, 1.2)]
    assert merged(spans) == [Span("a", 1.0, 3.0), Span("a", 3.1, 4.0), Span("b", 2.5, 4.0)]


def test_the_evidence_names_what_covers_the_stall_and_no_cause_too() -> None:
    found = weigh(STALL, [Span("checkpoint", 0.0, 999.0), Span("claim", 100.3, 101.0), Span("gc", 200.0, 201.0)])
    assert found == {"checkpoint": 400.0, "claim": 100.0}


def test_each_cause_has_a_row() -> None:
    rows = shares([(STALL, "broker"), (Stall(1.0, 2.0, 2, 900.0, 1.0), "broker")])
    assert [(row.cause, *row[1:]) for row in rows if row.stalls] == [("broker", 2, 42, 900.0)]
    assert [row.cause for row in rows] == ["broker", "database", "machine", "ours", "unknown"]


def test_slow_commits_lock_waits_and_checkpoints_come_from_the_log_of_postgres() -> None:
    log = "\n".join(
        [
            "2026-11-30 14:00:00.000 UTC [7]  LOG:  checkpoint starting: time",
            "2026-11-30 14:00:01.500 UTC [8] test LOG:  duration: 250.000 ms  statement: COMMIT;",
            "2026-11-30 14:00:01.600 UTC [8] test LOG:  duration: 90.000 ms  execute __asyncpg_1__: SELECT 'COMMIT'",
            "2026-11-30 14:00:02.000 UTC [9] test LOG:  process 9 still waiting for ShareLock on transaction 5 after"
            " 50.1 ms",
            "2026-11-30 14:00:02.100 UTC [9] test LOG:  process 9 acquired ShareLock on transaction 5 after 150.000 ms",
            "2026-11-30 14:00:05.000 UTC [7]  LOG:  checkpoint complete: wrote 7 buffers (0.0%)",
        ]
    )
    began = 1796047200.0
    found = [(what, round(begin - began, 3), round(end - began, 3)) for what, begin, end in of_postgres(log)]
    assert found == [("COMMIT", 1.25, 1.5), ("lock wait", 1.95, 2.1), ("checkpoint", 0.0, 5.0)]
