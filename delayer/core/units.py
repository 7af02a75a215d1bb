"""Units of time in milliseconds."""

from typing import Final

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 86_400_000
LONGEST_DURATION_MS: Final = 36_500 * DAY_MS
"""The longest duration that delayer reads."""
LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999. Some stores, and some programs that read them, reject later times."""
