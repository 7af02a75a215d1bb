"""The store's URL as the ADBC driver's libpq reads it; asyncpg, which the rest uses, takes more than libpq. Pure."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

CONNECT_SECONDS: Final = 10
NO_TIMEOUT: Final = (
    "SELECT set_config(name, '0', {}) FROM pg_settings WHERE name = 'transaction_timeout'"  # since Postgres 17
)

# Parameters that both understand. What asyncpg does not know it sets in the session, and so does libpq by "options".
_SHARED: Final = (
    "host port user password passfile dbname service servicefile connect_timeout client_encoding options"
    " application_name fallback_application_name keepalives keepalives_idle keepalives_interval keepalives_count"
    " tcp_user_timeout sslmode sslcert sslkey sslpassword sslrootcert sslcrl sslcrldir sslsni requirepeer"
    " ssl_min_protocol_version ssl_max_protocol_version gssencmode krbsrvname gsslib target_session_attrs"
    " channel_binding"
)
_KNOWN: Final = frozenset(_SHARED.split())
_OTHERWISE: Final = {"database": "dbname"}


def url(store_url: str, application: str) -> str:
    """``store_url`` for libpq, with our name and deadlines where it has none of its own. Holds the password."""
    base, _, query = store_url.partition("?")  # put together again, a URL without a host would lose a slash
    ours = {
        "application_name": application,
        "connect_timeout": str(CONNECT_SECONDS),
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
    }
    settings = []
    for given, value in parse_qsl(query, keep_blank_values=True):
        key = _OTHERWISE.get(given, given)
        if key in _KNOWN:
            ours[key] = value
        else:
            settings.append(f"-c {key}={_escaped(value)}")
    if settings:
        ours["options"] = " ".join([*([ours["options"]] if "options" in ours else []), *settings])
    return f"{base}?{urlencode(ours, quote_via=quote)}"


def _escaped(value: str) -> str:
    """One word for the server's parser of options."""
    return value.replace("\\", "\\\\").replace(" ", "\\ ")
