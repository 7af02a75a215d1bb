"""`python -m bench.import_page [RESULT]`: put a run of imports beside docs/importing.md, and its figures into it.

The run is `make bench BENCH_ARGS="--only importing,mariadb --output bench/results/importing.json"`. Its table stands on
the page between `<!-- imports -->` and `<!-- end -->` and is written anew, so no figure in it was typed by hand; a test
compares the page with the run beside it. Nothing is written where the run lacks a figure.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import about, given, page, report
from bench.figures import Result

PAGE = page.DOCS / "importing.md"
KEPT = page.DOCS / "importing.json"
RESULT = page.RESULTS / "importing.json"
ROWS = (
    ("`nservicebus-sql`, PostgreSQL", "importing", "import of TimeoutData"),
    ("`nservicebus-sql`, MariaDB", "mariadb", "import of TimeoutData"),
    ("`delayed-exchange`", "importing", "import of delayed-exchange"),
    ("`jsonl`", "importing", "import of jsonl"),
    ("`delayer export`", "importing", "export"),
)
"""What the page calls them, and where the run has them."""
_MARK = re.compile(r"(<!-- imports -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, run: Result) -> str:
    """The page with the table of this run. Raises ValueError for a page without the mark, or a run without a figure."""
    if not _MARK.search(text):
        raise ValueError("the page has no <!-- imports --> … <!-- end -->")
    said = "\n".join(["", *lines(run), ""])
    return _MARK.sub(lambda found: f"{found[1]}{said}\n{found[2]}", text)


def lines(run: Result) -> Iterator[str]:
    """The run in a sentence, then a row for every source and number of messages."""
    told = run.about
    yield (
        f"[A run](importing.json) of {about.when(told)}, {told.get('machine', 'an unknown machine')}, revision "
        f"{told.get('revision', 'unknown')}; cores that other programs used: {about.disturbance(told)}."
    )
    yield ""
    yield page.line(["", "messages", "a second", "memory of the command"])
    yield "|---" + "|---:" * 3 + "|"
    for title, section, what in ROWS:
        rates = sorted(run.all(section, what), key=lambda figure: figure.at["count"])
        if not rates:
            raise ValueError(f"the run has no figure {what!r} in section {section!r}")
        for rate in rates:
            memory = run.find(section, f"memory of an {what}", count=rate.at["count"])
            if memory is None:
                raise ValueError(f"the run has no memory of {what!r} in section {section!r}")
            size = f"{report.number(memory.value)} {memory.unit}"
            yield page.line([title, f"{rate.at['count']:,}", report.number(rate.value), size])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.import_page", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "result", nargs="?", type=Path, metavar="RESULT", help=f"default {RESULT.relative_to(page.ROOT)}"
    )
    parser.add_argument("--again", action="store_true", help="from the run beside the page")
    asked = parser.parse_args()
    source = KEPT if asked.again else asked.result or RESULT
    try:
        run = given.result(source)
        if source != KEPT and KEPT.exists() and (why := page.unfit(source, KEPT)):
            raise given.Mistake(f"{source} is not taken: {why}")
        text = filled(PAGE.read_text(encoding="utf-8"), run)
    except ValueError as mistake:  # given.Mistake, or a figure that is not there: nothing is written
        print(f"nothing is changed: {mistake}", file=sys.stderr)
        return given.USAGE
    if source != KEPT:
        shutil.copyfile(source, KEPT)
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(page.ROOT)} has the figures of {report.heading(run)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
