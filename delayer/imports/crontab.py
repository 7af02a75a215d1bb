"""Translates a crontab into schedules. Pure.

A command becomes the body of a message, for a consumer that runs it. The text after the first ``%``, cron's standard
input, is the header ``x-cron-stdin``, and the user of a system's crontab is ``x-cron-user``. ``CRON_TZ`` and
``RANDOM_DELAY`` (cronie) apply to the lines after them. cron does not repeat what it missed, so ``catch_up`` is skip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from delayer.amqp.properties import Properties, changed, encode_headers, entry, long_string
from delayer.core.delay_headers import quote_value
from delayer.core.message import Target
from delayer.core.units import MINUTE_MS
from delayer.imports.translation import Translation
from delayer.schedule.cron import MACROS
from delayer.schedule.rhythm import Cron
from delayer.schedule.schedule import SKIP, Schedule
from delayer.schedule.wall import UnknownZone, check_zone

_VARIABLE: Final = re.compile(r"""\s*(["']?)(?P<name>\w+)\1\s*=\s*(["']?)(?P<value>.*?)\3\s*""", re.ASCII)
_PERCENT: Final = re.compile(r"(?<!\\)%")
_PROGRAM: Final = re.compile(r"(?:\w+=\S*\s+)*(?:\S*/)?([^\s/;&|]+)")
_PLAIN: Final = b"\x0atext/plain"


@dataclass(slots=True)
class _Crontab:
    """The state from line to line."""

    result: Translation
    target: Target
    zone: str
    is_system: bool
    jitter_ms: int = 0

    def read(self, where: str, line: str) -> None:
        text = line.strip()
        if not text or text.startswith("#"):
            return
        if variable := _VARIABLE.fullmatch(line):
            self._set(where, variable["name"], variable["value"])
            return
        count = (1 if text.startswith("@") else 5) + self.is_system
        words = text.split(None, count)
        if len(words) <= count:
            form = "a time, a user and a command" if self.is_system else "a time and a command"
            self.result.refuse(where, f"expected {form}, found {quote_value(text)}")
            return
        self._add(where, words[: count - self.is_system], words[-2] if self.is_system else None, words[-1])

    def _set(self, where: str, name: str, value: str) -> None:
        if name == "CRON_TZ":
            self.zone = value  # Even if it is none: then the lines after it are left out.
            try:
                check_zone(value)
            except UnknownZone as wrong:
                self.result.refuse(where, f"CRON_TZ: {wrong}")
        elif name == "RANDOM_DELAY" and re.fullmatch("[0-9]{1,4}", value):
            self.jitter_ms = int(value) * MINUTE_MS
        else:
            self.result.refuse(
                where, f"{name}={quote_value(value)}: a message has no environment; set it in the consumer"
            )

    def _add(self, where: str, times: list[str], user: str | None, command: str) -> None:
        macro = times[0].lower()
        if macro == "@reboot":
            self.result.refuse(
                where, "@reboot: a start of a host is no time; run the command from a service of the host"
            )
            return
        expression = MACROS.get(macro, " ".join(times))
        body, *rest = (part.replace("\\%", "%") for part in _PERCENT.split(command))
        headers = {b"x-cron-user": user, b"x-cron-stdin": "".join(f"{part}\n" for part in rest) or None}
        table = b"".join(entry(name, long_string(_raw(text))) for name, text in headers.items() if text is not None)
        program = _PROGRAM.match(body)
        self.result.add(
            where,
            Schedule(
                self.result.new_id(),
                self.result.name_like(program[1] if program else body),
                self.target,
                Cron(expression, self.zone),
                changed(Properties.parse(encode_headers(table)), {"content_type": _PLAIN}),
                _raw(body.rstrip()),
                catch_up=SKIP,
                jitter_ms=self.jitter_ms,
            ),
        )


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def translate_crontab(result: Translation, text: str, target: Target, *, zone: str, is_system: bool) -> None:
    """Add the lines of a crontab to ``result``. ``zone``: that of the host. ``is_system``: whether each line names a
    user, as in /etc/crontab and /etc/cron.d."""
    crontab = _Crontab(result, target, zone, is_system)
    for number, line in enumerate(text.split("\n"), start=1):
        crontab.read(f"line {number}", line)
