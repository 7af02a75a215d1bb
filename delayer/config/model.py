"""The configuration as one frozen tree. The aliases are the keys of the file; durations are ``…_ms`` integers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationInfo,
    field_validator,
)

from delayer.config import values
from delayer.config.errors import Expected, format_found
from delayer.core.cascade import Cascade
from delayer.core.counters import MOST_ROUTES
from delayer.core.delay_sources import DEFAULT_FORMS, FORMS, source_of
from delayer.core.secret import SecretUrl, SecretUrls

# pydantic's search for plugins reads every package's metadata, and a plugin would see URLs with passwords.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

URL_FILE = "write the whole URL into the file; until then its last URL is used"
log = logging.getLogger(__name__)  # Not structlog, which loads slowly.

DEFAULT_BROKER_URL = "amqp://guest:guest@localhost:5672/"
DEFAULT_STORE_URL = "postgresql://localhost/delayer"


class Table(BaseModel):
    """A table of the file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True)


class UrlTable(Table):
    """A table with ``url``, or with the file that holds it."""

    url: SecretUrl | None = None
    url_file: values.Path | None = None
    _last: SecretUrl | None = PrivateAttr(default=None)
    _reason: str | None = PrivateAttr(default=None)

    def current(self, read: Callable[[object], SecretUrl]) -> SecretUrl | None:
        """Return ``url``, or the URL now in ``url_file``, because its password may have changed. While the file is
        missing, or has no URL of this virtual host or database, returns the last URL that it had, and logs each new
        reason."""
        if self.url_file is not None:
            before, self._reason = self._reason, None
            try:
                found = read(Path(self.url_file).read_text("utf-8").strip())
                if self.url is not None and values.within(found.reveal()) != values.within(self.url.reveal()):
                    raise Expected("a URL of the same virtual host or database; another one needs a restart")
                self._last = found
            except OSError as error:
                self._reason = error.strerror or "expected a file that can be read"
            except ValueError as error:  # The text of other errors shows bytes of the file.
                self._reason = f"expected {error}" if isinstance(error, Expected) else "expected UTF-8"
            if self._reason not in (None, before):
                log.warning(
                    "url file not used", extra={"file": self.url_file, "reason": self._reason, "next_step": URL_FILE}
                )
        return self._last or self.url


class BrokerTable(UrlTable):
    url: values.BrokerUrls = SecretUrls(DEFAULT_BROKER_URL)
    ca_file: values.Path | None = None
    cert_file: values.Path | None = None
    key_file: values.Path | None = None
    verify: StrictBool = True
    heartbeat_ms: values.HeartbeatMs = Field(default=10_000, alias="heartbeat")
    management_url: values.ManagementUrl = None

    @field_validator("key_file")
    @classmethod
    def _key_needs_certificate(cls, key_file: str | None, info: ValidationInfo) -> str | None:
        if key_file and info.data.get("cert_file", "") is None:
            raise Expected("cert_file with key_file")
        return key_file


class IntakeTable(Table):
    queue: values.QueueName = "delays"
    queue_type: Literal["quorum", "classic"] = "quorum"
    consumers: Literal["one", "shared"] = "one"
    prefetch: Annotated[StrictInt, Field(ge=1, le=65_535)] = 5_000
    give_back_after_ms: values.GiveBackMs = Field(default=480_000, alias="give_back_after")
    max_delay_ms: values.DurationMs = Field(default=3650 * 86_400_000, alias="max_delay")


def _delay_forms(value: object) -> tuple[str, ...]:
    wanted = f"a list of {FORMS}, each at most once"
    if not isinstance(value, list | tuple):
        raise Expected(wanted)
    for at, one in enumerate(value):
        try:
            source_of(str(one))
        except ValueError:
            raise Expected(f"{wanted} ({format_found(one)} is none of them)") from None
        if one in value[:at]:
            raise Expected(f"{wanted} ({format_found(one)} is there twice)")
    return tuple(value)


class RetryTable(Table):
    """The rules by which a route's dead letters return to their queues."""

    first_ms: values.DurationMs = Field(default=5_000, alias="first")
    factor: Annotated[StrictFloat, Field(ge=1, le=100)] = 2.0
    longest_ms: values.DurationMs = Field(default=3_600_000, alias="max")
    jitter: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.1
    attempts: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 10
    exhausted: values.QueueName

    @field_validator("longest_ms")
    @classmethod
    def _not_less_than_first(cls, longest_ms: int, info: ValidationInfo) -> int:
        if longest_ms < info.data.get("first_ms", 0):
            raise Expected("a duration that is not less than first")
        return longest_ms


class RouteTable(Table):
    """The rules for messages from the exchange ``from_``; ``""`` means those sent straight to the intake queue."""

    from_: values.ExchangeName = Field(alias="from")
    to: values.ExchangeName = ""
    routing_key: values.RoutingKey = ""
    routing_key_header: values.RoutingKey = ""
    delay_from: Annotated[tuple[str, ...], BeforeValidator(_delay_forms)] = DEFAULT_FORMS
    default_delay_ms: values.DurationMs = Field(default=0, alias="default_delay")
    require_delay: StrictBool = False
    allow_exchanges: tuple[values.ExchangeName, ...] = ()
    exchange_from_reply_to: StrictBool = False
    key_from: values.KeyFrom = ""
    late_limit_ms: values.Limit = Field(default=None, alias="late_limit")
    late_action: Literal["deliver", "hold"] = "deliver"
    max_rate: Annotated[StrictInt, Field(ge=0, le=1_000_000)] = 0
    retry: RetryTable | None = None

    @field_validator("retry")
    @classmethod
    def _alone(cls, retry: RetryTable | None, info: ValidationInfo) -> RetryTable | None:
        others = {*cls.model_fields} - {"from_", "delay_from", "late_limit_ms", "late_action", "max_rate", "retry"}
        if retry is not None and (found := [name for name in sorted(others) if info.data.get(name)]):
            raise Expected(f"no {found[0].removesuffix('_ms')} with it: dead letters go back to their queue")
        return retry

    @field_validator("to")
    @classmethod
    def _not_in_a_circle(cls, to: str, info: ValidationInfo) -> str:
        if to and to == info.data.get("from_"):
            raise Expected("an exchange other than the route's own from: due messages would come in again forever")
        return to

    @field_validator("require_delay")
    @classmethod
    def _no_default(cls, require: bool, info: ValidationInfo) -> bool:
        if require and info.data.get("default_delay_ms"):
            raise Expected("no default_delay with it: the route refuses the messages that would get one")
        return require

    @field_validator("late_action")
    @classmethod
    def _late_needs_limit(cls, action: str, info: ValidationInfo) -> str:
        if action == "hold" and info.data.get("late_limit_ms", 0) is None:
            raise Expected('late_limit with late_action = "hold": how late is too late')
        return action


SAMPLE_ROUTE: dict[str, Any] = {"from": "delayer.in", "to": "delayer.out"}


class TakeoverTable(Table):
    """The levels of another system's cascade that the daemon empties into the store."""

    cascade: Literal["nservicebus-v2", "nservicebus-v1", "celery"]
    levels_from: Annotated[StrictInt, Field(ge=0, le=27)] = 6
    prefix: values.Prefix = ""

    @field_validator("prefix")
    @classmethod
    def _of_celerys_names(cls, prefix: str, info: ValidationInfo) -> str:
        try:
            Cascade(info.data.get("cascade", "celery"), owner=prefix)
        except ValueError:
            raise Expected('none, or with cascade = "celery" a short one of letters, digits and -_.:') from None
        return prefix


class DestinationTable(Table):
    """An exchange with a queue bound to it, which delayer declares for its users."""

    exchange: values.ExchangeName = ""
    type: Literal["topic", "direct", "fanout"] = "topic"
    queue: values.AnyQueue = ""
    queue_type: Literal["quorum", "classic"] = "quorum"
    keys: tuple[values.RoutingKey, ...] = ()


class NativeTable(Table):
    prefix: values.Prefix = "delayer."
    due_queue: values.DueQueue = "delays.due"
    strategy: Literal["auto", "cascade", "queue"] = "auto"


class StoreTable(UrlTable):
    """``url`` is None if no store is configured; see :attr:`Settings.store_url`."""

    url: values.StoreUrl | None = None
    park_beyond_ms: values.DurationMs = Field(default=0, alias="park_beyond")
    lanes: Annotated[StrictInt, Field(ge=1, le=64)] = 4
    restore_ahead_ms: values.RestoreAheadMs = Field(default=86_400_000, alias="restore_ahead")
    history_days: Annotated[StrictInt, Field(ge=0, le=400)] = 0


class RefusedTable(Table):
    queue: values.QueueName = "delays.refused"


class HttpTable(Table):
    """``tokens_file``: see config/tokens.py. Without a token the page is read-only. Away from loopback, reading needs a
    token too, unless the page is ``open``. ``metrics_listen`` serves only health and metrics."""

    listen: values.Listen = "127.0.0.1:9419"
    metrics_listen: values.Listen = ""
    metrics_routes: Annotated[StrictInt, Field(ge=0, le=10_000)] = MOST_ROUTES
    label: values.Label = ""
    open: StrictBool = False
    tokens_file: values.Path | None = None

    @field_validator("metrics_listen")
    @classmethod
    def _of_its_own(cls, metrics_listen: str, info: ValidationInfo) -> str:
        if metrics_listen and metrics_listen == info.data.get("listen"):
            raise Expected('an address other than listen, which serves metrics too; "" for none')
        return metrics_listen


class AuditRuleTable(Table):
    """A user's rule for ``delayer audit --deep`` (docs/backlog.md). ``sql`` selects a subject, id and due_ms."""

    name: values.RuleName
    sql: values.RuleSql
    severity: Literal["warning", "violation"] = "warning"
    next: values.Label = ""


class AuditTable(Table):
    rules: tuple[AuditRuleTable, ...] = Field(default=(), alias="rule")


class LogTable(Table):
    format: Literal["auto", "json", "console"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(Table):
    """Everything that can be set. Built once, by :func:`delayer.config.load`, or in tests by ``model_validate``."""

    mode: Literal["native", "store"] = "store"
    broker: BrokerTable = BrokerTable()
    intake: IntakeTable = IntakeTable()
    routes: tuple[RouteTable, ...] = Field(default=(RouteTable.model_validate(SAMPLE_ROUTE),), alias="route")
    takeovers: tuple[TakeoverTable, ...] = Field(default=(), alias="takeover")
    destinations: tuple[DestinationTable, ...] = Field(default=(), alias="destination")
    native: NativeTable = NativeTable()
    store: StoreTable = StoreTable()
    refused: RefusedTable = RefusedTable()
    http: HttpTable = HttpTable()
    log: LogTable = LogTable()
    audit: AuditTable = AuditTable()

    @property
    def broker_url(self) -> str:
        """The broker's URLs, separated by commas, with ``[broker]``'s TLS files and heartbeat as parameters, which
        those in a URL override. Use them for one attempt to connect, because ``url_file`` is read each time. They
        contain the password, so never print them."""
        urls = self.broker.current(values.broker_urls) or self.broker.url
        return ",".join(map(self._completed, urls.reveal().split(",")))

    def _completed(self, url: str) -> str:
        parts = urlsplit(url)
        ours = {"heartbeat": str(self.broker.heartbeat_ms // 1000)}
        if parts.scheme == "amqps":
            files = {"cafile": self.broker.ca_file, "certfile": self.broker.cert_file, "keyfile": self.broker.key_file}
            ours |= {name: file for name, file in files.items() if file}
            if not self.broker.verify:
                ours["verify"] = "false"
        query = {**ours, **dict(parse_qsl(parts.query, keep_blank_values=True))}
        return parts._replace(query=urlencode(query, quote_via=quote)).geturl()

    @property
    def store_url(self) -> str | None:
        """The store's URL with its password, for one attempt to connect; None without a store. Native mode has a store
        only if a URL is set."""
        url = self.store.current(values.store_url)
        if url is not None:
            return url.reveal()
        return DEFAULT_STORE_URL if self.mode == "store" else None

    @property
    def management_url(self) -> str | None:
        """The URL of the broker's management API, with its password, or None."""
        return self.broker.management_url.reveal() if self.broker.management_url else None
