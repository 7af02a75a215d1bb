"""What stands behind the ``?`` of the store's URL. The driver looks at it when it connects, and would say of a mistake
that the store is out of reach; it says of few which one it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from delayer.settings.errors import show

_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_VERIFIED: Final = ("verify-ca", "verify-full")
_ONE_OF: Final = {
    "sslmode": _SSL_MODES,
    "target_session_attrs": ("any", "primary", "standby", "prefer-standby", "read-write", "read-only"),
    "sslnegotiation": ("postgres", "direct"),
    "ssl_min_protocol_version": ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"),
    "ssl_max_protocol_version": ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"),
}
_OUR_FILES, _THEIR_FILES = ("sslcert", "sslkey"), ("sslrootcert", "sslcrl")
_OWN_ROOT: Final = ".postgresql/root.crt"


def mistakes(url: str, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """What was expected and what was found, for each mistake."""
    query = urlsplit(url).query
    if urlsplit(url).netloc.count("@") > 1:  # the driver takes the host to begin behind the first
        return [("a URL in which an @ of user or password is written %40", "another one (not shown)")]
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        return [("a URL with name=value pairs, joined by &, behind its ?", "something else (not shown)")]
    found = [
        (f"{name} to be {', '.join(values[:-1])} or {values[-1]}", show(given[name]))
        for name, values in _ONE_OF.items()
        if given.get(name) and given[name] not in values
    ]
    mode = given.get("sslmode")
    strict = mode in (*_VERIFIED, "require")
    read = () if mode in ("disable", None) else (*_OUR_FILES, *(_THEIR_FILES if strict else ()))
    for name in read:
        if given.get(name) and (why := _unreadable(Path(given[name]))):
            found.append((f"{name} to be a file that can be read", f"{show(given[name])}: {why}"))
    if mode in _VERIFIED and not (given.get("sslrootcert") or environ.get("PGSSLROOTCERT") or _has_own_root()):
        found.append((f"sslrootcert, who signed the server's certificate, beside sslmode={mode}", "none"))
    return found


def _has_own_root() -> bool:
    try:
        return not _unreadable(Path.home() / _OWN_ROOT)
    except RuntimeError:  # there is no home
        return False


def _unreadable(file: Path) -> str:
    try:
        with file.open("rb"):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__
