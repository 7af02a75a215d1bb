"""Generate the man pages and the shell completions of the wheel, from the commands themselves.

Hatchling calls this for every wheel, and has installed what the commands import.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from click.shell_completion import get_completion_class
from click_man.core import write_man_pages
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPLETIONS = {
    "bash": "share/bash-completion/completions/delayer",
    "zsh": "share/zsh/site-functions/_delayer",
    "fish": "share/fish/vendor_completions.d/delayer.fish",
}
SUMMARY_LENGTH = 200
"""click-man cuts a summary at 45 characters unless a command has one."""


class ManPagesAndCompletions(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._generated = TemporaryDirectory()
        target = Path(self._generated.name)
        sys.path.insert(0, self.root)
        sys.dont_write_bytecode = True
        from delayer.cli.main import cli  # noqa: PLC0415 - the path above leads to it

        for command in load(cli):
            command.help = inspect.cleandoc(command.help or "").replace("\b\n", "")
            command.short_help = command.get_short_help_str(SUMMARY_LENGTH)
        (target / "man").mkdir()
        write_man_pages("delayer", cli, version=self.metadata.version, target_dir=str(target / "man"))
        build_data["shared_data"][str(target / "man")] = "share/man/man1"
        for shell, path in COMPLETIONS.items():
            source = get_completion_class(shell)(cli, {}, "delayer", "_DELAYER_COMPLETE").source()  # type: ignore[misc]
            (target / shell).write_text(source.strip() + "\n")  # zsh reads its first line only
            build_data["shared_data"][str(target / shell)] = path

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._generated.cleanup()


def load(command: click.Command) -> Iterator[click.Command]:
    """Yield ``command`` and all commands below it. Verbs load on demand, and click-man sees loaded ones only."""
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from load(below)
