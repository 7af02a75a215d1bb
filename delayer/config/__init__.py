"""The configuration: flags win over the environment, the environment over the TOML file. All mistakes come at once."""

from delayer.config.errors import ConfigError, Problem
from delayer.config.loading import SYSTEM_FILE, config_file, load
from delayer.config.model import (
    Broker,
    Destination,
    Http,
    Intake,
    Log,
    Native,
    Refused,
    Retry,
    Route,
    Settings,
    Store,
    Takeover,
)
from delayer.config.values import duration_ms, duration_text
from delayer.core.secret import SecretUrl, mask

__all__ = [
    "SYSTEM_FILE",
    "Broker",
    "ConfigError",
    "Destination",
    "Http",
    "Intake",
    "Log",
    "Native",
    "Problem",
    "Refused",
    "Retry",
    "Route",
    "SecretUrl",
    "Settings",
    "Store",
    "Takeover",
    "config_file",
    "duration_ms",
    "duration_text",
    "load",
    "mask",
]
