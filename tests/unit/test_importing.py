"""Legacy imports: the rules about destinations and lines, and the state machine over fakes, interrupted everywhere."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from delayer.cli import cli
from delayer.core import importing, lines
from delayer.core.importing import (
    Batch,
    Goal,
    Item,
    Meant,
    NotARewrite,
    Phase,
    Run,
    Survey,
    read_rewrite,
    redirected,
    renamed,
)
from delayer.core.lines import End, Line, NotALine
from delayer.core.message import Parcel, Target
from delayer.legacy import machine
from delayer.legacy.ahead import Ahead
from delayer.legacy.hold_queues import HoldQueues
from delayer.legacy.ports import BadSource, CountMismatch, ImportImpossible, SourceLost

# ---- rewriting destinations


@pytest.mark.parametrize(
    ("expression", "name", "expected"),
    [
        ("s/@.*//", "sales@SERVER7", "sales"),
        ("s/@.*//", "sales", "sales"),
        ("s/@.*//", "a@b@c", "a"),
        ("s/a/b/", "aaa", "baa"),
        ("s/a/b/g", "aaa", "bbb"),
        ("s/A/b/gi", "aAa", "bbb"),
        ("s|/|.|g", "a/b/c", "a.b.c"),
        (r"s/\//./g", "a/b/c", "a.b.c"),
        (r"s/^(.*)@(.*)$/\2.\1/", "sales@SERVER7", "SERVER7.sales"),
        ("s/.*/prod.&/", "sales", "prod.sales"),
        (r"s/s/\&/", "sales", "&ales"),
        (r"s/a/\\/", "a", "\\"),
        ("s,@.*,,", "sales@x", "sales"),
        ("s/ö/oe/", "Mörder", "Moerder"),
    ],
)
def test_rewriting(expression: str, name: str, expected: str) -> None:
    assert read_rewrite(expression)(name) == expected


@pytest.mark.parametrize(
    "text", ["", "s", "s/a/b", "s/a", "y/a/b/", "s/a/b/x", "s/(/b/", r"s/a/\1/", "saabba", "s/a/b/c/d", "@.*"]
)
def test_what_is_no_rewrite(text: str) -> None:
    with pytest.raises(NotARewrite, match="an expression such as"):
        read_rewrite(text)


def test_bytes_that_are_no_text_are_kept() -> None:
    assert renamed(b"\xff@x", [read_rewrite("s/@.*//")]) == b"\xff"


def parcel(due_ms: int, exchange: bytes = b"", routing_key: bytes = b"sales", body: bytes = b"body") -> Parcel:
    return Parcel(due_ms, b"test", b"", b"", Target(exchange, routing_key), b"\x10\x00\x02", body)


def test_the_queue_is_renamed_or_the_exchange() -> None:
    rewrites = [read_rewrite("s/@.*//"), read_rewrite("s/^/x./")]
    assert redirected(Item(parcel(1, b"", b"q@m")), rewrites).parcel.target == (b"", b"x.q")
    assert redirected(Item(parcel(1, b"e@m", b"q@m")), rewrites).parcel.target == (b"x.e", b"q@m")


# ---- lines


def random_parcel(chance: random.Random) -> Parcel:
    def some(longest: int) -> bytes:
        return chance.choice([b"", b"orders.eu", "naïve ☃".encode(), chance.randbytes(chance.randrange(longest))])

    return Parcel(
        chance.randrange(1 << 41), some(255), some(255), some(255), Target(some(255), some(255)),
        chance.randbytes(chance.randrange(2, 300)), some(5_000), chance.choice([None, some(255)]),
    )  # fmt: skip


def test_lines_are_exact_to_the_byte() -> None:
    chance = random.Random(6)
    for _ in range(500):
        line = Line(
            random_parcel(chance), chance.choice([None, chance.getrandbits(32)]), chance.choice([None, "why\n"])
        )
        written = lines.write(line)
        assert written.count(b"\n") == 1
        assert lines.read(written) == line


def test_every_byte_survives() -> None:
    for body in (bytes(range(256)), b"\r\n\0\x7f", "\u2028\u0085\ufeff".encode(), b"\xed\xa0\x80"):
        line = Line(parcel(1, body=body))
        assert lines.read(lines.write(line)) == line


def test_the_end_says_how_many() -> None:
    assert lines.read(lines.write_end(7)) == End(7)


def test_what_has_a_default_may_be_left_out() -> None:
    found = lines.read(b'{"v":1,"due_ms":5,"routing_key":"q","body":"x"}')
    assert found == Line(Parcel(5, b"", b"", b"q", Target(b"", b"q"), lines.PERSISTENT, b"x"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "JSON object"),
        (b"{", "JSON object"),
        (b"[1]", "found list"),
        (b"[" * 100_000, "JSON object"),
        (b"\xff", "JSON object"),
        (b"{}", "version 1"),
        (b'{"v":2,"due_ms":1}', "version 1"),
        (b'{"v":1}', "due_ms: expected an integer, found nothing"),
        (b'{"v":1,"due_ms":1.5}', "found float"),
        (b'{"v":1,"due_ms":true}', "found bool"),
        (b'{"v":1,"due_ms":"1"}', "found str"),
        (b'{"v":1,"due_ms":1,"body":1}', "body: expected a string"),
        (b'{"v":1,"due_ms":1,"body_b64":"*"}', "body_b64: expected base64"),
        (b'{"v":1,"due_ms":1,"body_b64":7}', "body_b64: expected a string"),
        (b'{"v":1,"due_ms":1,"body":"\\ud800"}', "half of one"),
        (b'{"v":1,"due_ms":1,"held":1}', "held: expected a string"),
        (b'{"v":1,"due_ms":1,"crc":"x"}', "crc: expected an integer"),
        (b'{"v":1,"due_ms":1,"to_key":"' + b"k" * 256 + b'"}', "to_key: expected at most 255 bytes, found 256"),
        (b'{"v":1,"messages":"x"}', "messages: expected an integer"),
        (b'{"v":1,"due_ms":1,"boddy":"x"}', r"expected a known field, found 'boddy' \(did you mean body\?\)"),
        (
            b'{"v":1,"due_ms":1,"body":"x","remark":"mine"}',
            r"found 'remark' \(known: body, body_b64, crc, due_ms, exchange, ",
        ),
        (b'{"v":1,"due_ms":1,"properties":"EAAC"}', r"'properties' \(did you mean properties_b64\?\)"),
        (b'{"v":1,"due_ms":1,"crc_b64":"AAAA"}', "found 'crc_b64'"),
        (b'{"v":1,"due_ms":1,"messages":1}', "found 'messages'"),
        (b'{"v":1,"messages":1,"body":"x"}', r"found 'body' \(known: messages, v\)"),
        (b'{"v":1,"due_ms":1,"body_b64":"eA==","body":"x"}', "expected body or body_b64, found both"),
    ],
)
def test_what_is_no_line(text: bytes, why: str) -> None:
    with pytest.raises(NotALine, match=why):
        lines.read(text)


def test_bytes_of_the_first_version() -> None:
    """Never change these: files of this version may be kept for years."""
    kept = (
        b'{"v":1,"due_ms":1795604393876,"route":"mail.in","exchange":"mail.in","routing_key":"outbox",'
        b'"to_exchange":"mail.out","to_key_b64":"/w==","key":"order-7","body":"hell\xc3\xb6",'
        b'"properties_b64":"EAAC","crc":3735928559,"held":"returned: 312 NO_ROUTE"}\n'
    )
    target = Target(b"mail.out", b"\xff")
    of = Parcel(1795604393876, b"mail.in", b"mail.in", b"outbox", target, b"\x10\0\2", "hellö".encode(), b"order-7")
    line = Line(of, 3735928559, "returned: 312 NO_ROUTE")
    assert lines.read(kept) == line
    assert lines.write(line) == kept


# ---- the state machine


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
        return self.run if self.run is not None and self.run.phase.open else None

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
        held = sum(bool(item.problem) for item in batch.items)
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


async def run_once(shelf: Shelf, book: FakeBook, at: int | None = None) -> machine.Report:
    switch = Switch(at)
    book.switch = switch
    return await machine.run(FakeSource(shelf, switch, PARAMETERS), book, FakeJudge(), "me", silent)


COUNT = 11


def check_all_in(shelf: Shelf, book: FakeBook, items: Sequence[Item]) -> None:
    assert [item.parcel for item in book.parked] == [item.parcel for item in items]
    assert not shelf.there
    assert shelf.staged is None
    assert book.run is not None
    assert (book.run.phase, book.run.committed) == (Phase.DONE, len(items))


def in_order(shelf: Shelf) -> list[Item]:
    return [item for _, _, item in sorted((i.parcel.due_ms, n, i) for n, i in shelf.there.items())]


async def test_all_of_it_the_soonest_first() -> None:
    shelf, book = Shelf(COUNT), FakeBook()
    items = in_order(shelf)
    report = await run_once(shelf, book)
    check_all_in(shelf, book, items)
    assert (report.parked, report.held, report.resumed) == (8, 3, False)
    assert report.reasons == {"no such queue": 3}
    assert {item.problem for item in book.parked} == {"", "no such queue"}


async def test_killed_at_every_step_and_again_while_it_goes_on() -> None:
    """Whatever dies wherever: nothing is lost, nothing is parked twice, the order holds."""
    steps = 0
    while True:
        steps += 1
        shelf, book = Shelf(COUNT), FakeBook()
        items = in_order(shelf)
        try:
            await run_once(shelf, book, at=steps)
            break
        except Died:
            pass
        for again in (steps % 7 + 1, 2, None):
            if book.run is not None and book.run.phase is Phase.DONE:
                break
            try:
                await run_once(shelf, book, at=again)
            except Died:
                continue
        check_all_in(shelf, book, items)
    assert steps > 20


async def test_aborted_at_every_step() -> None:
    steps = 0
    while True:
        steps += 1
        shelf, book = Shelf(COUNT), FakeBook()
        items = in_order(shelf)
        try:
            await run_once(shelf, book, at=steps)
            break
        except Died:
            pass
        if await book.unfinished() is None:
            continue
        for at in (1, 2, 3, None):
            try:
                book.switch = Switch(at)
                await machine.abort(FakeSource(shelf, book.switch, PARAMETERS), book)
                break
            except Died:
                continue
        assert book.run is not None
        assert book.run.phase is Phase.ABORTED
        left = sorted(item.parcel for item in shelf.there.values())
        assert sorted([*left, *(item.parcel for item in book.parked)]) == sorted(item.parcel for item in items)
        assert shelf.staged is None


async def test_a_run_behind_an_abort_that_was_killed_says_to_abort() -> None:
    """Everything is where it was by then, and only the store does not know."""
    shelf, book = Shelf(COUNT), FakeBook()
    items = in_order(shelf)
    with pytest.raises(Died):
        await run_once(shelf, book, at=10)
    assert book.run is not None
    assert 0 < book.run.committed < COUNT
    source = FakeSource(shelf, Switch(), PARAMETERS)
    book.switch = Switch(1)
    with pytest.raises(Died):
        await machine.abort(source, book)
    for _ in range(2):
        with pytest.raises(ImportImpossible, match="Next: `abort`, with the same parameters"):
            await run_once(shelf, book)
    assert (await machine.abort(FakeSource(shelf, Switch(), PARAMETERS), book)).run.phase is Phase.ABORTED
    left = sorted(item.parcel for item in shelf.there.values())
    assert sorted([*left, *(item.parcel for item in book.parked)]) == sorted(item.parcel for item in items)


async def test_other_parameters_do_not_resume() -> None:
    shelf, book = Shelf(COUNT), FakeBook()
    with pytest.raises(Died):
        await run_once(shelf, book, at=9)
    other = FakeSource(shelf, Switch(), PARAMETERS | {"cutoff_ms": 6})
    for doing in (machine.run(other, book, FakeJudge(), "me", silent), machine.abort(other, book)):
        with pytest.raises(ImportImpossible, match="cutoff_ms: begun with 5, now 6"):
            await doing
    other.name = "other"
    with pytest.raises(ImportImpossible, match="import 1 from fake is not finished"):
        await machine.run(other, book, FakeJudge(), "me", silent)


async def test_nothing_to_abort() -> None:
    with pytest.raises(ImportImpossible, match="no unfinished import"):
        await machine.abort(FakeSource(Shelf(1), Switch(), PARAMETERS), FakeBook())


async def test_counts_that_differ_stop_it() -> None:
    shelf, book = Shelf(COUNT), FakeBook()
    source = FakeSource(shelf, Switch(), PARAMETERS)
    source.loses = 1
    with pytest.raises(CountMismatch, match="3 messages of a batch are committed, but 2 could be removed"):
        await machine.run(source, book, FakeJudge(), "me", silent)
    shelf, book = Shelf(COUNT), FakeBook()
    with pytest.raises(Died):
        await run_once(shelf, book, at=6)
    assert shelf.staged is not None
    shelf.staged.popitem()
    with pytest.raises(CountMismatch, match="11 messages were staged, but 10"):
        await run_once(shelf, book)


async def test_a_preview_changes_nothing() -> None:
    shelf, book = Shelf(COUNT), FakeBook()
    seen = await machine.preview(FakeSource(shelf, Switch(1), PARAMETERS), book, FakeJudge())
    assert (seen.survey.messages, seen.to_hold, seen.unfinished) == (COUNT, 3, None)
    assert (len(shelf.there), book.run) == (COUNT, None)


async def test_a_preview_of_what_was_interrupted_tells_what_is_left_of_it() -> None:
    """Whoever is asked before `run` goes on sees this first."""
    shelf, book = Shelf(COUNT), FakeBook()
    steps = 0
    while await book.unfinished() is None or book.run is None or book.run.committed == 0:
        steps += 1
        shelf, book = Shelf(COUNT), FakeBook()
        with pytest.raises(Died):
            await run_once(shelf, book, at=steps)
    seen = await machine.preview(FakeSource(shelf, Switch(1), PARAMETERS), book, FakeJudge())
    assert seen.unfinished == book.run
    assert seen.survey.messages == len(shelf.staged or {}) > 0
    assert seen.refusal == ""
    with pytest.raises(ImportImpossible, match="another store"):
        await machine.preview(FakeSource(shelf, Switch(1), PARAMETERS | {"cutoff_ms": 6}), book, FakeJudge())


async def test_a_preview_says_why_a_run_would_not_begin() -> None:
    shelf, book = Shelf(0), FakeBook()
    with pytest.raises(Died):
        await run_once(shelf, book, at=3)
    seen = await machine.preview(FakeSource(shelf, Switch(1), PARAMETERS), book, FakeJudge())
    assert (seen.own, seen.refusal, seen.clean) == (True, "", True)
    seen = await machine.preview(FakeSource(shelf, Switch(1), PARAMETERS | {"cutoff_ms": 6}), book, FakeJudge())
    assert "cutoff_ms: begun with 5, now 6" in seen.refusal
    assert (seen.own, seen.clean) == (False, False)


GONE = Target(b"", b"gone")


@pytest.mark.parametrize(
    ("unfit", "problems", "left", "unfinished", "to_hold", "clean"),
    [
        (0, {}, {"due before the cutoff": 7}, None, 0, True),
        (2, {}, {}, None, 2, False),
        (2, {GONE: "no such queue"}, {}, None, 5, False),  # each counts once
        (5, {GONE: "no such queue"}, {}, None, 5, False),
        (0, {}, {importing.UNREADABLE: 1}, None, 0, False),
        (0, {}, {}, Run(1, "x", {}, Phase.RUNNING, "me", 0, held=0), 0, True),
        (0, {}, {}, Run(1, "x", {}, Phase.RUNNING, "me", 0, held=1), 0, False),
    ],
)
def test_what_a_preview_finds(
    unfit: int, problems: dict[Target, str], left: dict[str, int], unfinished: Run | None, to_hold: int, clean: bool
) -> None:
    survey = Survey(left=left)
    for n in range(5):
        survey.add(GONE, n, problem="unfit: x" if n < unfit else "")
    seen = machine.Preview(survey, problems, unfinished, unfinished is not None)
    assert (seen.to_hold, sum(seen.reasons.values()), seen.clean) == (to_hold, to_hold, clean)


def test_the_reasons_that_are_told_are_bounded() -> None:
    survey = Survey()
    for n in range(1_000):
        survey.add(Target(b"", b"q"), n, problem=f"{n}")
    assert len(survey.unfit) == importing.MOST_REASONS + 1
    assert (sum(survey.unfit.values()), survey.goals[Target(b"", b"q")].unfit) == (1_000, 1_000)


def test_a_survey_of_very_many_destinations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "MOST_GOALS", 3)
    survey = Survey()
    for n in range(10):
        survey.add(Target(b"", b"%d" % n), n)
    assert (survey.messages, len(survey.goals), survey.remarks) == (10, 3, [importing.MORE_GOALS])


@pytest.mark.parametrize(
    ("meant", "due_ms", "included"),
    [(Meant(), 0, True), (Meant(5), 4, False), (Meant(5), 5, True), (Meant(None, 3), -1, True)],
)
def test_what_is_meant(meant: Meant, due_ms: int, included: bool) -> None:
    assert meant.includes(due_ms) is included


# ---- the command


@pytest.mark.parametrize("verb", ["preview", "run", "abort"])
def test_without_a_store_it_says_why_it_needs_one(verb: str, tmp_path: Path) -> None:
    words = ["import", "jsonl", verb, str(tmp_path / "x"), *(() if verb == "preview" else ("--yes",))]
    environ = {"DELAYER_CONFIG": os.devnull, "DELAYER_MODE": "native"}
    result = CliRunner().invoke(cli, words, env=environ, prog_name="delayer")
    assert result.exit_code == 2
    assert "an import keeps its state in one, in native mode too. Next: set store.url" in result.stderr


@pytest.mark.parametrize("url", ["http://u:s3cret@h", "amqp://u:s3c/ret@h/x"])
async def test_a_broker_that_is_none(url: str) -> None:
    async def now() -> int:
        return 0

    source = HoldQueues(url, None, ["q"], Meant(), now)
    with pytest.raises(BadSource, match="the source's broker URL: expected") as raised:
        await source.survey()
    assert "s3c" not in str(raised.value)


# ---- reading ahead


async def test_two_batches_are_read_while_the_one_before_is_committed_and_removed() -> None:
    batches = [Batch([Item(parcel(n))], str(n)) for n in range(5)]
    begun: list[int] = []

    async def read() -> Batch | None:
        begun.append(len(begun))
        await asyncio.sleep(0)
        return batches[begun[-1]] if begun[-1] < len(batches) else None

    ahead = Ahead(read)
    assert await ahead.next() is batches[0]
    for _ in range(20):
        await asyncio.sleep(0)
    assert begun == [0, 1, 2]  # and not one more, however long the commit takes
    assert [await ahead.next() for _ in range(5)] == [*batches[1:], None]
    assert await ahead.next() is None
    await ahead.close()


async def test_what_goes_wrong_while_reading_ahead_is_told_when_it_is_asked_for() -> None:
    answers: list[Batch | Exception] = [Batch([Item(parcel(1))], "1"), SourceLost("gone")]

    async def read() -> Batch | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ahead = Ahead(read)
    assert await ahead.next() is not None
    await asyncio.sleep(0)
    with pytest.raises(SourceLost, match=r"^gone$"):
        await ahead.next()
    answers += [Batch([], "2"), SourceLost("gone again")]
    await ahead.next()
    await asyncio.sleep(0)
    await ahead.close()  # nobody asked for it, and nobody hears of it
    await ahead.close()
