"""See core/secret.py, which processes of Spark's import without all of the settings."""

from __future__ import annotations

from delayer.core.secret import Secret, SecretUrl, concealed, mask

__all__ = ["Secret", "SecretUrl", "concealed", "mask"]
