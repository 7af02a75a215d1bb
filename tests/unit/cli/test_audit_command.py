"""`delayer audit`: options that it refuses."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from delayer.cli.main import cli


def test_options_of_the_deep_audit_are_refused_without_it() -> None:
    result = CliRunner().invoke(cli, ["audit", "--sample", "0.5", "--conf", "a=b"], prog_name="delayer")
    assert (result.exit_code, "--sample, --conf: expected --deep" in result.output) == (2, True), result.output


@pytest.mark.parametrize("option", ["--sample", "--release-rate"])
def test_an_option_without_a_number_is_refused(option: str) -> None:
    result = CliRunner().invoke(cli, ["audit", option, "nan"], prog_name="delayer")
    assert result.exit_code == 2
    assert option in result.output
