"""``--help`` in place of a manual page: every verb and every option has a help text, and every example works. And
completion, as shells request it."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from delayer.cli.main import cli

DELAYER = Path(sys.executable).with_name("delayer")
EXAMPLE = re.compile(r"^ {2}(?:\w+=\S+ )*(delayer .*)$", re.MULTILINE)
SAID_BY_THE_GROUP = {"import"}
"""Groups of similar verbs: the group's help has the examples."""


def walked(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every verb with its path, the groups included."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from walked(below, (*path, name))


VERBS = dict(walked(cli))
EXAMPLES = [
    (path, re.split(r" {2,}| \| | && | > ", example)[0])
    for path, verb in VERBS.items()
    for example in EXAMPLE.findall(inspect.cleandoc(verb.help or ""))
]


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_verb_and_every_option_has_a_help_text(path: tuple[str, ...]) -> None:
    verb = VERBS[path]
    assert verb.help
    assert verb.get_short_help_str(limit=100).endswith((".", ":"))
    for option in verb.params:
        if isinstance(option, click.Option):
            assert option.help, option.opts
            assert not option.hidden, option.opts
    if not isinstance(verb, click.Group) and path[0] not in SAID_BY_THE_GROUP:
        assert [one for one in EXAMPLES if one[0] == path], "no examples"


@pytest.mark.parametrize(("path", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_every_example_can_be_given(path: tuple[str, ...], example: str) -> None:
    """The command line parses all of it, and it belongs to the verb whose help shows it."""
    words = shlex.split(example)[1:]
    command: click.Command = cli
    context = cli.make_context("delayer", words)
    found: tuple[str, ...] = ()
    while isinstance(command, click.Group):
        name, below, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert below is not None
        assert name is not None
        context = below.make_context(name, rest, parent=context)
        command, found = below, (*found, name)
    assert found[: len(path)] == path


# ---- completion


def told(instruction: str, **words: str) -> str:
    """The output for a shell, from this process: `_DELAYER_COMPLETE` is the whole interface."""
    result = CliRunner().invoke(cli, env={"_DELAYER_COMPLETE": instruction, **words}, prog_name="delayer")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    assert f"_DELAYER_COMPLETE={shell}_complete" in told(f"{shell}_source")

    def asked(words: str) -> str:
        *before, last = words.split(" ")
        at = last if shell == "fish" else str(len(before))
        return told(f"{shell}_complete", COMP_WORDS=words, COMP_CWORD=at)

    for verb in VERBS[("held",)].commands:  # type: ignore[attr-defined]
        assert verb in asked("delayer held ")
    assert "celery" in asked("delayer import cascade run --kind ")


def test_bash_loads_the_completion() -> None:
    script = f'eval "$(_DELAYER_COMPLETE=bash_source {shlex.quote(str(DELAYER))})" && complete -p delayer'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" delayer\n")
