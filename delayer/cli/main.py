"""The command line: the options before the verb, and the conversion of errors into messages and exit codes. Verbs load
on demand, because all of them together take half a second."""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from delayer import __version__

VERBS: Final = {
    "run": "run",
    "check": "check",
    "topology": "topology",
    "db": "db",
    "send": "send",
    "status": "status",
    "list": "list:list_",
    "show": "list:show",
    "cancel": "changing:cancel",
    "reschedule": "changing:reschedule",
    "held": "held",
    "schedule": "schedule",
    "refused": "set_aside:refused",
    "strays": "set_aside:strays",
    "audit-log": "list:audit_log",
    "drain": "drain",
    "audit": "audit",
    "backlog": "backlog",
    "compact": "segments:compact",
    "restore": "segments:restore",
    "import": "sources:import_",
    "export": "export",
}
"""The verbs in order of use: the module in delayer.cli, and the name in it if it differs."""
PLAIN_LOGS: Final = frozenset({"status", "list", "show", "cancel", "reschedule", "held", "audit-log"})
"""Verbs that log through the standard library only. structlog would take as long to load as the store to answer."""
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk or file system."""


class Verbs(click.Group):
    """Lists verbs in order of use, loads them one by one, and reports expected errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in VERBS and cmd_name not in self.commands:
            module, _, name = VERBS[cmd_name].partition(":")
            verb: click.Command = getattr(importlib.import_module(f"delayer.cli.{module}"), name or module)
            self.add_command(verb)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # Click would compare with loaded verbs only.
        if args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], VERBS, 1)
            raise click.UsageError(f"No such command {args[0]!r}.{f' Did you mean {near[0]}?' if near else ''}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if not any(error.option_name in option.opts for option in self.params):
                raise
            path = error.ctx.command_path if error.ctx else ctx.command_path
            verb = path.removeprefix(ctx.command_path).strip() or "VERB"
            told = f"{error.option_name} stands before the verb: {ctx.command_path} {error.option_name} … {verb}"
            raise click.NoSuchOption(error.option_name, told, ctx=error.ctx) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("delayer: interrupted", err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None
        except Exception as error:
            from delayer.cli.errors import EXPECTED_ERRORS, failure  # noqa: PLC0415 - the errors of every layer

            if not isinstance(error, EXPECTED_ERRORS):
                raise
            raise failure(error) from error


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),  # Reading it reports this with all other errors.
    metavar="PATH",
    help="The configuration file. Without it: $DELAYER_CONFIG, else /etc/delayer/delayer.toml if there is one, else "
    "the defaults.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one key, such as intake.max_delay=30d. Lists as JSON. May be repeated.",
)
@click.option("--mode", metavar="native|store", help="Short for --set mode=…")
@click.option(
    "--broker-url", metavar="URL", help="Short for --set broker.url=…; others can see it in the process list."
)
@click.option("--store-url", metavar="URL", help="Short for --set store.url=…; others can see it in the process list.")
@click.version_option(__version__, prog_name="delayer", message="%(prog)s %(version)s")
@click.pass_context
def cli(
    context: click.Context,
    *,
    config: Path | None,
    assignments: tuple[str, ...],
    mode: str | None,
    broker_url: str | None,
    store_url: str | None,
) -> None:
    """Delayed messages for RabbitMQ: give every message back on time.

    Publish to the exchange of a route (by default delayer.in) with the header x-delay in milliseconds. When the
    message is due, delayer publishes it to the route's other exchange (delayer.out). Declare that exchange and its
    queues, or let delayer do it by a [[destination]]; otherwise the message is held.

    \b
    The first time:
      delayer db upgrade               make the tables (store mode)
      delayer check                    name everything that is wrong or missing
      delayer run                      run the daemon; it declares its queues, and each [[destination]]
      delayer send --routing-key hello --delay 10s --body 'in ten seconds'
      delayer status                   the backlog, and the next due instant

    The file, the environment (DELAYER_INTAKE__MAX_DELAY=30d) and flags (--set intake.max_delay=30d) can set every key
    of the configuration. The environment overrides the file, and flags override both.

    Exit codes: 0 done, 1 a check found something, 2 usage or configuration, 3 something needed is unavailable.
    Examples of the last: broker, store, a program that is not installed, room on a disk. A verb that acts on messages
    exits with 1 too if no message matches. After Ctrl-C a verb exits with 130. After SIGTERM audit, compact, restore
    and backlog export exit with 143.

    Errors and log lines may name a page, such as docs/operations.md. The environment that delayer is installed in has
    these pages in share/doc/delayer, for example /opt/delayer/share/doc/delayer/docs/operations.md.
    """
    from delayer.cli.options import Request, pair  # noqa: PLC0415 - loaded with the verb, not for --version

    if context.invoked_subcommand in PLAIN_LOGS:
        logging.basicConfig(level=logging.ERROR)
    else:
        from delayer.config import logs  # noqa: PLC0415 - as above

        logs.configure("console", "error")
    shortcuts = {"mode": mode, "broker.url": broker_url, "store.url": store_url}
    flags = dict(pair(text, "--set KEY=VALUE") for text in assignments)
    flags |= {key: value for key, value in shortcuts.items() if value is not None}
    context.obj = Request(config, flags)


def main() -> None:
    """Entry point of the ``delayer`` command."""
    _open_closed_streams()
    try:
        try:
            cli(prog_name="delayer")
        finally:
            sys.stdout.flush()
    except OSError as unwritten:
        _end(unwritten)


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed. Otherwise a connection would get the stream's number, and
    what a library writes to stderr would go to the broker."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # The lowest free number, which is this stream's.
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _end(unwritten: OSError) -> NoReturn:
    """Exit after output could not be written: with 3 if the disk is full, with 1 if the reader is gone."""
    from delayer.cli.errors import ExitCode  # noqa: PLC0415 - as above

    if unwritten.errno == errno.EPIPE:
        os._exit(ExitCode.FOUND)  # A normal exit would make the interpreter try to write the rest.
    if unwritten.errno not in NO_ROOM:
        raise unwritten
    where = f" to {unwritten.filename}" if unwritten.filename else ""
    what = "The command may have done its work; its output is cut off."
    with suppress(OSError):  # stderr may be on the same disk.
        click.echo(f"delayer: nothing more can be written{where}: {unwritten.strerror}. {what}", err=True)
    os._exit(ExitCode.OUT_OF_REACH)
