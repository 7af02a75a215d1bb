"""`delayer audit` with a finished audit: its output and its exit code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from delayer.audit.findings import RuleRun
from delayer.audit.job import Audited
from delayer.cli import audit
from delayer.cli.main import cli
from tests.unit.audit import audit_reports


@pytest.mark.parametrize("violations", [0, 1])
def test_a_failed_page_hides_no_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, violations: int) -> None:
    """The command still prints the report, and violations decide the exit code before the failure."""
    report = replace(audit_reports.empty(), rules=(RuleRun("segments", violations, 0),))
    monkeypatch.setattr(audit, "_quick", lambda *_: Audited(report))
    page = str(tmp_path / ("x" * 300))
    result = CliRunner().invoke(cli, ["audit", "--json", "--no-broker", "--html", page], prog_name="delayer")
    assert result.exit_code == (1 if violations else 2), result.output
    assert report.to_json() in result.output
    assert "name too long" in result.output


def test_options_of_the_deep_audit_are_refused_without_it() -> None:
    result = CliRunner().invoke(cli, ["audit", "--sample", "0.5", "--conf", "a=b"], prog_name="delayer")
    assert (result.exit_code, "--sample, --conf: expected --deep" in result.output) == (2, True), result.output


@pytest.mark.parametrize("option", ["--sample", "--release-rate"])
def test_an_option_without_a_number_is_refused(option: str) -> None:
    result = CliRunner().invoke(cli, ["audit", option, "nan"], prog_name="delayer")
    assert result.exit_code == 2
    assert option in result.output
