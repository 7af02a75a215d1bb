"""Configuration: defaults < TOML file < environment < flags, merged raw, typed once, every mistake named at once."""

from delayer.settings.errors import ConfigError, Problem
from delayer.settings.loading import SYSTEM_FILE, config_file, load
from delayer.settings.model import (
    DELAY_FORMS,
    Broker,
    Http,
    Intake,
    Log,
    Native,
    Refused,
    Route,
    Settings,
    Store,
)
from delayer.settings.secret import SecretUrl, mask
from delayer.settings.values import duration_ms, duration_text

__all__ = [
    "DELAY_FORMS",
    "SYSTEM_FILE",
    "Broker",
    "ConfigError",
    "Http",
    "Intake",
    "Log",
    "Native",
    "Problem",
    "Refused",
    "Route",
    "SecretUrl",
    "Settings",
    "Store",
    "config_file",
    "duration_ms",
    "duration_text",
    "load",
    "mask",
]
