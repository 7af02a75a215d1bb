"""Hints for a filter that matches no message: options that match one, and whether the other list (of waiting or of
held messages) has matching messages."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from asyncpg import Connection

from delayer.amqp import reading
from delayer.cli.options import ask_store
from delayer.cli.output import note
from delayer.core.filters import Filter
from delayer.core.message import as_text
from delayer.store.admin import detail, listing
from delayer.store.admin.listing import Entry

LOOKED: Final = 1_000
"""A hint reads so many messages at most: the soonest waiting ones, or the oldest held ones."""
MOST: Final = 3
"""A hint names so many options at most."""
NAMES: Final = {"--route": "route", "--exchange": "to_exchange", "--routing-key": "to_key", "--delay-key": "key"}
"""The options of a Filter that an Entry has too, each with the name of the field in both."""


def say_hints(url: str, wanted: Filter, *, held: bool = False) -> None:
    """Print the hints for ``wanted``, which matched no waiting message (``held``: no held message). Raises StoreLost,
    BadStoreUrl, SchemaOutdated."""
    if wanted.everything:
        return

    async def look(connection: Connection) -> tuple[list[str], bool]:
        test = reading.properties_test(wanted)
        if held:
            page = await detail.held_page(connection, Filter(), None, LOOKED)
            there = await listing.find(connection, replace(wanted, kind=None), test, 1)
            return near_misses(wanted, (one.entry for one in page.messages)), bool(there.places)
        entries = await listing.entries(connection, await listing.find(connection, Filter(), None, LOOKED))
        for _, value in _asked(wanted):
            keyed = await listing.find(connection, Filter(key=reading.raw(value)), None, 1)
            entries += await listing.entries(connection, keyed)
        of_held = await detail.held_page(connection, wanted, test, 1)
        return near_misses(wanted, entries), bool(of_held.messages)

    near, elsewhere = ask_store(url, "look for near misses", look)
    if near:
        note(f"Did you mean {' or '.join(near)}?")
    if elsewhere:
        note(f"{'Waiting' if held else 'Held'} messages match. Next: `delayer {'list' if held else 'held list'}`.")


def near_misses(wanted: Filter, entries: Iterable[Entry]) -> list[str]:
    """Options that match one of ``entries``. Each has a value of ``wanted``, in another case or under another option.
    Pure."""
    return near(_asked(wanted), (_offered(entry, headers=bool(wanted.headers)) for entry in entries))


def near(wanted: Iterable[tuple[str, str]], offers: Iterable[Iterable[tuple[str, str]]]) -> list[str]:
    """The same for pairs of an option and its value: ``wanted`` has those of the filter, and each of ``offers`` those
    of one message. Pure."""
    asked = list(wanted)
    found: dict[str, None] = {}
    for offer in offers:
        offered = list(offer)
        matching = {option for option, _ in offered}
        for option, value in asked:
            if option not in matching:
                found |= dict.fromkeys(other for other, text in offered if text.casefold() == value.casefold())
    return list(found)[:MOST]


def _asked(wanted: Filter) -> Iterator[tuple[str, str]]:
    """Each option of the filter as an operator writes it, and its value."""
    fields = {**NAMES, "--message-id": "message_id"}
    for option, name in fields.items():
        yield from option_of(option, getattr(wanted, name))
    for header, value in wanted.headers:
        yield from option_of("--header", header + b"=" + reading.raw(value))


def _offered(entry: Entry, *, headers: bool) -> Iterator[tuple[str, str]]:
    """Each option that would match this message, and its value. ``headers``: also those of its headers."""
    for option, name in NAMES.items():
        yield from option_of(option, getattr(entry, name))
    yield from option_of("--message-id", reading.message_id(entry.properties))
    for header in reading.read(entry.properties).headers if headers else ():
        yield from option_of("--header", reading.raw(f"{header.name}={header.value}"))


def option_of(option: str, value: bytes | None) -> Iterator[tuple[str, str]]:
    """An option as an operator writes it, and its value. Without a value it yields nothing."""
    if value:
        text = as_text(value)
        yield f"{option} {shlex.quote(text)}", text
