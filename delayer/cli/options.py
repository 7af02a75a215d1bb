"""What several verbs share: options, settings, store queries, and the prompt before a change."""

from __future__ import annotations

import asyncio
import getpass
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
from asyncpg import Connection

from delayer.cli.errors import Misused, OutOfReach
from delayer.cli.output import note, quoted
from delayer.config import loading, texts
from delayer.config.errors import Expected, format_found
from delayer.config.model import Settings
from delayer.config.texts import Scalar
from delayer.config.values import duration_ms
from delayer.core.filters import Filter, Token, read_token
from delayer.core.hold import HoldKind
from delayer.core.message import raw
from delayer.core.secret import SecretUrl
from delayer.store import waiting
from delayer.store.session import read_connection


class Stoppable(click.Command):
    """A command that cleans up on SIGTERM and exits with one line and code 143, as every command does on Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        stopped = []

        def leave(number: int, _frame: object) -> None:
            stopped.append(number)
            signal.raise_signal(signal.SIGINT)  # asyncio cancels its task. A driver's callback may lose an exception.

        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # Inherited from a script that started us with `&`.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        before = signal.signal(signal.SIGTERM, leave)
        try:
            return super().invoke(ctx)
        except BaseException:  # Py4J may lose the exception, and raise another in its place.
            if not stopped:
                raise
            note("delayer: ended by SIGTERM")
            raise click.exceptions.Exit(128 + signal.SIGTERM) from None
        finally:
            signal.signal(signal.SIGTERM, before)


class LocalPath(click.Path):
    """A path on this machine, to write to. A URL would be taken for one, and lose a slash."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in os.fspath(value):
            self.fail(f"expected a path on this machine, found a URL: {format_found(value, is_url=True)}", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True)
class Request:
    """The options before the verb. Settings are read only when a verb needs them, so that ``--help`` never fails."""

    config: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    def settings(self, sealed: list[str] | None = None, *, tokens: bool = False) -> Settings:
        """Read the settings. ``sealed`` and ``tokens`` as for :func:`loading.load`. Raises ConfigError."""
        return loading.load(self.file, os.environ, self.flags, sealed, tokens=tokens)

    @property
    def file(self) -> Path | None:
        return loading.config_file(self.config, os.environ)


def request_of(context: click.Context) -> Request:
    """Return the request that the group stored before it called the verb."""
    request = context.find_object(Request)
    assert request is not None
    return request


T = TypeVar("T")


def joined(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Combine decorators into one, the first on top."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def ask_store(url: str, doing: str, question: Callable[[Connection], Awaitable[T]]) -> T:
    """Run one query on the store, named ``doing`` in errors. Raises StoreLost, BadStoreUrl, SchemaOutdated."""

    async def asked() -> T:
        async with read_connection(url, doing) as connection:
            return await question(connection)

    return asyncio.run(asked())


def pair(text: str, expected: str) -> tuple[str, str]:
    """Split an option such as NAME=VALUE. Raises click.BadParameter."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"expected {expected}, found {format_found(text)}")
    return name, value


def read_as(read: Callable[[str], object]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Make an option's callback from ``read``, which raises ValueError naming the expected form."""

    def one(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise click.BadParameter(f"expected {error}, found {text!r}") from None

    def callback(_context: click.Context, _option: click.Parameter, given: Any) -> Any:
        return tuple(map(one, given)) if isinstance(given, tuple) else None if given is None else one(given)

    return callback


duration = read_as(duration_ms)
instant = read_as(lambda text: texts.instant_ms(text, time.time_ns() // 1_000_000))
fixed_instant = read_as(texts.instant_ms)
"""Rejects durations from now, such as 2h."""
bytes_of = read_as(raw)


def headers_of(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, Scalar]:
    """The callback of an option for typed headers."""
    try:
        return dict(map(texts.typed_header, given))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _header(text: str) -> tuple[bytes, str]:
    name, value = pair(text, "NAME=VALUE")
    return raw(name), value


def messages_of(url: str, names: Sequence[str]) -> dict[str, Token | None]:
    """Map each name to its message: delayer's id after ``id:``, not looked up, or else a message_id (None if unknown).
    Raises Misused if several messages have it."""
    found: dict[str, Token | None] = dict.fromkeys(names)
    for name in found:
        with suppress(ValueError):
            found[name] = read_token(name)
    if others := {raw(name): name for name, token in found.items() if token is None}:
        there = ask_store(url, "find", lambda connection: waiting.find_by_name(connection, list(others), packed=True))
        for text, tokens in there.items():
            if len(tokens) > 1:
                several = ", ".join(map(str, tokens))
                number = f"{len(tokens)} or more" if len(tokens) == waiting.NAMED else len(tokens)
                raise Misused(f"{quoted(others[text])} names {number} messages: give an id of {several}")
            found[others[text]] = tokens[0] if tokens else None
    return found


filter_options = joined(
    click.option("--route", callback=bytes_of, metavar="EXCHANGE", help="The `from` exchange of its route."),
    click.option("--exchange", "to_exchange", callback=bytes_of, metavar="EXCHANGE", help="The exchange it goes to."),
    click.option("--routing-key", "to_key", callback=bytes_of, metavar="KEY", help="Its routing key there."),
    click.option(
        "--due-after", "due_from_ms", callback=instant, metavar="INSTANT", help="Due then or later: RFC 3339, or 2h."
    ),
    click.option("--due-before", "due_before_ms", callback=instant, metavar="INSTANT", help="Due before then."),
    click.option("--delay-key", "key", callback=bytes_of, metavar="KEY", help="Its x-delay-key."),
    click.option("--message-id", callback=bytes_of, metavar="ID", help="Its message_id."),
    click.option(
        "--header", "headers", multiple=True, callback=read_as(_header), metavar="NAME=VALUE",
        help="A header and its value, as text; no array or table. May be repeated.",
    ),
)  # fmt: skip
"""The options of a Filter, passed to the command under the names of its fields."""
kind_option = click.option("--kind", type=click.Choice(list(map(str, HoldKind))), help="Why it was not delivered.")
"""The kind of a hold, in verbs for messages that their destination did not accept."""
names_argument = click.argument("names", nargs=-1, metavar="[ID]...")
limit_option = click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Rows on a page."
)


def filter_of(given: dict[str, Any]) -> Filter:
    """Build the Filter of :data:`filter_options`."""
    return Filter(**{name: given[name] for name in Filter.__dataclass_fields__ if name in given})


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Count the messages, and change nothing.")
all_option = click.option("--all", "everything", is_flag=True, help="All messages, without a filter.")
change_options = joined(all_option, dry_run_option, yes_option, as_json, click.pass_context)
"""The options of every command that changes many messages. The command gets the context first."""
stored_change_options = joined(names_argument, filter_options, change_options)
""":data:`change_options`, and the ids and filters of messages in the store."""


master_option = click.option(
    "--master", metavar="URL", help="Spark's master, such as spark://host:7077. [default: all cores of this machine]"
)
remote_option = click.option(
    "--remote",
    metavar="URL",
    callback=lambda _context, _option, given: None if given is None else SecretUrl(given),
    help="A Spark Connect server instead of a master: sc://host:15002. Needs no Java here.",
)
conf_option = click.option(
    "--conf",
    multiple=True,
    callback=lambda _context, _option, given: dict(pair(text, "KEY=VALUE") for text in given),
    metavar="KEY=VALUE",
    help="Set one of Spark's settings.",
)


def check_remote(remote: SecretUrl, master: str | None) -> None:
    """Raise Misused or JobMisused if the server's URL is unusable, or goes with a master."""
    from delayer.audit.remote import place_of  # noqa: PLC0415 - only jobs need it

    place_of(remote)
    if master is not None:
        raise Misused("--master, --remote: expected one of them")


def selected(names: Sequence[str], given: dict[str, Any], *, everything: bool) -> Filter:
    """Return the Filter of a changing command; empty with ``names`` or --all. Without any, raises click.UsageError."""
    wanted = filter_of(given)
    if names and (everything or not wanted.everything):
        raise click.UsageError("give either ids or a filter")
    if not names and wanted.everything and not everything:
        raise click.UsageError("expected the messages: ids, a filter, or --all")
    return wanted


def whoami() -> str:
    """Name the operator for the audit log: the user behind sudo, on this host."""
    try:
        user = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # A container may have a user id without a name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def confirm(question: str, *, yes: bool) -> bool:
    """Return whether to continue, by ``--yes`` or a prompt; after a no, note that nothing changed. Raises Misused if it
    cannot prompt."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise Misused("there is no terminal to ask at: use --yes, or --dry-run to see the number only")
    sure = click.confirm(question, default=False, err=True)
    if not sure:
        note("Nothing was changed.")
    return sure


def store_url(settings: Settings) -> str:
    """Return the store's URL. Raises Misused if none is configured."""
    url = settings.store_url
    if url is None:
        raise Misused(
            "no store is configured. Next: set store.url. Without a store see "
            "`delayer strays list` and `delayer topology show`."
        )
    return url


def url_of(option: str, text: str, read: Callable[[object], SecretUrl | None]) -> SecretUrl:
    """Parse the URL given for ``option`` with ``read``. Raises Misused."""
    try:
        url = read(text)
    except Expected as wrong:
        raise Misused(f"{option}: expected {wrong}, found {format_found(text, is_url=True)}") from None
    if url is None:
        raise Misused(f"{option}: expected a URL, found none")
    return url


def check_package(module: str, extra: str) -> None:
    """Raise OutOfReach unless the package of an extra is installed."""
    if find_spec(module) is None:
        raise OutOfReach(f"the Python package {module} is missing. Next: install delayer[{extra}] (docs/install.md)")
