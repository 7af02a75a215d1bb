"""The workflows and hooks run what .ci/run and the Makefile run, on every Python that pyproject.toml names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]


WORKFLOWS = {
    path.stem: yaml.load(path.read_text(), yaml.BaseLoader) for path in (ROOT / ".github" / "workflows").glob("*.yml")
}  # BaseLoader, because YAML 1.1 takes the key "on" for true.


def jobs() -> dict[str, Any]:
    """All jobs of all workflows, by name."""
    return {name: job for workflow in WORKFLOWS.values() for name, job in workflow["jobs"].items()}


def commands(only: Collection[str] = WORKFLOWS) -> set[str]:
    """All commands of these workflows, one for each value of the matrix."""
    found = set()
    for job in (job for name in only for job in WORKFLOWS[name]["jobs"].values()):
        matrix = job.get("strategy", {}).get("matrix", {})
        for values in product(*matrix.values()):
            for step in job["steps"]:
                command = step.get("run", "")
                for name, value in zip(matrix, values, strict=True):
                    command = command.replace("${{ matrix.%s }}" % name, value)  # noqa: UP031 - braces
                found.add(command)
    return found


def test_the_workflows_run_every_part_of_the_build_server() -> None:
    (parts,) = re.findall(r"\|\| parts=\((.*)\)", (ROOT / ".ci" / "run").read_text())
    started = {one for one in commands() if one.startswith(".ci/run")}
    assert started == {f".ci/run {part}" for part in [*parts.split(), "simulate", "bench"]}


def test_only_an_operator_starts_the_part_that_cannot_fail() -> None:
    started = {name for name in WORKFLOWS if ".ci/run bench" in commands([name])}
    assert [list(WORKFLOWS[name]["on"]) for name in started] == [["workflow_dispatch"]]


def test_the_jobs_cache_the_versions_of_constraints_txt() -> None:
    for job in WORKFLOWS["tests"]["jobs"].values():
        [cache] = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/cache@")]
        assert "hashFiles('constraints.txt')" in cache["key"]


def test_the_workflows_make_targets_that_exist() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = {one.removeprefix("make ") for one in commands() if one.startswith("make ")}
    assert made
    assert made <= set(targets)


def test_the_workflows_run_every_supported_python() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = {one.split()[-1] for one in classifiers if re.search(r":: 3\.\d+$", one)}
    assert set(jobs()["fast"]["strategy"]["matrix"]["python"]) == supported


def test_the_hooks_before_a_commit_are_the_checks_of_make_lint() -> None:
    hooks = [
        hook
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
    ]
    (recipe,) = re.findall(r"^lint: dev\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    linted = [line.strip("\t@").replace("$(PYTHON_OF_VENV)", ".venv/bin/python") for line in recipe.splitlines()]
    assert [hook["entry"] for hook in hooks] == [line.removesuffix(" .") for line in linted]


def test_issue_forms_and_dependabot_are_yaml() -> None:
    for path in [*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".github" / "dependabot.yml"]:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
