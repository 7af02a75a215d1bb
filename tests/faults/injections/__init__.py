"""Faults that break a fleet and heal it again: one coroutine for each kind, which returns when the fault is over.

A fault that had to wait first returns the instant at which it began, in epoch milliseconds.

Each checks that it broke something, and raises Missed otherwise: a fault without an effect proves nothing.
"""
