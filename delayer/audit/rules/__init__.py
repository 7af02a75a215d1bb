"""The audit's rules: pure functions over rows and aggregates, the same in plain Python and in Spark.

model     messages, segments, tallies, and how tallies combine
counting  the keys that a message is counted under; the bounded part of all tallies that is handed on
checks    what can be wrong, and the findings
judge     from the merged tallies to the report

docs/backlog.md says what each rule means, and what is a violation.
"""
