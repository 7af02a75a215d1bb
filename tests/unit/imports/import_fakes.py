"""A book, a source and a judge for the state machine of imports, which may die at every step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from delayer.core.importing import Batch, Goal, Item, Phase, Run, Survey
from delayer.core.message import Parcel, Target
from delayer.imports import state_machine
from delayer.imports.state_machine import ImportImpossible


def parcel(due_ms: int, exchange: bytes = b"", routing_key: bytes = b"sales", body: bytes = b"body") -> Parcel:
    return Parcel(due_ms, b"test", b"", b"", Target(exchange, routing_key), b"\x10\x00\x02", body)


class Died(BaseException):
    """The process was killed there."""


class Switch:
    """Kills at the n-th step."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            raise Died


class FakeBook:
    """Satisfies ports.Book. What is committed outlives a kill; each step may be the last, before or after it."""

    def __init__(self) -> None:
        self.switch = Switch()
        self.run: Run | None = None
        self.parked: list[Item] = []

    async def now_ms(self) -> int:
        return 0

    async def unfinished(self) -> Run | None:
        return self.run if self.run is not None and self.run.phase in (Phase.STAGING, Phase.RUNNING) else None

    async def begin(self, source: str, parameters: Mapping[str, object], who: str) -> Run:
        assert await self.unfinished() is None
        self.switch.step()
        self.run = Run(1, source, json.loads(json.dumps(parameters)), Phase.STAGING, who, 0)
        self.switch.step()
        return self.run

    async def staged(self, run: Run, messages: int | None) -> Run:
        self.switch.step()
        self.run = replace(run, phase=Phase.RUNNING, staged=messages)
        self.switch.step()
        return self.run

    async def commit(self, run: Run, batch: Batch) -> Run:
        self.switch.step()
        assert run == self.run
        held = sum(item.hold is not None for item in batch.items)
        parked = len(batch.items) - held
        self.parked += batch.items
        self.run = replace(run, parked=run.parked + parked, held=run.held + held, progress=batch.progress)
        self.switch.step()
        return self.run

    async def finish(self, run: Run, phase: Phase) -> Run:
        self.switch.step()
        self.run = replace(run, phase=phase)
        self.switch.step()
        return self.run


class Shelf:
    """What the other system holds, which outlives a kill as well."""

    def __init__(self, count: int) -> None:
        self.there = {n: Item(parcel(1000 - n // 2, routing_key=b"sales" if n % 5 else b"gone")) for n in range(count)}
        self.staged: dict[int, Item] | None = None


class FakeSource:
    """Satisfies ports.Source: takes what is there onto a heap of its own, and from there batch after batch."""

    name = "fake"

    def __init__(self, shelf: Shelf, switch: Switch, parameters: Mapping[str, object]) -> None:
        self.shelf = shelf
        self.switch = switch
        self.parameters = parameters
        self._after: tuple[int, int] = (-1, -1)
        self.loses = 0

    async def survey(self, unfinished: Run | None = None, *, thorough: bool = False) -> Survey:
        survey = Survey()
        if unfinished is None and self.shelf.staged is not None:
            raise ImportImpossible("staged by the import of another store")
        for item in (self.shelf.there if self.shelf.staged is None else self.shelf.staged).values():
            survey.add(item.parcel.target, item.parcel.due_ms)
        return survey

    async def stage(self, run: Run) -> int:
        self.switch.step()
        if self.shelf.staged is None:
            self.shelf.staged, self.shelf.there = self.shelf.there, {}
        self.switch.step()
        return len(self.shelf.staged)

    def _order(self) -> list[tuple[int, int]]:
        return sorted((item.parcel.due_ms, n) for n, item in (self.shelf.staged or {}).items())

    async def resume(self, run: Run) -> None:
        if run.progress is not None and self.shelf.staged is not None:
            self._after = tuple(json.loads(run.progress))
            for place in self._order():
                if place <= self._after:
                    self.switch.step()
                    del self.shelf.staged[place[1]]

    async def next_batch(self) -> Batch | None:
        places = [place for place in self._order() if place > self._after][:3]
        if not places:
            return None
        self._after = places[-1]
        staged = self.shelf.staged
        assert staged is not None
        return Batch([staged[n] for _, n in places], json.dumps(self._after))

    async def remove(self, batch: Batch) -> int:
        staged = self.shelf.staged
        assert staged is not None
        gone = [place for place in self._order() if place <= self._after]
        for _, n in gone:
            self.switch.step()
            del staged[n]
        return len(gone) - self.loses

    async def finish(self) -> dict[str, int]:
        self.switch.step()
        self.shelf.staged = None
        self.switch.step()
        return {}

    async def put_back(self, run: Run) -> int:
        await self.resume(run)
        self.switch.step()
        back = self.shelf.staged or {}
        self.shelf.there |= back
        self.shelf.staged = None
        self.switch.step()
        return len(back)

    async def close(self) -> None:
        return


class FakeJudge:
    async def problems(self, goals: Mapping[Target, Goal]) -> Mapping[Target, str]:
        return {target: "no such queue" for target in goals if target.routing_key == b"gone"}


PARAMETERS = {"file": "x", "cutoff_ms": 5}


def silent(_what: str, _done: int, _of: int | None) -> None:
    return


async def run_once(shelf: Shelf, book: FakeBook, at: int | None = None) -> state_machine.Report:
    switch = Switch(at)
    book.switch = switch
    return await state_machine.run(FakeSource(shelf, switch, PARAMETERS), book, FakeJudge(), "me", silent)
