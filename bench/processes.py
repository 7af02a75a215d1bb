"""1, 2 and 4 daemon processes on the same queue, as ``workers`` of one `delayer run`: rates, and how they share."""

from __future__ import annotations

from bench import park, release
from bench.figures import median
from bench.run import Bench

SIZE = 512


async def run(bench: Bench) -> None:
    options = bench.options
    count = options.count_of(SIZE)
    for workers in options.processes:
        for what, section in (("park", park), ("release", release)):
            rates, shares, peaks = [], [], []
            for turn in range(options.repeats):
                bench.say(f"{what} {count:,} messages with {workers} processes, turn {turn + 1}")
                place = await bench.place()
                course, memory, share = await section.once(place, count, SIZE, workers)
                rates.append(course.rate)
                peaks.append(memory)
                # A process that got nothing owns no lane in the counters.
                shares.append(share[workers - 1] if len(share) >= workers else 0.0)
            bench.add(what, median(rates), "msg/s", workers=workers)
            if workers > 1:
                bench.add(f"smallest share, {what}", median(shares), "", workers=workers)
            bench.add(f"memory of all, {what}", max(peaks), "MB", workers=workers)
