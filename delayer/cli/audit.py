"""delayer audit: check that every message that arrived was delivered or is still stored, and when the rest are due."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from delayer.cli.errors import ExitCode, Misused
from delayer.cli.options import (
    LocalPath,
    Stoppable,
    as_json,
    check_package,
    check_remote,
    conf_option,
    master_option,
    remote_option,
    request_of,
    store_url,
)
from delayer.cli.output import note, progress
from delayer.core.secret import SecretUrl
from delayer.store.admin.stats import restored_ms

if TYPE_CHECKING:
    from delayer.audit.findings import AuditReport
    from delayer.audit.job import Options


def _finite(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Reject NaN, which passes every range check because no comparison with it holds."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"expected a number, found {value}")
    return value


@click.command(cls=Stoppable, short_help="Check that nothing is missing, and show the forecast.")
@click.option(
    "--deep",
    is_flag=True,
    help="Read every message and unpack every segment, by Spark, which needs Java. Goes with --sample, --work, "
    "--master, --remote and --conf.",
)
@click.option(
    "--sample",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    callback=_finite,
    metavar="SHARE",
    help="Read only this share of the store, such as 0.01. The audit then does not check totals and duplicates.",
)
@as_json
@click.option(
    "--html", type=LocalPath(path_type=Path, dir_okay=False), metavar="FILE", help="Write the report as a page."
)
@click.option(
    "--results",
    type=LocalPath(path_type=Path),
    metavar="DIR",
    help="Append a row for each rule to the Parquet files in DIR, on this machine (docs/tables.md). Needs the extra "
    "`segments`.",
)
@click.option(
    "--release-rate",
    type=click.FloatRange(0, min_open=True),
    callback=_finite,
    metavar="N",
    help="The measured release rate, messages a second. The audit uses it to calculate how long peaks last.",
)
@click.option("--no-broker", is_flag=True, help="Do not check the destinations on the broker.")
@click.option(
    "--work",
    metavar="DIR",
    help="The directory for the extract and for Spark's shuffles: about 200 bytes a message. A cluster (spark://…, "
    "sc://…) needs it for the extract: a directory, or a URL such as hdfs://…, that all machines share. Its shuffles "
    "go to SPARK_LOCAL_DIRS of its workers. [default: on this machine, the system's directory for temporary files]",
)
@master_option
@remote_option
@conf_option
@click.pass_context
def audit(
    context: click.Context,
    /,
    *,
    as_json: bool,
    html: Path | None,
    results: Path | None,
    deep: bool,
    no_broker: bool,
    master: str | None,
    remote: SecretUrl | None,
    conf: dict[str, str],
    **given: Any,
) -> None:
    """Check a snapshot of the store by the rules of docs/backlog.md, and show when messages are due.

    Without --deep it takes seconds: it reads counters, indexes, headers of segments and a sample of rows, and the
    report lists what it did not check. Daemons may keep running. The audit does not change the store or the broker, and
    does not publish messages.

    Exit code 1 if a rule is violated (or the store's schema has another version). Exit code 3 if the store is
    unreachable, Java is missing, or Spark failed.

    \b
    Examples:
      delayer audit
      delayer audit --html backlog.html --results /srv/audits
      delayer --set store.url_file=/etc/delayer/replica.url audit --json
      delayer audit --deep
      delayer audit --deep --sample 0.01 --no-broker
      delayer audit --deep --master spark://cluster:7077 --work hdfs://cluster/tmp
      delayer audit --deep --remote sc://cluster:15002 --work hdfs://cluster/tmp
    """
    from delayer.audit.job import Options  # noqa: PLC0415 - only this verb needs it

    of_spark = {**given, "master": master, "remote": remote, "conf": conf or None}
    names = ("sample", "work", "master", "remote", "conf")
    alone = [f"--{name}" for name in names if of_spark[name] not in (None, 1.0)]
    if alone and not deep:
        raise Misused(f"{', '.join(alone)}: expected --deep with it")
    if results is not None and given["sample"] < 1:
        raise Misused("--results: expected the whole store, because its rows do not tell a sample. Next: omit --sample")
    if remote is not None:
        check_remote(remote, master)
        if given["work"] is None:
            raise Misused("--remote: expected --work with it, a directory or URL of the server and its executors")
    settings = request_of(context).settings()
    options = Options(
        store=SecretUrl(store_url(settings)),
        broker=None if no_broker else SecretUrl(settings.broker_url),
        management=settings.broker.management_url,
        restored_ms=restored_ms(settings.store.restore_ahead_ms),
        own_rules=settings.audit.rules,
        paced={route.from_.encode(): route.max_rate for route in settings.routes if route.max_rate},
        **{name: value for name, value in given.items() if value is not None},
    )
    if html is not None and not html.parent.is_dir():
        raise Misused(f"--html {html}: there is no directory {html.parent}")
    if results is not None:
        _check_results(results)
    report = _run(options, master, remote, conf, deep=deep)
    tell(report, as_json=as_json)
    written = [html is None or _write_page(report, html)]
    written.append(results is None or _append_results(report, results, options.store))
    context.exit(ExitCode.FOUND if report.violations else ExitCode.DONE if all(written) else ExitCode.USAGE)


def _check_results(directory: Path) -> None:
    check_package("pyarrow", "segments")
    from delayer.audit import dataset, results  # noqa: PLC0415 - pyarrow

    try:
        results.check(directory)
    except dataset.Unfit as error:
        raise Misused(f"--results {error}") from error


def _append_results(report: AuditReport, directory: Path, store: SecretUrl) -> bool:
    """Return whether the results were written."""
    from delayer.audit import dataset, results  # noqa: PLC0415 - pyarrow

    try:
        results.append(directory, report, store)
    except dataset.DatasetNotWritten as error:
        note(f"delayer: --results {error}")
        return False
    return True


def _write_page(report: AuditReport, page: Path) -> bool:
    """Return whether the page was written."""
    from delayer.audit import report_html  # noqa: PLC0415

    try:
        report_html.write(report, page)
    except OSError as error:
        note(f"delayer: --html {page}: {error.strerror}")
        return False
    return True


def _run(
    options: Options, master: str | None, remote: SecretUrl | None, conf: dict[str, str], *, deep: bool
) -> AuditReport:
    if not deep:
        from delayer.audit import quick  # noqa: PLC0415

        with progress("reading"):
            return quick.run(options)
    from delayer.audit import job, spark, tasks  # noqa: PLC0415
    from delayer.audit.remote import job_session  # noqa: PLC0415

    if remote is None:
        spark.check_machine()
        spark.check_work(master, options.work)
    job.check(options)
    tasks.step_back()
    with progress() as say, job_session("delayer audit", master, remote, conf, work=options.work) as session:
        return job.run(session, options, say)


def tell(report: AuditReport, *, as_json: bool) -> None:
    if as_json:
        click.echo(report.to_json())
        return
    from delayer.audit import report_console  # noqa: PLC0415

    console = Console(highlight=False)
    if console.is_terminal:
        report_console.show(report, console)
        return
    console.width = 160
    with console.capture() as told:
        report_console.show(report, console)
    for line in told.get().splitlines():  # rich pads each line to the width of its table
        click.echo(line.rstrip())
