"""The command line for every test here."""

from __future__ import annotations

from tests.integration.cli import delayer

__all__ = ["delayer"]
