"""What to do about a server's certificate that was not believed, by what OpenSSL says of it. Pure."""

from __future__ import annotations

import re
from typing import Final

_NOT_BELIEVED: Final = re.compile("certificate.verify.failed", re.IGNORECASE)
_OTHER_HOST: Final = re.compile("hostname mismatch|ip address mismatch", re.IGNORECASE)
_NOT_NOW: Final = re.compile("has expired|not yet valid", re.IGNORECASE)
BROKER: Final = "broker.ca_file", "broker.url"
STORE: Final = "store.url, by sslrootcert=FILE,", "store.url"
"""The two arguments of :func:`advice` for each."""


def advice(text: str, authority: str, url: str) -> str:
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
