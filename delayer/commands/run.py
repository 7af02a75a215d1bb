"""delayer run"""

from __future__ import annotations

import click

from delayer import early_signals
from delayer.commands.options import Request


@click.command()
@click.pass_obj
def run(request: Request) -> None:
    """Run the daemon, in the foreground.

    It waits for a broker or a store that is not there yet, and says so. SIGTERM and SIGINT stop it: what is in flight
    is settled first. SIGHUP reads the configuration again. Logs go to stderr. Several daemons with the same
    configuration share the work: under systemd, delayer@1, delayer@2 and so on.

    \b
    Examples:
      delayer run
      delayer --config /etc/delayer/delayer.toml run
      delayer --mode native --set log.format=console run
      delayer --set http.listen= run           without health, metrics and page: beside another daemon
    """
    with early_signals.heeded():
        from delayer import app  # noqa: PLC0415 - takes most of a second, in which somebody may want it to stop

        app.run_daemon(request.settings)
