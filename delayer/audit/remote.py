"""A job's session on a Spark Connect server, and its progress. A client has no JVM, so this needs no Java.

The server has its own settings: a job may only change those of its session. It runs our data source and tasks, so it
needs delayer[spark] in its Python. They carry the store's URL as pickles, which Spark does not show.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from delayer.audit import spark as sessions
from delayer.audit import tasks
from delayer.audit.errors import JobFailed, JobMisused
from delayer.core.readable import Say
from delayer.core.secret import SecretUrl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STATIC: Final = ("CANNOT_MODIFY_STATIC_CONFIG", "CANNOT_MODIFY_CONFIG")
"""Spark's conditions for a setting that a session may not change."""
PORT: Final = 15002
"""Spark's default."""
ANSWER_SECONDS: Final = 30.0
"""How long a server may take to answer as gRPC does. Spark's client would try again for ten minutes."""


def place_of(remote: SecretUrl) -> str:
    """Return host and port of ``sc://HOST:PORT/;token=…``. Raises JobMisused."""
    url = urlsplit(remote.reveal().partition(";")[0])
    try:
        host, port = url.hostname, url.port or PORT
    except ValueError:
        host, port = None, PORT
    if url.scheme != "sc" or not host or url.username or url.path not in ("", "/"):
        raise JobMisused("--remote: expected sc://HOST:PORT, with any parameters after /;")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def session(remote: SecretUrl, more: Mapping[str, str]) -> Iterator[SparkSession]:
    """Open a session, and release it on exit. ``more``: settings. Raises JobImpossible, JobMisused, JobFailed,
    StoreLost."""
    sessions.check_packages("grpc")
    place = place_of(remote)
    sessions.check_reachable(f"Spark Connect's server {place}", [place], "--remote")
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.sql.connect.session import SparkSession as Connected  # noqa: PLC0415

    accepting = f"Spark Connect's server {place} accepts no session"
    try:
        _check_answer(remote, place)
        spark: Any = Connected.builder.remote(remote.reveal()).create()
    except PySparkException as error:
        if str(error.getCondition()).startswith("INVALID_"):  # Its text may quote a parameter, such as a token.
            raise JobMisused("--remote: expected parameters as KEY=VALUE after /;, with = in a value as %3D") from None
        raise tasks.failure(accepting, tasks.told_by(error)) from None
    try:
        with tasks.translated(accepting):
            version = spark.version
        if int(version.partition(".")[0]) < 4:
            raise JobMisused(f"--remote: expected Spark 4.0 or later, found {version}")
        for key, value in {**sessions.OF_SESSIONS, **more}.items():
            try:
                spark.conf.set(key, value)
            except PySparkException as error:
                if key in more and error.getCondition() in _STATIC:
                    raise JobMisused(f"--conf {key}: expected a setting of sessions; set it on the server") from None
                raise tasks.failure(accepting, tasks.told_by(error)) from None
        with tasks.translated("Spark"):
            yield spark
    finally:
        spark.stop()


def _check_answer(remote: SecretUrl, place: str) -> None:
    """Raise JobFailed unless the server speaks gRPC. Called before there is a session, which PySpark would try to
    release for ten minutes as Python exits."""
    import grpc  # noqa: PLC0415 - needs the extra
    from pyspark.sql.connect.client import DefaultChannelBuilder  # noqa: PLC0415

    builder = DefaultChannelBuilder(remote.reveal())
    _ = builder.session_id  # Raises if it is wrong; the session would, but later.
    with builder.toChannel() as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_SECONDS)
        except grpc.FutureTimeoutError:
            raise JobFailed(
                f"{place} answers, but not as Spark Connect. Next: check the port of --remote ({PORT} by default; 7077 "
                "is the master's), and whether it takes TLS (use_ssl=true) with a certificate that this machine trusts"
            ) from None


@contextmanager
def job_session(
    name: str,
    master: str | None,
    remote: SecretUrl | None,
    more: Mapping[str, str],
    *,
    work: str | None = None,
    handing_out: bool = False,
) -> Iterator[SparkSession]:
    """Open a session on a server (``remote``), or else as :func:`audit.spark.session` does. Raises as both do."""
    if remote is not None:
        opened = session(remote, more)
    else:
        opened = sessions.session(name, master=master, work=work, more=more, handing_out=handing_out)
    with opened as spark:
        _silence_pyspark()
        yield spark


def _silence_pyspark() -> None:
    """Keep the plans of wrong queries off stderr, 10 kB each: PySpark logs errors that it also raises."""
    from pyspark.logger import PySparkLogger  # noqa: PLC0415

    for context in ("SQL", "DataFrame"):
        PySparkLogger.getLogger(f"{context}QueryContextLogger").disabled = True


class OperationWatcher:
    """A :class:`tasks.StageWatcher` for a Spark Connect server, which reports the tasks of one query at a time."""

    def __init__(self, spark: SparkSession, say: Say) -> None:
        self._spark: Any = spark
        self._say = say

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Raises as :func:`tasks.translated` does."""

        def look(stages: Any = None, **_: object) -> None:
            known = list(stages or ())
            self._say(name, sum(one.num_completed_tasks for one in known), sum(one.num_tasks for one in known))

        self._say(name, 0, 0)
        self._spark.registerProgressHandler(look)
        try:
            with tasks.translated(name):
                yield
        except BaseException:
            # Running tasks hold connections, and would write to a workplace that is being removed.
            cancelling = threading.Thread(target=self.cancel, args=(name,), daemon=True)
            cancelling.start()
            cancelling.join(5.0)
            raise
        finally:
            self._spark.removeProgressHandler(look)

    def cancel(self, _name: str) -> None:
        """End the block of this name: its query fails."""
        from pyspark.errors import PySparkException  # noqa: PLC0415

        with suppress(PySparkException):  # The server may be gone.
            self._spark.interruptAll()
