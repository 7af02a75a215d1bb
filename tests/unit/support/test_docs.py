"""Tests and pages that the documentation names exist, and its page of frameworks names evidence for each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FRAMEWORKS = ROOT / "tests" / "acceptance" / "frameworks"
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / ".github").glob("*.md"), ROOT / "README.md"], key=str)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_test_named_on_a_page_exists(page: Path) -> None:
    for name, test in re.findall(r"`(tests/[\w/.]*)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / name).exists(), name
        if test:
            assert f"def {test}(" in (ROOT / name).read_text(), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_linked_page_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("where", ["delayer", "config", "systemd", "migrations"])
def test_every_page_that_a_message_names_exists(where: str) -> None:
    """Each in the form that `delayer --help` explains, and with the section after it."""
    for file in (ROOT / where).rglob("*.*"):
        if file.suffix not in (".py", ".html", ".sql", ".toml", ".yml", ".yaml", ".service", ".timer", ".j2"):
            continue
        text = re.sub(r"['\"]?\n\s*['\"]?", "", file.read_text())
        for page in re.findall(r"\bdocs/([\w-]+\.md)", text):
            assert (ROOT / "docs" / page).is_file(), (file, page)
        for page, section in re.findall(r'docs/([\w-]+\.md), ?"([^"]+)"', text):
            assert section in (ROOT / "docs" / page).read_text().replace("`", ""), (file, page, section)


@pytest.mark.parametrize(
    "name",
    [
        *("Wolverine", "MassTransit", "EasyNetQ", "Spring AMQP", "NestJS", "Moleculer"),
        *("Laravel", "Symfony Messenger", "Celery", "Dramatiq", "taskiq", "Foundatio"),
    ],
)
def test_every_framework_was_run_or_its_source_was_read(name: str) -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    found = re.search(rf"\n## {name}\n\n(Run by the test|Source read): (.*?\d\.\d.*)\n", page)
    assert found is not None
    is_run, versions = found[1] == "Run by the test", re.findall(r"\d+\.\d+\.\d+", found[2])
    assert f'("{name}", "' in (ROOT / "tests/acceptance/test_frameworks.py").read_text() or not is_run
    assert re.search(rf"\n\| \[{name}\]\(#.*{versions[0]}.*\| {'test' if is_run else 'source read'} \|\n", page)
    if is_run and name != "Symfony Messenger":  # which is Debian's
        pinned = (FRAMEWORKS / "requirements.txt").read_text() + (FRAMEWORKS / "package.json").read_text()
        assert all(version in pinned for version in versions)
