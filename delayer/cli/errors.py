"""Errors that a command expects, the exit codes, and the advice for each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import IO, Any

import click

from delayer.audit.errors import JobFailed, JobImpossible, JobMisused
from delayer.broker.errors import BrokerRefused, Mismatch, QueueMissing, TopologyMismatch
from delayer.config.errors import ConfigError
from delayer.core import errors
from delayer.core.errors import BrokerLost, StoreLost
from delayer.core.readable import readable
from delayer.store.errors import BadStoreUrl, SchemaOutdated, StoreUnfit

BROKER_RUNS = "check broker.url, and that the broker runs"
BROKER_RIGHTS = "check user, password, vhost and permissions"
STORE_RUNS = "check store.url, and that Postgres runs"
"""Advice about a store that is out of reach."""


class ExitCode(IntEnum):
    """The exit codes: done; a check found something; usage or configuration; broker or store out of reach."""

    DONE = 0
    FOUND = 1
    USAGE = 2
    OUT_OF_REACH = 3


def broker_advice(lost: Exception) -> str:
    """The next step for a broker that is out of reach, or that refuses, for this reason."""
    if isinstance(lost, BrokerRefused):
        return BROKER_RIGHTS
    return errors.certificate_advice(str(lost), *errors.OF_BROKER) or BROKER_RUNS


class CommandError(click.ClickException):
    """An expected error: a message without a traceback. The subclasses have the exit codes."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"delayer: {self.message}", file=file, err=True)


class CommandFailed(CommandError):
    """A defect that a command found, or work that it could not do."""

    exit_code = ExitCode.FOUND


class Misused(CommandError):
    """A mistake in the usage or the configuration."""

    exit_code = ExitCode.USAGE


class OutOfReach(CommandError):
    """Broker or store out of reach."""

    exit_code = ExitCode.OUT_OF_REACH


EXPECTED_ERRORS = (
    ConfigError, BrokerLost, BrokerRefused, QueueMissing, TopologyMismatch, StoreLost, StoreUnfit, SchemaOutdated,
    BadStoreUrl, JobImpossible, JobMisused, JobFailed,
)  # fmt: skip


def failure(error: Exception) -> CommandError:
    """The failure and its next step, for one of :data:`EXPECTED_ERRORS`."""
    text = readable(str(error)).removesuffix(".")  # Texts with an advice of their own end with a full stop.
    match error:
        case ConfigError(problems=problems):
            lines = "\n".join(f"  {problem}" for problem in problems)
            made: CommandError = Misused(
                f"the configuration has {len(problems)} mistake{'s' * (len(problems) > 1)}:\n{lines}"
            )
        case TopologyMismatch(mismatches=mismatches, advice=named):
            lines = "\n".join(f"  {readable(str(one))}" for one in mismatches)
            advice = (
                "Nothing was bound. The broker names the first difference only; compare all of them.\n"
                f"{named or _way_out(mismatches)}\nThen run `delayer topology apply` again."
            )
            made = CommandFailed(f"queues or exchanges on the broker differ from the configuration:\n{lines}\n{advice}")
        case BadStoreUrl() | JobMisused():
            made = Misused(text)
        case JobImpossible() | JobFailed():  # Exit code 1 would mean that an audit found something.
            made = OutOfReach(text)
        case BrokerRefused():
            made = OutOfReach(f"the broker refused: {text}. Next: check broker.url and the user's permissions.")
        case BrokerLost():
            made = OutOfReach(f"the broker is out of reach: {text}. Next: {broker_advice(error)}.")
        case StoreLost(advice=advice) if advice:
            made = OutOfReach(f"the store refused: {text}. Next: {advice}.")
        case StoreLost():
            made = OutOfReach(f"the store is out of reach: {text}. Next: {STORE_RUNS}.")
        case StoreUnfit(advice=advice):
            made = CommandFailed(f"{text}. Next: {advice}.")
        case _:
            made = CommandFailed(f"{text}.")  # The other texts contain the advice.
    return made


def _way_out(mismatches: Sequence[Mismatch]) -> str:
    """The next step, which never deletes a queue with messages: each was confirmed to its publisher."""
    if any(one.messages for one in mismatches):
        return (
            "Deleting a queue loses the messages in it: choose another name in the configuration, and bring them over "
            '(docs/operations.md, "An existing queue with other arguments").'
        )
    return (
        "Either delete these (`rabbitmqctl delete_queue NAME`, while it is empty and has no consumer), or choose "
        "other names in the configuration."
    )
