"""docs/tables.md: its contracts and its examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

PAGE = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
RESULTS, BACKLOG, LEFT = "Results of audits", "Waiting messages", "Messages that left"


class Column(NamedTuple):
    """A column by the document. ``type``: Spark SQL's name."""

    name: str
    type: str
    nullable: bool


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def contract(title: str) -> list[Column]:
    """The columns of a section's table."""
    found = re.findall(r"^\| `(\w+)` \| (\w+) \| (yes|no) \| .+\. \|$", section(title), re.MULTILINE)
    assert len(found) == section(title).count("\n| `"), "a line has another form"
    return [Column(name, kind, null == "yes") for name, kind, null in found]


def run_examples(title: str, word: str, paths: dict[str, Path], **names: Any) -> int:
    """Run a section's Python examples that contain ``word``, with other paths. Return their number."""
    examples = [one for one in re.findall(r"```python\n(.*?)```", section(title), re.DOTALL) if word in one]
    for example in examples:
        for path, other in paths.items():
            example = re.sub(rf"{path}(?=[/'\"])", str(other), example)  # noqa: PLW2901
        exec(compile(example, "docs/tables.md", "exec"), dict(names))
    return len(examples)
