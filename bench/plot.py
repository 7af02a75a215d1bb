"""Draw the lines of ``bench --only hours`` as small plots, one for each of its panels. The same lines give the same
bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.hours import DRAIN, MEASURED, PANELS, WARM

COLUMNS = 2
SHADES = {WARM: "0.93", DRAIN: "0.93"}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "delayer",
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7"]),  # for the colour-blind too
    "lines.linewidth": 1.0,
}


def draw(path: Path, out: Path) -> None:
    """Read JSON lines from ``path``, and write an SVG to ``out``."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    begin = lines[0]["at"] - (lines[1]["at"] - lines[0]["at"] if len(lines) > 1 else 0.0)
    rows = -(-len(PANELS) // COLUMNS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.5 * COLUMNS, 1.9 * rows), layout="constrained")
        places = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True).flatten()
        for panel, axes in zip(PANELS, places, strict=False):
            for name, key in panel.values.items():
                known = [line for line in lines if key in line]
                minutes = [(line["at"] - begin) / 60 for line in known]
                axes.plot(minutes, [line[key] for line in known], label=name)
            axes.set_title(f"{panel.title}, {panel.unit}", loc="left")
            axes.grid(color="0.9")
            if panel.logarithmic:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            if len(panel.values) > 1:
                axes.legend(frameon=False, ncols=2)
            for phase, shade in SHADES.items():
                _shade(axes, [(line["at"] - begin) / 60 for line in lines if line["phase"] == phase], shade)
        for axes in places[len(PANELS) :]:
            axes.set_visible(False)
        figure.supxlabel(f"minutes; {WARM} and {DRAIN} in grey, {MEASURED} in white")
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def _shade(axes: Axes, minutes: list[float], shade: str) -> None:
    if minutes:
        axes.axvspan(minutes[0], minutes[-1], color=shade, zorder=0, linewidth=0)
