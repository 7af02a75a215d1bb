"""The mutants, by name: one line of the program, what it is broken into, and the tests that must notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Mutant(NamedTuple):
    """``text`` stands ``times`` times in ``file``, and each is replaced. ``tests``: files or node ids, of which one
    test at least must fail."""

    name: str
    file: str
    text: str
    replacement: str
    tests: Sequence[str]
    times: int = 1


MUTANTS: Sequence[Mutant] = (
    Mutant(
        "drop-empty-looks-once",
        "delayer/store/rows/partitions.py",
        '                return False\n            await connection.execute(f"DROP',
        '                pass\n            await connection.execute(f"DROP',
        ["tests/integration/test_store_mutants.py::test_a_row_that_comes_in_while_its_partition_is_dropped_stays"],
    ),
    Mutant(
        "park-fence-without-share",
        "delayer/store/sql/count_parked.sql",
        " FOR SHARE)",
        ")",
        ["tests/integration/test_store_mutants.py::test_a_park_locks_the_epoch_until_its_commit"],
    ),
    Mutant(
        "commit-does-not-wait",
        "delayer/store/pool.py",
        '        "synchronous_commit": "on",',
        '        "synchronous_commit": "off",',
        ["tests/integration/test_store_mutants.py::test_commits_wait_for_the_disk_whatever_is_set_for_the_database"],
    ),
    Mutant(
        "claim-50-ms-early",
        "delayer/store/sql/claim.sql",
        "due_at <= statement_timestamp()",
        "due_at <= statement_timestamp() + interval '50 ms'",
        ["tests/conformance/test_store.py::TestPostgresStore::test_a_claim_leaves_what_is_due_a_moment_later"],
        times=2,
    ),
    Mutant(
        "export-without-partition-locks",
        "delayer/store/admin/exporting.py",
        "await connection.execute(_KEEP_PARTITIONS)",
        "pass",
        ["tests/integration/test_export_snapshot.py::test_partitions_stay_until_the_export_ends"],
    ),
    Mutant(
        "export-without-snapshot",
        "delayer/store/admin/exporting.py",
        'async with connection.transaction(isolation="repeatable_read", readonly=True):',
        "if True:",
        ["tests/integration/test_export_snapshot.py::test_concurrent_changes_leave_no_message_out_of_an_export"],
    ),
    Mutant(
        "import-replaces-what-waits",
        "delayer/store/admin/importing.py",
        "elif parcel.key in taken:",
        "elif False:",
        ["tests/integration/test_import_jsonl.py::test_a_waiting_message_wins_over_an_imported_one_of_its_key"],
    ),
    Mutant(
        "import-says-nothing-of-superseded",
        "delayer/store/admin/importing.py",
        "            if superseded:\n",
        "            if False:\n",
        ["tests/integration/test_import_jsonl.py::test_a_waiting_message_wins_over_an_imported_one_of_its_key"],
    ),
    Mutant(
        "import-of-a-cut-file",
        "delayer/imports/files.py",
        "elif self.counted and sum(self._ends) != self._messages:",
        "elif False:",
        ["tests/integration/test_import_jsonl.py::test_files_that_are_none"],
    ),
    Mutant(
        "import-makes-damage-sound",
        "delayer/imports/files.py",
        "NOT_SOUND.after(found.held)",
        "found.held",
        ["tests/integration/test_import_jsonl.py::test_damaged_records_are_held"],
    ),
    Mutant(
        "key-locks-without-bound",
        "delayer/store/rows/keys.py",
        "crc32(key) % LOCKS",
        "crc32(key) % (1 << 31)",
        ["tests/integration/test_lock_need.py::test_a_park_takes_few_locks_for_many_keys"],
    ),
    Mutant(
        "released-key-forgets-the-newer",
        "delayer/store/rows/keys.py",
        '"DELETE FROM message_key WHERE key = ANY($1) AND id = ANY($2)", keys, ids',
        '"DELETE FROM message_key WHERE key = ANY($1) AND $2::bigint[] IS NOT NULL", keys, ids',
        ["tests/integration/test_store_mutants.py::test_a_released_message_does_not_take_the_key_of_a_newer_one"],
    ),
    Mutant(
        "segment-digest-not-compared",
        "delayer/store/segments/codec.py",
        "if not hmac.compare_digest(found, digest):",
        "if False:",
        ["tests/unit/store/test_segments_codec.py"],
    ),
    Mutant(
        "segment-count-not-compared",
        "delayer/store/segments/codec.py",
        "if len(table) != messages:",
        "if False:",
        ["tests/unit/store/test_segments_codec.py"],
    ),
    Mutant(
        "segment-checksum-not-compared",
        "delayer/store/segments/codec.py",
        '    if found != expected:\n        raise SegmentBroken(f"expected the checksum',
        '    if False:\n        raise SegmentBroken(f"expected the checksum',
        ["tests/unit/store/test_segments_codec.py"],
    ),
    Mutant(
        "segment-metadata-not-compared",
        "delayer/store/segments/codec.py",
        '    if found != expected:\n        raise SegmentBroken(f"expected the metadata',
        '    if False:\n        raise SegmentBroken(f"expected the metadata',
        ["tests/unit/store/test_segments_codec.py"],
    ),
    Mutant(
        "copy-without-the-epoch",
        "delayer/store/segments/codec.py",
        "POSTGRES_EPOCH_US if name in _INSTANTS else 0",
        "POSTGRES_EPOCH_US + 1 if name in _INSTANTS else 0",
        ["tests/unit/store/test_copying.py"],
    ),
    Mutant(
        "keyed-rows-are-compacted",
        "delayer/store/sql/lock_run.sql",
        " AND key IS NULL",
        "",
        ["tests/integration/test_store_segments.py"],
    ),
    Mutant(
        "restored-segment-stays",
        "delayer/store/segments/catalog.py",
        'await connection.execute("DELETE FROM segment WHERE id = $1", segment["id"])',
        "pass",
        ["tests/integration/test_store_segments.py"],
    ),
    Mutant(
        "checksum-without-lengths",
        "delayer/store/rows/envelope.py",
        "crc32(exchange, crc32(lengths))",
        "crc32(exchange)",
        ["tests/unit/store/test_envelope.py"],
    ),
    Mutant(
        "damage-heals-by-moving",
        "delayer/store/rows/envelope.py",
        "values[1] ^ 1",
        "values[1]",
        ["tests/unit/store/test_envelope.py"],
    ),
    Mutant(
        "future-format-is-sound",
        "delayer/store/rows/envelope.py",
        "version == FORMAT and ",
        "",
        ["tests/unit/store/test_envelope.py"],
    ),
    Mutant(
        "retry-pause-does-not-grow",
        "delayer/core/backoff.py",
        "FIRST_MS << min(attempts - 1, 16)",
        "FIRST_MS",
        ["tests/unit/core/test_hold.py"],
    ),
    Mutant(
        "clock-without-drift",
        "delayer/store/clock.py",
        "lower=sample.server_ms + (shortest - DRIFT * abs(shortest)) * 1000",
        "lower=sample.server_ms + shortest * 1000",
        ["tests/unit/store/test_clock.py"],
    ),
    Mutant(
        "clock-rounds-down",
        "delayer/store/clock.py",
        "math.ceil(self._bounds().upper)",
        "math.floor(self._bounds().upper)",
        ["tests/unit/store/test_clock.py"],
    ),
    Mutant(
        "delay-rounds-down",
        "delayer/core/delay_headers.py",
        "return math.ceil(Decimal(value))",
        "return math.floor(Decimal(value))",
        ["tests/unit/core/test_delay.py"],
    ),
    Mutant(
        "hold-forgets-doubt",
        "delayer/core/hold.py",
        "may_be_delivered=self.may_be_delivered or earlier.may_be_delivered",
        "may_be_delivered=self.may_be_delivered",
        ["tests/unit/core/test_hold.py"],
    ),
    Mutant(
        "hold-forgets-isolation",
        "delayer/core/hold.py",
        "isolated=self.isolated or earlier.isolated",
        "isolated=self.isolated",
        ["tests/unit/core/test_hold.py"],
    ),
    Mutant(
        "late-message-is-retried",
        "delayer/core/hold.py",
        "return None if self.for_a_person else again_ms",
        "return again_ms",
        ["tests/unit/core/test_hold.py"],
    ),
    Mutant(
        "due-by-the-later-clock",
        "delayer/core/plan.py",
        "now_ms if now_lower_ms is None else now_lower_ms)",
        "now_ms)",
        ["tests/unit/core/test_plan.py"],
    ),
    Mutant(
        "token-bucket-has-no-bottom",
        "delayer/core/rate_limit.py",
        "taken = min(wanted, int(self._tokens))",
        "taken = wanted",
        ["tests/unit/core/test_rate_limit.py"],
    ),
    Mutant(
        "cascade-loses-dead-letters",
        "delayer/core/cascade.py",
        '"x-dead-letter-strategy": "at-least-once"',
        '"x-dead-letter-strategy": "at-most-once"',
        ["tests/unit/core/test_cascade.py"],
    ),
    Mutant(
        "cascade-drops-when-full",
        "delayer/core/cascade.py",
        '"x-overflow": "reject-publish"',
        '"x-overflow": "drop-head"',
        ["tests/unit/core/test_cascade.py"],
    ),
    Mutant(
        "ack-before-the-oldest",
        "delayer/intake/consume.py",
        "self._order[0] in self._accepted",
        "self._accepted",
        ["tests/unit/intake/test_consume.py"],
    ),
    Mutant(
        "returned-counts-as-confirmed",
        "delayer/amqp/channel.py",
        "outcomes[position] = returned",
        "pass",
        ["tests/unit/amqp/test_confirms.py"],
    ),
    Mutant(
        "nacked-counts-as-confirmed",
        "delayer/amqp/channel.py",
        "outcomes[position] = NACKED",
        "pass",
        ["tests/unit/amqp/test_confirms.py"],
    ),
    Mutant(
        "deaths-stay-in-headers",
        "delayer/amqp/edits.py",
        '_REMOVED: Final = SAID | _COUNTED | {b"x-death", ID, DUE}',
        "_REMOVED: Final = SAID | _COUNTED | {ID, DUE}",
        ["tests/unit/amqp/test_edits.py"],
    ),
    Mutant(
        "delay-keeps-its-sign",
        "delayer/amqp/edits.py",
        "replace=_turned(properties),",
        "replace={},",
        ["tests/unit/amqp/test_edits.py"],
    ),
    Mutant(
        "any-host-is-ours",
        "delayer/http/access.py",
        "return is_loopback(name)",
        "return True",
        ["tests/unit/http/test_access.py"],
    ),
    Mutant(
        "any-origin-may-post",
        "delayer/http/access.py",
        'return site in ("same-origin", "none")',
        "return True",
        ["tests/unit/http/test_access.py"],
    ),
    Mutant(
        "breaker-opens-for-no-longer",
        "delayer/broker/circuit_breaker.py",
        "first * 2.0 ** min(failures - 1, 10)",
        "first",
        ["tests/unit/broker/test_circuit_breaker.py"],
    ),
    Mutant(
        "cursor-from-the-later-clock",
        "delayer/store/lanes/lane.py",
        "    before = clock.now_lower_ms()",
        "    before = clock.now_upper_ms()",
        ["tests/integration/test_store_mutants.py::test_the_next_owner_begins_no_later_than_the_stores_clock"],
    ),
)
