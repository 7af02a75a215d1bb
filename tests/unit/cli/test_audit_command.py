"""`delayer audit`, with an audit that was done already: what is told, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from delayer.audit.errors import JobFailed
from delayer.audit.findings import RuleRun
from delayer.audit.job import Audited, Options
from delayer.cli import audit
from delayer.cli.main import cli
from tests.unit.audit import audit_reports


@pytest.mark.parametrize("violations", [0, 1])
@pytest.mark.parametrize(
    "unkept", [None, JobFailed("writing the findings: No space left on device")], ids=["page", "rows"]
)
def test_what_cannot_be_written_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, violations: int, unkept: JobFailed | None
) -> None:
    """The report is told all the same, and what it found wins over the failure in the exit code."""
    report = replace(audit_reports.empty(), rules=(RuleRun("segments", violations, 0),))
    monkeypatch.setattr(audit, "_run", lambda *_: Audited(report, (), unkept))
    page = [] if unkept else ["--html", str(tmp_path / ("x" * 300))]
    result = CliRunner().invoke(cli, ["audit", "--json", "--no-broker", *page], prog_name="delayer")
    assert result.exit_code == (1 if violations else 3 if unkept else 2), result.output
    assert report.to_json() in result.output
    assert ("No space left on device" if unkept else "name too long") in result.output


@pytest.mark.parametrize("option", ["--sample", "--release-rate"])
def test_an_option_without_a_number_is_refused(option: str) -> None:
    result = CliRunner().invoke(cli, ["audit", option, "nan"], prog_name="delayer")
    assert result.exit_code == 2
    assert option in result.output


ADDRESS = "postgresql://me:s3cret@h1:5432,h2:5433/db?target_session_attrs=any"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (ADDRESS, 0), ("postgresql://h1,h2:5432/db", 0), ("postgresql://me:s3cret@[::1]:5432,h2/db", 0),
        (ADDRESS.replace("5433", "54330000"), 2), (ADDRESS.replace("5433", "word"), 2),
        (ADDRESS.replace("s3cret", "s3/cret"), 2), (ADDRESS.replace("h2", "h2\n"), 2),
        (ADDRESS.replace("postgresql", "mysql"), 2),
    ],
)  # fmt: skip
def test_a_replica_of_several_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, code: int) -> None:
    asked = []

    def run(options: Options, *_: object) -> Audited:
        asked.append(options.store.reveal())
        return Audited(audit_reports.empty())

    monkeypatch.setattr(audit, "_run", run)
    given = tmp_path / "url"
    given.write_text(url)
    for option in (f"--url={url}", f"--url-file={given}"):
        result = CliRunner().invoke(cli, ["audit", "--no-broker", option], prog_name="delayer")
        assert result.exit_code == code, result.output
        assert "cret" not in result.output
    assert asked == ([url] * 2 if code == 0 else [])
