"""The output of a soak while it runs, and at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tests.faults.kinds import KINDS
from tests.soak.result import LARGEST_MB, Result
from tests.soak.run import Soak

EVERY = 5.0
SHOWN = 20


async def tell(soak: Soak, console: Console) -> None:
    """Print a line now and then, until cancelled."""
    before = 0
    while True:
        await asyncio.sleep(EVERY)
        if soak.fleet is None:
            continue
        account = soak.fleet.ledger.account
        back, broken = account.back, f"early {len(account.early)}, changed {len(account.changed)}"
        now = ", ".join(fault.kind for fault in soak.now) or "-"
        over = sum((soak.faults + soak.missed).values())
        console.print(
            f"{soak.elapsed:6.0f} s  {soak.phase if soak.phase != 'running' else soak.fleet.mode:<7} "
            f"{back:>9,} back, {account.sent - back:>6,} under way, {(back - before) / EVERY:>6,.0f}/s, "
            f"{account.arrived - back:>6,} again, {broken}, faults {over}/{len(soak.plan)}: {now}",
            markup=False,
            soft_wrap=True,
        )
        before = back


def show(result: Result, console: Console) -> None:
    """Print the faults, the figures, and the complaints."""
    for kind in KINDS:
        if (times := result.faults.get(kind, 0)) + (missed := result.missed.get(kind, 0)):
            console.print(f"{KINDS[kind].heading:8} {kind:32} {times:>5}  met nothing: {missed}")
    for name, value in summary(result).items():
        if not isinstance(value, dict | list):
            console.print(f"{name.replace('_', ' '):40} {value}", markup=False)
    _complain(result, console)


def _complain(result: Result, console: Console) -> None:
    """Print the first few findings of each kind."""
    verdict, large = result.verdict, f"{result.largest_mb:.0f} MB, and {LARGEST_MB:.0f} are allowed"
    complaints: dict[str, Sequence[object]] = {
        "early": verdict.early.first,
        "changed": verdict.changed.first,
        "lost": verdict.missing,
        "twice without a fault": verdict.unexcused,
        "more than was read": verdict.unaccounted.first,
        "under the id of another": verdict.shared,
        "in the strays queue for good": [result.stranded][: result.stranded],
        "a daemon too large": [large][: result.largest_mb > LARGEST_MB],
        "to be refused, and nowhere": result.doomed.missing,
        "refused otherwise": result.doomed.wrong,
        "left standing": [*verdict.standing.items()],
        "a way that sent nothing": [way for way, sent in result.ways.items() if not sent],
        "surprise": result.surprises,
    }
    for what, found in complaints.items():
        for one in found[:SHOWN]:
            console.print(f"{what}: {str(one)[:1000]}", markup=False, style="red")


def summary(result: Result) -> dict[str, Any]:
    """The figures for --json, in the order of the table."""
    verdict = result.verdict
    return {
        "begun": f"{result.begun:%Y-%m-%d %H:%M} UTC",
        "rabbitmq": result.broker,
        "seed": result.options.seed,
        "minutes": round(result.options.seconds / 60, 1),
        "seconds": round(result.seconds, 1),
        "messages": verdict.sent,
        "published_in_mode": dict(result.modes),
        **{f"published_by_{way}": sent for way, sent in result.ways.items()},
        "faults": dict(result.faults),
        "met_nothing": dict(result.missed),
        "faults_injected": sum(result.faults.values()),
        "faults_that_met_nothing": sum(result.missed.values()),
        "lost": result.lost,
        "early": len(verdict.early),
        "changed": len(verdict.changed),
        "unmarked": result.unmarked,
        "repeated": len(verdict.repeats),
        "repeated_at_release": verdict.repeated_at_release,
        "repeated_at_intake_by_message_id": verdict.taken_in_twice,
        "repeated_at_intake_and_never_named": verdict.nameless,
        "of_them_after_a_publish_in_doubt": len(verdict.published_twice & verdict.repeats.keys()),
        "seconds_that_excuse_no_repeat": round(result.peaceful, 1),
        "to_be_refused": result.doomed.sent,
        "refused_and_missing": len(result.doomed.missing),
        "refused_and_changed": len(result.doomed.wrong),
        "refused_twice": result.doomed.again,
        "set_aside": result.aside,
        "set_aside_for_good": result.stranded,
        "standing": dict(verdict.standing),
        "rows_released": result.rows[0],
        "rows_seen": result.rows[1],
        "largest_daemon_mb": round(result.largest_mb, 1),
        "largest_allowed_mb": LARGEST_MB,
        "surprises": result.surprises,
        "kept": result.kept,
    }
