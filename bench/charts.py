"""Charts of a result: bars beside their ceilings, curves over time. A chart whose figures are missing is not drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import FuncFormatter

from bench import ceilings, targets
from bench.figures import Figure, Result
from bench.report import number

INK, FAINT, GRID = "#26323d", "#8795a1", "#e6eaee"
BLUE, ORANGE, GREEN, PURPLE, GREY, RED = "#2f6db3", "#e08e45", "#4f9d69", "#8064a2", "#c3ccd4", "#c8553d"
SEQUENCE = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
STYLE = {
    "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "xtick.color": INK,
    "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "axes.axisbelow": True, "axes.titlelocation": "left", "axes.titlesize": 12, "axes.titleweight": "bold",
    "legend.frameon": False, "figure.constrained_layout.use": True, "savefig.dpi": 80,
}  # fmt: skip


def thousands(value: float, _: object = None) -> str:
    return f"{value / 1000:g} k" if value >= 1000 else f"{value:g}"


def sheet(title: str, width: float = 9, height: float = 4.6) -> tuple[Sheet, Axes]:
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set_title(title)
    return figure, axes


def waiting(figure: Figure) -> str:
    backlog = figure.at.get("backlog", 0)
    return f"{backlog / 1e6:g} M waiting" if backlog >= 1e6 else f"{backlog:,} waiting"


def size(figure: Figure) -> str:
    body = figure.at["body"]
    return f"{body // 1024} KB" if body >= 1024 else f"{body} B"


# ---- one function for each chart


def rates(result: Result) -> Sheet | None:
    """Park and release, each bar before the ceiling that limits it."""
    found = result.all("park", "park") + result.all("release", "release")
    if not found:
        return None
    figure, axes = sheet("Park and release, beside what limits them", height=1.6 + 0.5 * len(found))
    for row, one in enumerate(found):
        ceiling = one.value / one.ratio if one.ratio else 0.0
        axes.barh(row, ceiling, color=GREY, height=0.74)
        axes.barh(row, one.value, color=BLUE if one.section == "park" else ORANGE, height=0.46)
        share = f"  {one.ratio:.0%} of {one.of}" if one.ratio else ""
        axes.text(max(one.value, ceiling), row, f"  {one.value:,.0f}/s{share}", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [f"{one.what}, {size(one)}, {waiting(one)}" for one in found])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, axes.get_xlim()[1] * 1.45)
    axes.set_xlabel("messages a second (grey: the ceiling of this run)")
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    return figure


def ceilings_chart(result: Result) -> Sheet | None:
    """What broker and database do by themselves."""
    names = [ceilings.PUBLISH, ceilings.CONSUME, ceilings.COPY]
    names[2:2] = [f"{name}, classic" for name in names[:2]]
    sizes = sorted({one.at["body"] for one in result.all("ceilings", ceilings.PUBLISH)})
    if not sizes:
        return None
    figure, axes = sheet("Ceilings: plain sockets with prebuilt frames, and COPY")
    for n, body in enumerate(sizes):
        found = [result.find("ceilings", name, body=body) for name in names]
        at = [row + (n - (len(sizes) - 1) / 2) * 0.38 for row in range(len(names))]
        values = [one.value if one else 0.0 for one in found]
        bars = axes.barh(at, values, height=0.34, color=SEQUENCE[n], label=f"{body:,} bytes")
        axes.bar_label(bars, [f" {value:,.0f}/s" for value in values], fontsize=9)
    plain = (ceilings.PUBLISH, ceilings.CONSUME)
    axes.set_yticks(range(len(names)), [f"{name}, quorum" if name in plain else name for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.set_xlabel("messages (rows) a second")
    axes.legend()
    return figure


def lateness(result: Result) -> Sheet | None:
    """How late which share of the messages was, on a scale that spreads the last per mille."""
    curves = [one for one in result.series if one.section == "steady" and one.what == "lateness by share" and one.x]
    if not curves:
        return None
    figure, axes = sheet("Steady traffic: how late messages are")
    for n, one in enumerate(curves):
        points = [(share, late) for share, late in zip(one.x, one.y, strict=True) if share < 1]
        beside = f", {one.at['backlog']:,} waiting" if one.at.get("backlog") else ""
        axes.plot(
            [1 / (1 - share) for share, _ in points], [late for _, late in points], marker="o", markersize=4,
            color=SEQUENCE[n], label=f"{one.at['rate']:,}/s{beside}",
        )  # fmt: skip
    if any(one.at["rate"] == 5000 for one in curves):
        axes.plot([100, 1000], [15, 50], linestyle="none", marker="_", markersize=22, markeredgewidth=2, color=RED)
        axes.annotate("targets at 5,000/s", (1000, 50), xytext=(6, 6), textcoords="offset points", color=RED)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([2, 10, 100, 1000, 10_000], ["p50", "p90", "p99", "p99.9", "p99.99"])
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("share of the messages that were at most so late")
    axes.set_ylabel("milliseconds after the due instant")
    axes.legend()
    return figure


def cpu(result: Result) -> Sheet | None:
    """CPU a message, by process tree."""
    found = result.all("steady", "CPU of daemon")
    if not found:
        return None
    figure, axes = sheet("Steady traffic: CPU a message, in and out together")
    labels = [f"{one.at['rate']:,}/s\n{waiting(one)}" for one in found]
    below = [0.0] * len(found)
    for n, of in enumerate(("daemon", "broker", "database", "publisher", "consumer")):
        values = [getattr(result.find("steady", f"CPU of {of}", **one.at), "value", 0.0) for one in found]
        color = (BLUE, ORANGE, GREEN, GREY, "#dde3e8")[n]
        bars = axes.bar(labels, values, bottom=below, color=color, width=0.55, label=of)
        if n < 3:
            axes.bar_label(bars, [number(value) for value in values], label_type="center", color="white", fontsize=9)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("microseconds of CPU a message")
    axes.set_xlim(-0.6, len(found) - 0.4)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def burst(result: Result) -> Sheet | None:
    """When the messages of a burst arrived."""
    curve = next((one for one in result.series if one.section == "burst" and one.what == "arrived"), None)
    if curve is None or not curve.x:
        return None
    count = curve.at["count"]
    figure, axes = sheet(f"Burst: {count:,} messages due within one second")
    axes.plot([0, 1], [0, count], color=GREY, linewidth=6, solid_capstyle="round", label="due")
    axes.plot(curve.x, curve.y, color=BLUE, linewidth=2, label="arrived")
    axes.set_xlabel("seconds after the first due instant")
    axes.set_ylabel("messages")
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.legend(loc="lower right")
    return figure


def peers(result: Result) -> Sheet | None:
    """What others do, beside ours."""
    rivals = result.all("peers", "aio-pika relay into the cascade")
    rivals += result.all("peers", "kombu with countdown into its cascade")
    pollers = [one for one in result.figures if one.section == "peers" and "SKIP LOCKED" in one.what]
    if not rivals and not pollers:
        return None
    native = result.find("native", "into the cascade")
    bars = [(native, "delayer, into the cascade")] if native else []
    bars += [(one, one.what) for one in rivals]
    # Beside a poller with rows that wait stands our release with rows that wait, as in the table.
    released = targets.ours(result, pollers[0]) if pollers else None
    bars += [(one, f"delayer, release, {waiting(one)}") for one in [released] if one]
    bars += [(one, f"{one.what}, {waiting(one)}") for one in pollers]
    figure, axes = sheet("The same work by others", height=1.4 + 0.5 * len(bars))
    colors = [BLUE if name.startswith("delayer") else GREY for _, name in bars]
    drawn = axes.barh([name for _, name in bars], [one.value for one, _ in bars], color=colors, height=0.6)
    axes.bar_label(drawn, [f" {one.value:,.0f}/s" for one, _ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.set_xlabel("messages a second")
    return figure


def processes(result: Result) -> Sheet | None:
    """Rates by number of processes."""
    found = result.all("processes", "park")
    if not found:
        return None
    figure, axes = sheet("Processes on one queue", width=7)
    for n, what in enumerate(("park", "release")):
        figures = result.all("processes", what)
        at = [row + (n - 0.5) * 0.36 for row in range(len(figures))]
        bars = axes.bar(at, [one.value for one in figures], width=0.33, color=(BLUE, ORANGE)[n], label=what)
        axes.bar_label(bars, [f"{one.value / 1000:.1f} k" for one in figures], fontsize=9)
    axes.set_xticks(range(len(found)), [f"{one.at['workers']}" for one in found])
    axes.set_xlabel("daemon processes")
    axes.set_ylabel("messages a second")
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def churn(result: Result) -> Sheet | None:
    """Claims and tables over the minutes."""
    curves = {one.what: one for one in result.series if one.section == "churn"}
    panels = (("claim, ms", "a claim, ms", BLUE), ("partition, MB", "today's partition, MB", ORANGE))
    panels += (("dead rows", "dead rows", GREY),)
    if not all(curves.get(name) and curves[name].x for name, _, _ in panels):
        return None
    figure, columns = plt.subplots(len(panels), 1, figsize=(9, 6.5), sharex=True)
    at = curves["claim, ms"].at
    columns[0].set_title(f"Churn: {at['rate']:,} messages a second beside {at['backlog']:,} waiting")
    for axes, (name, label, color) in zip(columns, panels, strict=True):
        axes.plot(curves[name].x, curves[name].y, color=color, linewidth=2)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    columns[-1].set_xlabel("seconds")
    return figure


CHARTS: dict[str, Callable[[Result], Sheet | None]] = {
    "ceilings": ceilings_chart, "rates": rates, "lateness": lateness, "cpu": cpu, "burst": burst, "peers": peers,
    "processes": processes, "churn": churn,
}  # fmt: skip


def draw(result: Result, directory: Path, stem: str, names: Collection[str] = CHARTS) -> list[Path]:
    """Every chart there are figures for, as ``<stem>-<name>.png``; charts of an earlier result are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    about = result.about
    foot = ", ".join(str(about.get(name, "")) for name in ("kind", "revision", "at", "machine"))
    with mpl.rc_context(STYLE):
        for name in sorted(names):
            path = directory / f"{stem}-{name}.png"
            path.unlink(missing_ok=True)
            figure = CHARTS[name](result)
            if figure is None:
                continue
            figure.supxlabel(foot, fontsize=7, color=FAINT, x=0.01, ha="left")
            figure.savefig(path, pil_kwargs={"optimize": True})
            plt.close(figure)
            drawn.append(path)
    return drawn
