"""Errors that a command expects, the exit codes, and the advice for each."""

from __future__ import annotations

from enum import IntEnum
from typing import IO, Any

import click

from delayer.amqp.errors import BrokerLost
from delayer.audit.errors import JobFailed, JobImpossible, JobMisused
from delayer.broker.errors import BrokerRefused, QueueMissing, TopologyMismatch
from delayer.config.errors import ConfigError
from delayer.core import errors
from delayer.core.errors import StoreLost
from delayer.core.readable import counted, readable
from delayer.store.errors import (
    STORE_RUNS,
    BadStoreUrl,
    ScheduleRefused,
    ScheduleUnknown,
    SchemaOutdated,
    SchemaUnusable,
    StoreUnfit,
)

BROKER_RUNS = "check broker.url, and that the broker runs"
SEEING = "set broker.management_url, or check its host, port, user and password, and that it answers"


class ExitCode(IntEnum):
    """The exit codes: done; a check found something; usage or configuration; broker or store unreachable."""

    DONE = 0
    FOUND = 1
    USAGE = 2
    OUT_OF_REACH = 3


def broker_advice(lost: BrokerLost | BrokerRefused) -> str:
    """Return the next step for a broker that is unreachable or refuses."""
    return lost.advice or errors.certificate_advice(str(lost), *errors.OF_BROKER) or BROKER_RUNS


class CommandError(click.ClickException):
    """An expected error: a message without a traceback. The subclasses have the exit codes."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"delayer: {self.message}", file=file, err=True)


class CommandFailed(CommandError):
    """A defect that a command found, or work that it could not do."""

    exit_code = ExitCode.FOUND


class Misused(CommandError):
    """An error in the usage or the configuration."""

    exit_code = ExitCode.USAGE


class OutOfReach(CommandError):
    """Broker or store unreachable."""

    exit_code = ExitCode.OUT_OF_REACH


EXPECTED_ERRORS = (
    ConfigError, BrokerLost, BrokerRefused, QueueMissing, TopologyMismatch, StoreLost, StoreUnfit, SchemaOutdated,
    BadStoreUrl, ScheduleRefused, JobImpossible, JobMisused, JobFailed,
)  # fmt: skip


def failure(error: Exception) -> CommandError:
    """Convert one of :data:`EXPECTED_ERRORS`, adding its next step."""
    text = readable(str(error)).removesuffix(".")  # Texts with separate advice end with a full stop.
    match error:
        case ConfigError(problems=problems):
            lines = "\n".join(f"  {problem}" for problem in problems)
            made: CommandError = Misused(f"the configuration has {counted(len(problems), 'mistake')}:\n{lines}")
        case TopologyMismatch(findings=findings):
            lines = "\n".join(f"  {readable(str(one))}" for one in findings)
            advice = (
                "Nothing was bound. The broker names the first difference only; compare all of them.\n"
                "Next: `delayer check` says what to do about each; then run `delayer topology apply` again."
            )
            made = CommandFailed(f"queues or exchanges on the broker differ from the configuration:\n{lines}\n{advice}")
        case ScheduleUnknown():
            made = CommandFailed(text)
        case ScheduleRefused(problems=problems):
            lines = "\n".join(f"  {readable(problem)}" for problem in problems)
            made = Misused(f"nothing was changed, because of {counted(len(problems), 'mistake')}:\n{lines}")
        case BadStoreUrl() | JobMisused():
            made = Misused(text)
        case JobImpossible() | JobFailed():  # Exit code 1 would mean that an audit found something.
            made = OutOfReach(text)
        case BrokerRefused() | BrokerLost():
            how = "refused" if isinstance(error, BrokerRefused) else "is out of reach"
            made = OutOfReach(f"the broker {how}: {text}. Next: {broker_advice(error)}.")
        case StoreLost(advice=advice):
            how = "refused" if advice else "is out of reach"
            made = OutOfReach(f"the store {how}: {text}. Next: {advice or STORE_RUNS}.")
        case SchemaUnusable(advice=advice):
            made = Misused(f"{text}. Next: {advice}.")
        case StoreUnfit(advice=advice):
            made = CommandFailed(f"{text}. Next: {advice}.")
        case _:
            made = CommandFailed(f"{text}.")  # The other texts contain the advice.
    return made
