"""Losses that all layers share. Adapters translate their driver's errors into these, with the cause chained.

BrokerLost      the broker, or the channel in use, is gone (amqp/errors.py): publishes in flight are in doubt
├─ NotTaken     one of our queues refused a message that it must accept
└─ Unconfirmed  a batch was not fully confirmed in time; it carries the known outcomes
StoreLost       the store is unreachable, or the transaction failed
├─ LaneLost     the lane belongs to another process now
└─ Rejected     the database rejects the data of the transaction
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from delayer.amqp.errors import BrokerLost
from delayer.core.hold import Outcome


class NotTaken(BrokerLost):
    """The cascade, the refused queue or the strays queue refused a message that it must accept."""


class Unconfirmed(BrokerLost):
    """A batch was not fully confirmed in time. ``outcomes``: the known outcome of each message, None if in doubt."""

    def __init__(self, text: str, outcomes: Sequence[Outcome | None]) -> None:
        super().__init__(text)
        self.outcomes = outcomes


class StoreLost(Exception):
    """The store is unreachable, or the transaction failed. Nothing is committed, but if the connection broke during the
    commit, that is in doubt. ``advice``: how an operator can fix the cause, as an imperative; may be empty.
    ``conflict``: whether the transaction lost a conflict with another, and may succeed if it is repeated."""

    def __init__(self, text: str, advice: str = "", *, conflict: bool = False) -> None:
        super().__init__(text)
        self.advice = advice
        self.conflict = conflict


class LaneLost(StoreLost):
    """The lane belongs to another process, which releases its rows. This process must not park into it."""


class Rejected(StoreLost):
    """The database rejects the transaction's data, and would reject them again. Nothing is committed."""


ERRNO: Final = re.compile(r"\[Errno -?\d+\] ")
"""The number that Python puts before an error text of the operating system."""
_NOT_BELIEVED: Final = re.compile("certificate.verify.failed", re.IGNORECASE)
_OTHER_HOST: Final = re.compile("hostname mismatch|ip address mismatch", re.IGNORECASE)
_NOT_NOW: Final = re.compile("has expired|not yet valid", re.IGNORECASE)
OF_BROKER: Final = "broker.ca_file", "broker.url"
OF_STORE: Final = "store.url, by sslrootcert=FILE,", "store.url"
"""The last two arguments of :func:`certificate_advice`, for each server."""


def certificate_advice(text: str, authority: str, url: str) -> str:
    """Say how to fix a certificate error, as an imperative; "" if ``text`` is another error. ``authority`` and ``url``:
    the settings with the authority's file and the server's address.

    >>> certificate_advice("CERTIFICATE_VERIFY_FAILED: unable to get local issuer", "broker.ca_file", "broker.url")
    'say in broker.ca_file who signed the certificate: a file of PEM certificates'
    """
    if not _NOT_BELIEVED.search(text):
        return ""
    if _OTHER_HOST.search(text):
        return f"name the host in {url} that its certificate is for"
    if _NOT_NOW.search(text):
        return "renew its certificate, or set this machine's clock"
    return f"say in {authority} who signed the certificate: a file of PEM certificates"
