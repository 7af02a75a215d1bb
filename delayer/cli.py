"""The command line: what stands before the verb, and one place that turns errors into messages and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from delayer import __version__, telemetry
from delayer.commands.acting import cancel, reschedule
from delayer.commands.audit import audit
from delayer.commands.check import check
from delayer.commands.common import EXPECTED_ERRORS, Request, failure
from delayer.commands.compact import compact
from delayer.commands.db import db
from delayer.commands.drain import drain
from delayer.commands.exporting import export
from delayer.commands.held import held
from delayer.commands.looking import acts, list_, show
from delayer.commands.refused import refused
from delayer.commands.restore import restore
from delayer.commands.run import run
from delayer.commands.send import send
from delayer.commands.sources import import_
from delayer.commands.status import status
from delayer.commands.topology import topology


class Verbs(click.Group):
    """Verbs in the order of their use, and expected errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EXPECTED_ERRORS as error:
            raise failure(error) from error
        except click.NoSuchOption as error:
            if not any(error.option_name in option.opts for option in self.params):
                raise
            path = error.ctx.command_path if error.ctx else ctx.command_path
            verb = path.removeprefix(ctx.command_path).strip() or "VERB"
            told = f"{error.option_name} stands before the verb: {ctx.command_path} {error.option_name} … {verb}"
            raise click.NoSuchOption(error.option_name, told, ctx=error.ctx) from None


def _assignments(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    flags = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter("expected KEY=VALUE, such as intake.prefetch=1000")
        flags[key] = value
    return flags


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),  # whether it can be read is said with every other mistake
    metavar="PATH",
    help="The configuration file. Without it: $DELAYER_CONFIG, else /etc/delayer/delayer.toml if there is one, else "
    "the defaults.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    callback=_assignments,
    metavar="KEY=VALUE",
    help="Set one key, such as intake.max_delay=30d. Lists and tables as JSON. May be repeated.",
)
@click.option("--mode", metavar="native|store", help="Short for --set mode=…")
@click.option("--workers", metavar="N", help="Short for --set workers=…")
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
    assignments: dict[str, str],
    mode: str | None,
    workers: str | None,
    broker_url: str | None,
    store_url: str | None,
) -> None:
    """Delayed messages for RabbitMQ: give every message back on time.

    Publish to the exchange of a route (by default delayer.in) with the header x-delay in milliseconds; when it is
    due, the message comes out at the route's other exchange (delayer.out).

    \b
    The first time:
      delayer db upgrade               make the tables (store mode)
      delayer check                    what is off, or missing?
      delayer run                      run the daemon; it declares its queues and exchanges
      delayer send --key hello --delay 10s --body 'in ten seconds'
      delayer status                   what waits, and until when

    Every key of the configuration can be set by the file, by the environment (DELAYER_INTAKE__MAX_DELAY=30d) and by
    flags (--set intake.max_delay=30d); the later beats the earlier.

    Exit codes: 0 done, 1 a check found something, 2 usage or configuration, 3 broker or store out of reach.
    """
    telemetry.configure("console", "error")  # the daemon configures again, as its settings say
    shortcuts = {"mode": mode, "workers": workers, "broker.url": broker_url, "store.url": store_url}
    flags = assignments | {key: value for key, value in shortcuts.items() if value is not None}
    context.obj = Request(config, flags)


for verb in (
    run, check, topology, db, send, status, list_, show, cancel, reschedule, held, refused, acts, drain, audit,
    compact, restore, import_, export,
):  # fmt: skip
    cli.add_command(verb)


def main() -> None:
    """Entry point of the ``delayer`` command."""
    cli(prog_name="delayer")
