"""The configuration: flags win over the environment, the environment over the TOML file. All mistakes come at once."""

from delayer.config.errors import ConfigError, Problem
from delayer.config.loading import config_file, load
from delayer.config.model import Route, Settings
from delayer.config.values import duration_ms, duration_text

__all__ = ["ConfigError", "Problem", "Route", "Settings", "config_file", "duration_ms", "duration_text", "load"]
