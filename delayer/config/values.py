"""The types of configuration values, each with the sentence that states the expected form. Durations are read from
strings like ``"250ms"`` into whole milliseconds."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator

from delayer.amqp.values import SHORT_STRING
from delayer.config.errors import Expected
from delayer.core.cascade import ADDRESS_BYTES, NAME_BYTES, Cascade, bindable
from delayer.core.delay_sources import HEADER
from delayer.core.secret import SecretUrl, SecretUrls
from delayer.core.store_hosts import hosts_of, names_of, parameters_of
from delayer.core.units import LONGEST_DURATION_MS

UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_ESCAPES = "characters like / @ : # in a password are written %2F %40 %3A %23"
DURATION = r"([0-9]{1,15})(ms|s|m|h|d)"


def duration_ms(value: object) -> int:
    """Parse a duration like "0s", "250ms", "10s", "5m", "12h" or "3650d" into milliseconds. Raises Expected."""
    wanted = 'a duration in whole numbers such as "250ms", "10s", "5m", "12h" or "30d"'
    if isinstance(value, int | float) and not isinstance(value, bool):
        bare = f' (a bare number has no unit: write "{value:g}s" or "{value:g}ms")' if abs(value) < 1e15 else ""
        raise Expected(f"{wanted}{bare}")
    if isinstance(value, str) and re.fullmatch("[0-9]{1,15}", value):
        raise Expected(f'{wanted} (a bare number has no unit: write "{value}s" or "{value}ms")')
    match = re.fullmatch(DURATION, value.strip()) if isinstance(value, str) else None
    if match is None:
        negative = isinstance(value, str) and value.strip().startswith("-")
        raise Expected(wanted.replace("numbers", "numbers, not negative,", 1) if negative else wanted)
    amount_ms = int(match[1]) * UNITS_MS[match[2]]
    if amount_ms > LONGEST_DURATION_MS:
        raise Expected("a duration of at most 36500d")
    return amount_ms


def _heartbeat_ms(value: object) -> int:
    amount_ms = duration_ms(value)
    if amount_ms % 1000 or amount_ms > 65_535_000:
        raise Expected('whole seconds from "0s" (off) to "65535s"')
    return amount_ms


def _duration_from(lowest: str, why: str = "") -> BeforeValidator:
    def read(value: object) -> int:
        amount_ms = duration_ms(value)
        if amount_ms < duration_ms(lowest):
            raise Expected(f'a duration of at least "{lowest}"{why}')
        return amount_ms

    return BeforeValidator(read)


def _short_string(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Expected(what)
    if len(value.encode("utf-8", "surrogatepass")) > SHORT_STRING:
        raise Expected(f"{what} of at most {SHORT_STRING} bytes")
    if not value.isprintable():
        # RabbitMQ silently removes line ends from names, so the queue or exchange would have another name.
        raise Expected(f"{what} without control characters")
    return value


def _named(what: str) -> BeforeValidator:
    return BeforeValidator(partial(_short_string, what=what))


def _queue(value: object) -> str:
    name = _short_string(value, "the name of a queue")
    if not name or name.startswith("amq."):
        raise Expected(
            'the name of a queue: not empty, and not beginning with "amq.", which the broker keeps for itself'
        )
    return name


def _key_from(value: object) -> str:
    wanted = '"message_id", "correlation_id", "header:NAME", or "" for none'
    text = _short_string(value, wanted)
    if text in ("", "message_id", "correlation_id") or (text.startswith(HEADER) and text != HEADER):
        return text
    raise Expected(wanted)


def _due_queue(value: object) -> str:
    name = _queue(value)
    if not bindable(name.encode("utf-8", "surrogatepass")):
        # The name follows the digits of the cascade's routing keys, and a binding key contains it.
        raise Expected(f"the name of a queue of at most {ADDRESS_BYTES} bytes, none of its words * or #")
    return name


def _any_queue(value: object) -> str:
    return _queue(value) if value else _short_string(value, 'the name of a queue, or "" for none')


def _prefix(value: object) -> str:
    try:
        return Cascade(prefix=_short_string(value, "a prefix")).prefix
    except ValueError:
        most = NAME_BYTES - len("delay-delivery")
        raise Expected(f'a prefix of at most {most} letters, digits and -_.:, not beginning with "amq."') from None


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise Expected("a text without control characters")
    return value


def _matching(pattern: str, what: str) -> BeforeValidator:
    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise Expected(what)
        return value

    return BeforeValidator(read)


def listen_address(value: object) -> str:
    """Check ``host:port`` (``[::1]:port`` for IPv6), or empty for no listener. Raises Expected."""
    wanted = '"host:port" (IPv6 as "[::1]:port"), or "" for none'
    if not isinstance(value, str):
        raise Expected(wanted)
    if not value:
        return value
    host, colon, port = value.rpartition(":")
    try:
        host.encode("idna")  # The resolver does the same, and its UnicodeError would crash the daemon.
    except UnicodeError:
        raise Expected(wanted) from None
    bracketed = host.startswith("[") and host.endswith("]") and len(host) > 2
    if not colon or not host or (":" in host and not bracketed) or not re.fullmatch("[0-9]{1,5}", port):
        raise Expected(wanted)
    if int(port) > 65_535:
        raise Expected(f"{wanted}, the port at most 65535")
    return value


def is_port(text: str) -> bool:
    return re.fullmatch("[0-9]{1,5}", text) is not None and 0 < int(text) <= 65_535


def _url(value: object, schemes: tuple[str, ...], example: str) -> SecretUrl:
    if isinstance(value, SecretUrl):
        return value
    wanted = f"a URL like {example}"
    if not isinstance(value, str):
        raise Expected(wanted)
    try:
        parts = urlsplit(value)
    except ValueError:
        raise Expected(f"{wanted}; {_ESCAPES}") from None
    _, at, place = parts.netloc.rpartition("@")
    _, _, port_text = place.rpartition(":")
    if at and re.fullmatch(r"[^:]+:[0-9]+|\[[^]]*\]:[0-9]+", place) and not is_port(port_text):
        # The port follows user and password, so it cannot be part of a password.
        raise Expected(f"{wanted}; a port is a number from 1 to 65535")
    try:
        port = parts.port
    except ValueError:
        # urllib's error quotes parts of the URL, perhaps of its password.
        raise Expected(f"{wanted}; {_ESCAPES}") from None
    if "@" in parts.path + parts.fragment or ("@" in parts.query and ("@" in parts.netloc or "amqp" in schemes)):
        # A bare /, # or ? ended user and password early. A client would use the text after their @ as the host.
        raise Expected(f"{wanted}; {_ESCAPES}; so is an @ behind the host, %40")
    if not value.isprintable() or " " in value:
        raise Expected(f"{wanted}, without blanks and control characters; in a password they are written %20 and so on")
    if parts.scheme not in schemes or "://" not in value or port == 0:
        raise Expected(wanted)
    return SecretUrl(value)


def broker_url(value: object) -> SecretUrl:
    """Check a broker URL. Raises Expected, as do the next three functions."""
    url = _url(value, ("amqp", "amqps"), "amqp://user:password@host:5672/vhost, or amqps:// for TLS")
    if "/" in urlsplit(url.reveal()).path[1:]:
        raise Expected('a URL with one virtual host at its end; a "/" in its name, or in the password, is written %2F')
    return url


def within(url: str) -> str:
    """The virtual host or the database of a URL, or of the first of several; "/" for the default.

    >>> within("amqp://a,amqp://b/x"), within("amqp://a/%2f"), within("postgresql://a,b/a%2Db?user=c")
    ('/', '/', 'a-b')
    """
    return unquote(urlsplit(re.split(",amqps?://", url)[0]).path[1:]) or "/"


def broker_urls(value: object) -> SecretUrl:
    """One URL, or those of several addresses of one broker, in a list or separated by commas."""
    if isinstance(value, SecretUrl):
        return value
    if isinstance(value, str) and value.lstrip().startswith("["):  # A flag, or the environment, has lists as JSON.
        try:
            value = json.loads(value)
        except ValueError:
            raise Expected("a list of URLs in JSON, or URLs separated by commas") from None
    given = value if isinstance(value, list | tuple) else value.split(",") if isinstance(value, str) else [value]
    comma = "; a comma in a URL is written %2C" if isinstance(value, str) and len(given) > 1 else ""
    try:
        urls = [broker_url(one.strip() if isinstance(one, str) else one).reveal() for one in given]
    except Expected as wrong:
        raise Expected(f"{wrong}{comma}") from None
    if not urls or any("," in url for url in urls):
        raise Expected("a URL, or a list of URLs, in which a comma is written %2C")
    if len(set(map(within, urls))) > 1:
        raise Expected("URLs of one broker, with the same virtual host")
    return SecretUrls(",".join(urls))


def store_url(value: object) -> SecretUrl:
    check = partial(_url, schemes=("postgresql", "postgres"), example="postgresql://user:password@host:5432/database")
    if isinstance(value, str):
        with suppress(ValueError):  # Otherwise the check of the whole URL names the mistake.
            for one in hosts_of(value):  # urllib reads the ports of several hosts as one.
                check(one)
            return _listed(SecretUrl(value))
    return _listed(check(value))


def _listed(url: SecretUrl) -> SecretUrl:
    """Check a list of hosts."""
    names = names_of(url.reveal())
    if len(names) > 1 and not all(name.partition(":")[0] for name in names):
        # The driver would connect to a server on this machine.
        raise Expected("a URL in which each of several hosts has a name")
    if len(names) > 1 and not parameters_of(url.reveal()).get("target_session_attrs"):
        # The first answer is taken, and that of a slow primary comes after its standby's.
        raise Expected("a URL of several hosts with target_session_attrs=primary behind its ?")
    return url


def management_url(value: object) -> SecretUrl | None:
    if value in ("", None):
        return None
    return _url(value, ("http", "https"), 'http://user:password@host:15672, or ""')


Limit = Annotated[int | None, BeforeValidator(lambda value: None if value in ("", None) else duration_ms(value))]
DurationMs = Annotated[int, BeforeValidator(duration_ms)]
GiveBackMs = Annotated[int, _duration_from("1s")]
HeartbeatMs = Annotated[int, BeforeValidator(_heartbeat_ms)]
# The daemon checks for segments once a minute, and restores them one after another.
RestoreAheadMs = Annotated[int, _duration_from("5m", ": what is restored later would be late")]
ExchangeName = Annotated[str, _named("the name of an exchange")]
RoutingKey = Annotated[str, _named("a routing key")]
KeyFrom = Annotated[str, BeforeValidator(_key_from)]
QueueName = Annotated[str, BeforeValidator(_queue)]
DueQueue = Annotated[str, BeforeValidator(_due_queue)]
AnyQueue = Annotated[str, BeforeValidator(_any_queue)]
Prefix = Annotated[str, BeforeValidator(_prefix)]
Path = Annotated[str, BeforeValidator(_text)]
RuleName = Annotated[str, _matching("[a-z0-9][a-z0-9-]{0,59}", "a name of at most 60 small letters, digits and dashes")]
RuleSql = Annotated[str, _matching(r"(?s).*\S.*", "a SELECT of Spark SQL with the columns subject, id and due_ms")]
Label = Annotated[str, _named("a label")]
Listen = Annotated[str, BeforeValidator(listen_address)]
BrokerUrls = Annotated[SecretUrl, BeforeValidator(broker_urls)]
StoreUrl = Annotated[SecretUrl, BeforeValidator(store_url)]
ManagementUrl = Annotated[SecretUrl | None, BeforeValidator(management_url)]
