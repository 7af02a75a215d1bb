"""Losses that every layer understands. Adapters translate their driver's errors into these, cause chained.

BrokerLost      the broker, or the channel in use, is gone: what was in flight is in doubt
└─ Unconfirmed  not all of a batch was confirmed in time: what is known of the others goes with it
StoreLost       the store is out of reach, or refused the transaction
└─ LaneLost     the lane belongs to somebody else by now
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from delayer.core.message import Outcome


class BrokerLost(Exception):
    """The broker, or the channel in use, is gone. A publish in flight is perhaps done, perhaps not."""


class NotTaken(BrokerLost):
    """The cascade, the refused or the strays queue did not take a message that it must take."""


class Unconfirmed(BrokerLost):
    """Not all of a batch was confirmed in time.

    ``outcomes``: what is known of each of its messages, None for those that are in doubt.
    """

    def __init__(self, text: str, outcomes: Sequence[Outcome | None]) -> None:
        super().__init__(text)
        self.outcomes = outcomes


class StoreLost(Exception):
    """The store is out of reach or refused the transaction.

    Nothing of the transaction is committed; if the connection broke at the commit itself, that is in doubt.
    ``advice`` is what a person can do about it, where the cause says that; an imperative, or empty.
    """

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


class LaneLost(StoreLost):
    """The lane is somebody else's: its rows are theirs to release, and nothing may be parked into it."""


_NOT_BELIEVED: Final = re.compile("certificate.verify.failed", re.IGNORECASE)
_OTHER_HOST: Final = re.compile("hostname mismatch|ip address mismatch", re.IGNORECASE)
_NOT_NOW: Final = re.compile("has expired|not yet valid", re.IGNORECASE)
OF_BROKER: Final = "broker.ca_file", "broker.url"
OF_STORE: Final = "store.url, by sslrootcert=FILE,", "store.url"
"""The two arguments of :func:`advice` for each."""


def certificate_advice(text: str, authority: str, url: str) -> str:
    """An imperative, or nothing where ``text`` tells of something else. ``authority`` and ``url`` are what the
    configuration calls the authority's file and the server's address.

    >>> advice("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", "broker.ca_file", "broker.url")
    'say in broker.ca_file who signed the certificate: a file of PEM certificates'
    """
    if not _NOT_BELIEVED.search(text):
        return ""
    if _OTHER_HOST.search(text):
        return f"name the host in {url} that its certificate is for"
    if _NOT_NOW.search(text):
        return "renew its certificate, or set this machine's clock"
    return f"say in {authority} who signed the certificate: a file of PEM certificates"
