"""Recurring schedules as values: when their messages are due, what these are, and what a stopped daemon missed. Pure:
no module reads a clock. ``cron`` reads expressions with cronsim; all else needs only the standard library."""
