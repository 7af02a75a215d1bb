"""Metrics: the same names in the code, the documentation, the alerts, the dashboard and the output."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest

from delayer.config.model import Settings
from delayer.core import horizon
from delayer.core.counters import MOST_ROUTES, OTHERS, ROUTE_KINDS, Counters
from delayer.core.message import as_text
from delayer.http.metrics import METRICS, PREFIX, MetricSources, roles
from delayer.http.view import Depths, Snapshot
from delayer.schedule.schedule import ScheduleState
from delayer.store.admin.census import COMPACTED, SCHEDULES, Census
from delayer.store.admin.stats import LANE_KINDS, InboxCount, LaneOverview
from delayer.store.schedules.reading import ScheduleCounts
from delayer.store.segments import catalog
from tests.support.web import samples
from tests.unit.http.states import overview, state

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "config" / "alerts.yml"
GRAFANA = ROOT / "config" / "grafana.json"
_ROW = re.compile(r"^\| `(delayer_\w+)` \| (\w+) \| ([^|]+) \|([^|]*)\| (.+) \|$", re.MULTILINE)
_NAME = re.compile(r"\bdelayer_\w+")
_LABELS = re.compile(r"(delayer_\w+)\{([^}]*)\}")


def lane(number: int, *, alive: bool, waiting: int, next_due_ms: int | None) -> LaneOverview:
    counters = dict.fromkeys(LANE_KINDS, 0) | {"parked": waiting + 3, "held": 3}
    stuck_ms = 0 if alive else 40_000
    return LaneOverview(number, "a daemon", alive, counters, next_due_ms, None, stuck_ms=stuck_ms)


def sight(**more: Any) -> MetricSources:
    """Sources with a value for every metric."""
    counters = Counters()
    counters.add("parked", [b"orders.in"] * 3 + [b"caf\xc3\xa9", b"\xff"])
    counters.delivered([(40, b"orders.in")])
    counters.took("claim", 0.003)
    counters.batch("claim", 3)
    packed = catalog.SegmentTotals(segments=4, messages=400, broken=1, broken_messages=100, next_due_ms=None)
    lanes = [lane(1, alive=True, waiting=5, next_due_ms=9_000), lane(2, alive=False, waiting=2, next_due_ms=None)]
    late, inbox = catalog.OverdueSegments(2, 50, None), InboxCount(5, 31_500, read=False)
    store = overview(lanes=lanes, packed=packed, late=late, inbox=inbox)
    counts = {(b"orders.in", 0): 2.0, (b"orders.in", 1): 3.0, (b"mail\xff", len(horizon.OFFSETS)): 4.0}
    whole: dict[str, Any] = {
        "state": state(counters),
        "store": Snapshot(store, "", 0.5),
        "census": Snapshot(Census(0, counts, exact=True), "", 3.0),
        "depths": Snapshot(
            Depths(
                {"delays": 7, "delays.due": None, "delayer.delay-strays": 1},
                {27: 0, 0: 2},
                {"delays": 3, "level": None},
            ),
            "",
            1.0,
        ),
        "ready": True,
        "roles": roles(Settings()),
        "schedules": Snapshot(ScheduleCounts(dict.fromkeys(ScheduleState, 0) | {ScheduleState.PAUSED: 4}, 9, 2, 1_500)),
    }
    return MetricSources(**whole | more)


def shown(of: MetricSources) -> dict[tuple[str, ...], float]:
    return samples(generate_latest(of).decode())


def test_every_metric_is_documented_as_defined() -> None:
    said = {
        name.removeprefix(PREFIX): (kind, unit.strip(), tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, unit, labels, meaning in _ROW.findall((ROOT / "docs" / "metrics.md").read_text())
    }
    assert said == {name: (one.type, one.unit, tuple(one.labels.split()), one.help) for name, one in METRICS.items()}


def test_every_metric_is_served() -> None:
    found = {name for name, *_ in shown(sight())}
    for name, kind in METRICS.items():
        suffixes = ("_bucket", "_sum", "_count") if kind.type == "histogram" else ("",)
        assert all(f"{PREFIX}{name}{suffix}" in found for suffix in suffixes), name


@pytest.mark.parametrize(
    ("sample", "value"),
    [
        (("delayer_parked_total", "route=orders.in"), 3),
        (("delayer_parked_total", "route=café"), 1),
        (("delayer_parked_total", "route=\\xff"), 1),
        (("delayer_held_total", "route=orders.in"), 0),
        (("delayer_held_total", "route=mail.in"), 0),
        (("delayer_lateness_seconds_bucket", "le=0.025", "route=orders.in"), 0),
        (("delayer_lateness_seconds_bucket", "le=0.05", "route=orders.in"), 1),
        (("delayer_lateness_seconds_sum", "route=orders.in"), 0.04),
        (("delayer_batch_messages_count", "stage=claim"), 1),
        (("delayer_intake_active",), 1),
        (("delayer_lanes",), 3),
        (("delayer_waiting_messages",), 7),
        (("delayer_unowned_messages",), 2),
        (("delayer_stuck_lanes",), 1),
        (("delayer_held_messages",), 6),
        (("delayer_inbox_messages",), 5),
        (("delayer_inbox_unread_seconds",), 31.5),
        (("delayer_overdue_seconds",), 1),
        (("delayer_segments", "state=late"), 2),
        (("delayer_segment_messages", "state=broken"), 100),
        (("delayer_backlog_messages", "due=overdue", "route=orders.in"), 2),
        (("delayer_backlog_messages", "due=minute", "route=orders.in"), 3),
        (("delayer_backlog_messages", "due=later", "route=mail\\xff"), 4),
        (("delayer_queue_messages", "queue=delays", "role=intake"), 7),
        (("delayer_queue_messages", "queue=delayer.delay-strays", "role=strays"), 1),
        (("delayer_delayed_messages", "queue=delays"), 3),
        (("delayer_cascade_messages", "level=0"), 2),
        (("delayer_schedules", "state=paused"), 4),
        (("delayer_schedules", "state=failed"), 0),
        (("delayer_schedule_occurrences", "kind=sent"), 9),
        (("delayer_schedule_occurrences", "kind=missed"), 2),
        (("delayer_schedule_late_seconds",), 1.5),
        (("delayer_reconnects_total", "connection=intake"), 0),
        (("delayer_ready",), 1),
    ],
    ids=lambda value: "".join(value[0].split("delayer_")) if isinstance(value, tuple) else "",
)
def test_figures(sample: tuple[str, ...], value: float) -> None:
    assert shown(sight())[sample] == value


def test_many_routes_share_the_series_of_the_others() -> None:
    """A daemon with 2,000 routes, all of them in use, with every queue of the cascade and of a takeover."""
    routes = [b"in%d" % n for n in range(2_000)]
    counters = Counters()
    names = list(dict.fromkeys(as_text(counters.name_of(one)) for one in routes))
    late = OTHERS.decode()
    assert names == [*(f"in{n}" for n in range(MOST_ROUTES)), late]
    for kind in ROUTE_KINDS:
        counters.add(kind, [b"invented", *routes[7:]])
    counters.delivered([(40, one) for one in routes])
    for tally in (*counters.seconds.values(), *counters.sizes.values()):
        tally.add(0.003)
    census = {(one, at): 1.0 for one in (*routes, COMPACTED, SCHEDULES) for at in range(len(horizon.OFFSETS) + 1)}
    levels = dict.fromkeys(range(28), 1)
    queues = {f"level-{n}": 1 for n in range(32)}
    found = shown(
        sight(
            state=state(counters, routes=names, consuming=dict.fromkeys(queues, True)),
            census=Snapshot(Census(0, census, exact=True), "", 3.0),
            depths=Snapshot(Depths(dict.fromkeys(["delays", "delays.due", "strays"], 1), levels, queues), "", 1.0),
        )
    )
    assert len(found) <= 1_000
    assert found["delayer_parked_total", "route=in6"] == 0
    assert found["delayer_parked_total", "route=in7"] == 1
    assert ("delayer_parked_total", f"route=in{MOST_ROUTES}") not in found
    assert found["delayer_parked_total", f"route={late}"] == 2_000 - MOST_ROUTES + 1
    assert found["delayer_backlog_messages", "due=overdue", "route=in0"] == 1
    assert found["delayer_backlog_messages", "due=overdue", f"route={late}"] == 2_000 - MOST_ROUTES
    assert found["delayer_backlog_messages", "due=overdue", f"route={COMPACTED.decode()}"] == 1
    every = [value for (name, *_), value in found.items() if name == "delayer_parked_total"]
    assert sum(every) == 1_994


def test_a_counter_of_the_store_never_goes_down() -> None:
    """A cancel of a held or compacted message lowers those counters, so Prometheus does not get them."""
    kinds = {label for name, *labels in shown(sight()) for label in labels if name == "delayer_store_messages_total"}
    assert kinds == {f"kind={kind}" for kind in ("parked", "released", "cancelled", "restored")}


def test_metrics_of_an_unreachable_server_are_missing() -> None:
    gone = Snapshot(None, "connect: refused", None)
    found = shown(sight(store=gone, census=gone, depths=gone, ready=False))
    assert found["delayer_store_up",] == found["delayer_broker_up",] == found["delayer_ready",] == 0
    assert not [name for name, *_ in found if name in ("delayer_waiting_messages", "delayer_queue_messages")]


def test_a_store_of_another_schema_is_up_but_not_current() -> None:
    seen = overview("9999")
    found = shown(sight(store=Snapshot(seen, "", 0.1)))
    assert (found["delayer_store_up",], found["delayer_store_schema_current",]) == (1, 0)


def expressions() -> list[str]:
    rules = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    panels = [one["expr"] for panel in json.loads(GRAFANA.read_text())["panels"] for one in panel["targets"]]
    assert (len(rules), len(panels)) > (10, 20)
    return [*rules, *panels]


@pytest.mark.parametrize("expression", expressions())
def test_alerts_and_dashboard_use_existing_metrics(expression: str) -> None:
    for found in _NAME.findall(expression):
        name = found.removeprefix(PREFIX)
        whole = name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)
        assert whole in METRICS, found
        assert (METRICS[whole].type == "histogram") == (whole != name), "a query of a histogram names its parts"
    for found, selectors in _LABELS.findall(expression):
        whole = re.sub(r"_(bucket|sum|count)$", "", found.removeprefix(PREFIX))
        kind = METRICS.get(found.removeprefix(PREFIX)) or METRICS[whole]
        asked = set(re.findall(r"(\w+)\s*[=!]", selectors)) - {"job", "instance", "le"}
        assert asked <= set(kind.labels.split()), found


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: `.ci/setup promtool`")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", str(ALERTS))
    assert done.returncode == 0, done.stdout + done.stderr


def fires(series: dict[str, str], alert: str, at: str, *, expected: bool) -> dict[str, Any]:
    found = [{"input_series": [{"series": name, "values": values} for name, values in series.items()]}]
    return {
        "interval": "1m",
        **found[0],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)',
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": int(expected)}],
            }
        ],
    }


SCENES = [
    fires({'delayer_ready{job="delayer", instance="a"}': "1x5 0x20"}, "DelayerNotReady", "20m", expected=True),
    fires({'delayer_ready{job="delayer", instance="a"}': "1x20"}, "DelayerNotReady", "20m", expected=False),
    fires({'delayer_held_messages{job="delayer"}': "0x5 3x30"}, "DelayerMessagesHeld", "30m", expected=True),
    fires({'delayer_overdue_seconds{job="delayer"}': "0x5 90x30"}, "DelayerOverdue", "20m", expected=True),
    fires({'delayer_inbox_unread_seconds{job="delayer"}': "0x5 90x30"}, "DelayerInboxUnread", "20m", expected=True),
    fires({'delayer_store_schema_current{job="delayer", instance="a"}': "1x40",
           'delayer_inbox_messages{job="delayer", instance="a"}': "0x5 _x40"},
          "DelayerInboxUnknown", "30m", expected=True),
    # One daemon that can count is enough. During an upgrade, none does.
    fires({'delayer_store_schema_current{job="delayer", instance="a"}': "1x40",
           'delayer_inbox_messages{job="delayer", instance="b"}': "0x40"},
          "DelayerInboxUnknown", "30m", expected=False),
    fires({'delayer_store_schema_current{job="delayer", instance="a"}': "0x40"},
          "DelayerInboxUnknown", "30m", expected=False),
    fires({'delayer_refused_total{job="delayer", route="a"}': "0x5 4x30"},
          "DelayerMessagesRefused", "8m", expected=True),
    # A series that starts at its first message never shows an increase. The message is in the refused queue.
    fires({'delayer_refused_total{job="delayer", route="unknown"}': "_x10 1x30",
           'delayer_queue_messages{job="delayer", queue="bad", role="refused"}': "0x10 1x30"},
          "DelayerRefusedStand", "20m", expected=True),
    fires({'delayer_queue_messages{job="delayer", queue="bad", role="refused"}': "0x40"},
          "DelayerRefusedStand", "20m", expected=False),
    fires({'delayer_queue_messages{job="delayer", queue="inbox", role="intake"}': "0x3 900000x60"},
          "DelayerIntakeGrows", "40m", expected=True),
    fires({'delayer_queue_messages{job="delayer", queue="ends", role="due"}': "0x3 900000x60"},
          "DelayerIntakeGrows", "40m", expected=True),
    fires({'delayer_queue_messages{job="delayer", queue="refused", role="refused"}': "900000x60"},
          "DelayerIntakeGrows", "40m", expected=False),
    fires({'delayer_queue_messages{job="delayer", queue="a.delay-strays", role="strays"}': "0x3 2x60"},
          "DelayerStrays", "40m", expected=True),
    # While a daemon reads the strays, they are not ready for a second, and the queue counts 0.
    fires({'delayer_queue_messages{job="delayer", queue="a.delay-strays", role="strays"}':
           "0x3 2x5 0 2x5 0 2x5 0 2x5 0 2x5 0 2x5 0 2x5"}, "DelayerStrays", "40m", expected=True),
    fires({'delayer_queue_messages{job="delayer", queue="a.delay-strays", role="strays"}': "0x3 2x5 0x60"},
          "DelayerStrays", "40m", expected=False),
    fires({'delayer_store_schema_current{job="delayer", instance="a"}': "1x60",
           'delayer_store_schema_current{job="delayer", instance="b"}': "0x60"},
          "DelayerSchemaOutdated", "40m", expected=True),
    fires({'delayer_lanes_lost_total{job="delayer", instance="a"}': "0x20 2x20"},
          "DelayerLanesLost", "25m", expected=True),
    fires({'delayer_lanes_lost_total{job="delayer", instance="a"}': "2x40"},
          "DelayerLanesLost", "25m", expected=False),
    fires({'delayer_store_up{job="delayer", instance="a"}': "0x20",
           'delayer_store_up{job="delayer", instance="b"}': "1x20"}, "DelayerStoreDown", "10m", expected=False),
    fires({'delayer_segments{job="delayer", state="late"}': "1x20"}, "DelayerSegmentsLate", "10m", expected=True),
    fires({'delayer_schedules{job="delayer", state="failed"}': "0x5 1x20"},
          "DelayerScheduleFailed", "10m", expected=True),
    fires({'delayer_schedules{job="delayer", state="paused"}': "1x20"},
          "DelayerScheduleFailed", "10m", expected=False),
    fires({'delayer_schedule_occurrences{job="delayer", kind="missed"}': "7x20 8x20"},
          "DelayerOccurrencesMissed", "25m", expected=True),
    # 40 minutes later it is no news, and a removed schedule takes its missed occurrences away.
    fires({'delayer_schedule_occurrences{job="delayer", kind="missed"}': "7x20 8x60"},
          "DelayerOccurrencesMissed", "60m", expected=False),
    fires({'delayer_schedule_occurrences{job="delayer", kind="missed"}': "7x20 3x20"},
          "DelayerOccurrencesMissed", "25m", expected=False),
    fires({'delayer_schedule_late_seconds{job="delayer"}': "0x20 400x20"},
          "DelayerOccurrencesLate", "25m", expected=True),
    fires({'delayer_schedule_late_seconds{job="delayer"}': "0x20 30x20"},
          "DelayerOccurrencesLate", "25m", expected=False),
    fires({'delayer_schedule_late_seconds{job="delayer"}': "400x60"}, "DelayerOccurrencesLate", "50m", expected=False),
    fires({'delayer_lateness_seconds_bucket{job="delayer", route="a", le="1.0"}': "0x30",
           'delayer_lateness_seconds_bucket{job="delayer", route="a", le="60.0"}': "0+50x30",
           'delayer_lateness_seconds_bucket{job="delayer", route="a", le="+Inf"}': "0+50x30"},
          "DelayerLate", "25m", expected=True),
]  # fmt: skip


def test_promtool_sees_the_rules_fire(tmp_path: Path) -> None:
    file = tmp_path / "scenes.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": SCENES}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
