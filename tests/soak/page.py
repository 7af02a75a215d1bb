"""`python -m tests.soak.page FILE`: put the figures of a soak (its --json) into docs/guarantees.md.

The file is kept beside the page. A test compares the page with the file, so nobody types figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.faults.kinds import KINDS
from tests.soak.result import LARGEST_MB

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGE, KEPT = DOCS / "guarantees.md", DOCS / "soak.json"
BEGIN, END = "<!-- soak -->\n", "<!-- end of the soak -->\n"
FIGURES: Final = (
    ("messages", "messages published"),
    ("faults_injected", "faults that broke something"),
    ("faults_that_met_nothing", "faults that met nothing to break"),
    ("lost", "lost"),
    ("set_aside_for_good", "neither lost nor delivered: in the strays queue"),
    ("early", "early"),
    ("changed", "changed"),
    ("repeated", "came more than once"),
    ("repeated_at_release", "of these: repeated at release, one `x-delayer-id`"),
    ("repeated_at_intake_by_message_id", "of these: read twice, known by their `message_id`"),
    ("repeated_at_intake_and_never_named", "of these: read twice, and never given a `message_id`"),
    ("unmarked", "came more than once without a fault, or against the marks above"),
    ("seconds_that_excuse_no_repeat", "seconds in which no fault was that could excuse a copy"),
    ("to_be_refused", "published beside them, to be refused"),
    ("refused_and_missing", "of these: not in the refused queue"),
    ("refused_and_changed", "of these: there, and not as they were sent"),
)


def rendered(soak: Mapping[str, Any]) -> str:
    """The section between the marks. Pure."""
    published = {mode: soak["published_in_mode"].get(mode, 0) for mode in ("store", "native")}
    modes = " and ".join(
        f"{count:,} ({count / max(1, sum(published.values())):.1%}) in {mode} mode" for mode, count in published.items()
    )
    lines = [
        f"Begun {soak['begun']}, {soak['minutes']:g} minutes of faults (`SOAK_SEED={soak['seed']}`), RabbitMQ "
        f"{soak['rabbitmq']}, two daemons; of the messages, {modes} were published; the largest a daemon ever was: "
        f"{soak['largest_daemon_mb']:.0f} MB, where {LARGEST_MB:.0f} are allowed; "
        + ("every promise kept." if soak["kept"] else "**A PROMISE BROKE.**"),
        "",
        "| | |",
        "|---|---|",
        *(f"| {said} | {soak[name]:,} |" for name, said in FIGURES if name in soak),
        "",
        "Faults: " + ", ".join(f"{kind} {soak['faults'][kind]}" for kind in KINDS if kind in soak["faults"]) + ".",
        "",
        "Not injected: " + (", ".join(kind for kind in KINDS if kind not in soak["faults"]) or "none") + ".",
    ]
    return "\n".join(lines) + "\n"


def filled(page: str, soak: Mapping[str, Any]) -> str:
    """The page with this soak in it. Pure."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN.strip()} and {END.strip()} in the page")
    return f"{before}{begin}\n{rendered(soak)}\n{end}{after}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    text = Path(sys.argv[1]).read_text()
    PAGE.write_text(filled(PAGE.read_text(), json.loads(text)))
    KEPT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
