"""`delayer audit`: options that it refuses, and its report in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from delayer.cli.audit import tell
from delayer.cli.main import cli
from tests.unit.audit import audit_reports


def test_options_of_the_deep_audit_are_refused_without_it() -> None:
    result = CliRunner().invoke(cli, ["audit", "--sample", "0.5", "--conf", "a=b"], prog_name="delayer")
    assert (result.exit_code, "--sample, --conf: expected --deep" in result.output) == (2, True), result.output


def test_the_results_of_a_sample_are_refused(tmp_path: Path) -> None:
    arguments = ["audit", "--deep", "--sample", "0.5", "--results", str(tmp_path / "audits")]
    result = CliRunner().invoke(cli, arguments, prog_name="delayer")
    assert (result.exit_code, "Next: omit --sample" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "--results", "s3://b/a"),
        ("audit", "--html", "s3://b/a"),
        ("backlog", "export", "s3://b/a"),
        ("export", "s3://b/a"),
    ],
)
def test_a_url_as_a_place_on_this_machine_is_quoted_unchanged(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, arguments, prog_name="delayer")
    assert result.exit_code == 2, result.output
    assert 'expected a path on this machine, found a URL: "s3://b/a"' in result.output


@pytest.mark.parametrize("option", ["--sample", "--release-rate"])
def test_an_option_without_a_number_is_refused(option: str) -> None:
    result = CliRunner().invoke(cli, ["audit", option, "nan"], prog_name="delayer")
    assert result.exit_code == 2
    assert option in result.output


def test_a_piped_report_has_no_blanks_at_the_ends_of_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    tell(audit_reports.full(), as_json=False)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "1 violation: Conservation"
    assert told[-1].startswith("✗ 9 violations, 15 warnings")
    assert [line for line in told if line != line.rstrip()] == []
