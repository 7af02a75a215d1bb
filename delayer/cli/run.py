"""delayer run: the daemon in the foreground."""

from __future__ import annotations

import os
import signal
from functools import partial

import click

from delayer.cli.options import Request


@click.command()
@click.pass_obj
def run(request: Request) -> None:
    """Run the daemon, in the foreground.

    It waits for a broker or a store that is not there yet, or that refuses the login, and logs that. SIGTERM and SIGINT
    stop it; it settles messages in flight first. SIGHUP reads the configuration again. Logs go to stderr. Several
    daemons with the same configuration share the work: under systemd, delayer@1, delayer@2 and so on.

    \b
    Examples:
      delayer run
      delayer --config /etc/delayer/delayer.toml run
      delayer --mode native run
      delayer --set http.listen= run           without health, metrics and page: for a second daemon
    """
    # The import takes most of a second. During it, an order to stop ends the process, and an order to reload waits.
    for order in (signal.SIGTERM, signal.SIGINT):
        signal.signal(order, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from delayer.daemon import app  # noqa: PLC0415

    app.run_daemon(partial(request.settings, tokens=True))
