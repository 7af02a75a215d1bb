"""The audit's rules: pure functions over rows and aggregates, the same in plain Python and in Spark.

counting     which keys a message is counted under         ┐
tally        what is counted, and how tallies combine      │ over all rows, on executors
summary      what of that is handed on: a bounded part     ┘
judge        from what was counted to the report           ┐
conservation, segments, overdue, repeats, keys, calendar   ┘ on the driver

docs/backlog.md says what each rule means, and what is a violation.
"""
