"""The mutants, by name: one line of the program, its broken version, and the tests that must fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Mutant(NamedTuple):
    """``text`` occurs ``times`` times in ``file``, and each is replaced. ``tests``: files or node ids, of which at
    least one test must fail."""

    name: str
    file: str
    text: str
    replacement: str
    tests: Sequence[str]
    times: int = 1


def of(file: str, test: str, *mutants: tuple[str, str, str], times: int = 1) -> Iterator[Mutant]:
    """The mutants of one file: name, text and replacement of each. ``test`` must notice all of them."""
    for name, text, replacement in mutants:
        yield Mutant(name, file, text, replacement, [test], times)


MUTANTS: Sequence[Mutant] = (
    *of(
        "delayer/store/lanes/lane.py",
        "tests/integration/test_schedules.py::test_a_release_writes_the_next_occurrence",
        ("occurrence-not-noted", "            self.cursor.note_parked(min(dues))\n", ""),
    ),
    *of(
        "delayer/store/lanes/settling.py",
        "tests/integration/test_schedules.py::test_a_held_occurrence_does_not_stop_the_next",
        ("held-occurrence-keeps-its-key", "_replace(key=None)", "_replace()"),
    ),
    *of(
        "delayer/store/schedules/occurrences.py",
        "tests/integration/test_schedules.py",
        ("expired-for-all-policies", "and is_expired(record.schedule, record.waiting_ms, now_ms)", ""),
        ("occurrence-of-any-id", "one = by_id[record.waiting_id]", "one = over[-1]"),
        ("rejected-occurrence-fails-all", "if len(planned) > 1:", "if not planned:"),
    ),
    *of(
        "delayer/store/sql/lock_run.sql",
        "tests/integration/test_schedules.py::test_compaction_leaves_occurrences_alone",
        ("occurrences-are-compacted", "key IS NULL OR", "true OR"),
    ),
    *of(
        "delayer/store/admin/actions.py",
        "tests/integration/test_schedules.py::test_a_rescheduled_occurrence_is_an_ordinary_message_and_the_next_one_waits",
        ("rescheduled-occurrence-keeps-its-key", "await connection.execute(_UNKEY", "_ = (_UNKEY"),
    ),
    *of(
        "delayer/store/schedules/changes.py",
        "tests/integration/test_schedules.py::test_changes_and_releases_at_once",
        ("change-without-cancel", "await keys.cancel_waiting(connection, used)", "keys.Cancelled()"),
    ),
    *of(
        "delayer/store/schedules/changes.py",
        "tests/integration/test_schedules_zones.py",
        ("older-zone-data-are-forgotten", 'COLLATE "C" > $1', 'COLLATE "C" < $1'),
    ),
    *of(
        "delayer/store/schedules/zones.py",
        "tests/integration/test_schedules_zones.py",
        ("zone-data-do-not-catch-up", "min(version, self.loaded or version)", "version"),
        ("older-daemons-are-not-asked", "and await _oldest_alive(connection, version, owner) < version", ""),
        ("older-daemons-are-forgotten", "await _oldest_alive(connection, version, owner), mark", "version, mark"),
    ),
    *of(
        "delayer/store/rows/partitions.py",
        "tests/integration/test_store_mutants.py::test_a_row_that_comes_in_while_its_partition_is_dropped_stays",
        (
            "drop-empty-looks-once",
            '                return False\n            await connection.execute(f"DROP',
            '                pass\n            await connection.execute(f"DROP',
        ),
    ),
    *of(
        "delayer/store/sql/count_parked.sql",
        "tests/integration/test_store_mutants.py::test_a_park_locks_the_epoch_until_its_commit",
        ("park-fence-without-share", " FOR SHARE)", ")"),
    ),
    *of(
        "delayer/store/pool.py",
        "tests/integration/test_store_sessions.py::test_sessions_override_the_settings_of_the_database",
        ("commit-does-not-wait", '        "synchronous_commit": "on",', '        "synchronous_commit": "off",'),
    ),
    *of(
        "delayer/store/sql/claim.sql",
        "tests/conformance/test_releases.py::test_a_claim_leaves_rows_due_after_its_window",
        ("claim-takes-two-windows", "+ $6 * interval", "+ 2 * $6 * interval"),
        times=2,
    ),
    *of(
        "delayer/store/admin/exporting.py",
        "tests/integration/test_export_snapshot.py::test_partitions_stay_until_the_export_ends",
        ("export-without-partition-locks", "await connection.execute(_KEEP_PARTITIONS)", "pass"),
    ),
    *of(
        "delayer/store/admin/exporting.py",
        "tests/integration/test_export_snapshot.py::test_concurrent_changes_leave_no_message_out_of_an_export",
        (
            "export-without-snapshot",
            'async with connection.transaction(isolation="repeatable_read", readonly=True):',
            "if True:",
        ),
    ),
    *of(
        "delayer/store/admin/importing.py",
        "tests/integration/test_import_jsonl.py::test_a_waiting_message_wins_over_an_imported_one_of_its_key",
        ("import-replaces-a-waiting-message", "if key is not None and (key in taken or id_ in used):", "if False:"),
        ("import-says-nothing-of-superseded", "            if superseded:\n", "            if False:\n"),
    ),
    *of(
        "delayer/imports/files.py",
        "tests/integration/test_import_jsonl.py::test_missing_and_cut_files_are_reported",
        ("import-of-a-cut-file", "elif self.counted and sum(ends) != messages:", "elif False:"),
    ),
    *of(
        "delayer/imports/files.py",
        "tests/integration/test_import_jsonl.py::test_damaged_records_are_held",
        ("import-makes-damage-sound", "NOT_SOUND.after(found.held)", "found.held"),
    ),
    *of(
        "delayer/store/rows/keys.py",
        "tests/integration/test_lock_need.py::test_a_park_takes_few_locks_for_many_keys",
        ("key-locks-without-bound", "crc32(key) % LOCKS", "crc32(key) % (1 << 31)"),
    ),
    *of(
        "delayer/store/rows/keys.py",
        "tests/integration/test_store_mutants.py::test_a_released_message_does_not_take_the_key_of_a_newer_one",
        (
            "released-key-forgets-the-newer",
            '"DELETE FROM message_key WHERE key = ANY($1) AND id = ANY($2)", keys, ids',
            '"DELETE FROM message_key WHERE key = ANY($1) AND $2::bigint[] IS NOT NULL", keys, ids',
        ),
    ),
    *of(
        "delayer/core/operations.py",
        "tests/conformance/test_key_modes.py",
        (
            "keep-yields-to-a-cancelled-message",
            "parcel.key in self.joining and parcel.key in waiting",
            "parcel.key in waiting",
        ),
        (
            "each-message-begins-a-burst",
            "(now_ms if first_ms is None else first_ms) + ceiling_ms",
            "now_ms + ceiling_ms",
        ),
        ("burst-forgets-its-first-message", "since_ms=first_ms)", "since_ms=None)"),
    ),
    *of(
        "delayer/store/rows/keys.py",
        "tests/conformance/test_key_modes.py",
        ("keep-does-not-wait-for-a-release", "m.due_at, m.id FOR UPDATE OF m", "m.due_at, m.id"),
        (
            "keep-misses-a-held-message",
            "_note_spared(cancelled, places, await connection.fetch(_LOCK_HELD, left), spare)",
            "pass",
        ),
    ),
    *of(
        "delayer/store/segments/codec.py",
        "tests/integration/test_store_segments.py::test_a_row_that_does_not_fit_its_bytes_is_broken",
        ("segment-digest-not-compared", "if found != digest:", "if False:"),
        ("segment-count-not-compared", "if len(table) != messages:", "if False:"),
    ),
    *of(
        "delayer/store/segments/compact.py",
        "tests/integration/test_store_keys_packed.py",
        ("packed-keys-name-no-segment", "await keys.enter_segment(connection, segment, _keyed(found, ids))", "pass"),
    ),
    *of(
        "delayer/store/rows/keys.py",
        "tests/integration/test_store_keys_packed.py",
        ("restored-keys-name-a-segment", "message_key SET {_OF_ROW} WHERE", "message_key SET id = id WHERE"),
        ("cancel-looks-once-where-a-message-moves", "if same == 2:", "if same == 2 or cancelled.known:"),
    ),
    *of(
        "delayer/store/segments/restore.py",
        "tests/integration/test_store_segments.py",
        (
            "restored-segment-stays",
            'await connection.execute("DELETE FROM segment WHERE id = $1", segment["id"])',
            "pass",
        ),
    ),
    *of(
        "delayer/format/rows.py",
        "tests/unit/format/test_rows.py",
        ("checksum-without-lengths", "crc32(exchange, crc32(lengths))", "crc32(exchange)"),
        ("damage-heals-by-moving", "values[1] ^ 1", "values[1]"),
        ("future-format-is-sound", "version == FORMAT and ", ""),
    ),
    *of(
        "delayer/core/backoff.py",
        "tests/unit/core/test_hold.py",
        ("retry-pause-does-not-grow", "FIRST_MS << min(attempts - 1, 16)", "FIRST_MS"),
    ),
    *of(
        "delayer/store/clock.py",
        "tests/unit/store/test_clock.py",
        (
            "clock-without-drift",
            "lower=sample.server_ms + (shortest - DRIFT * abs(shortest)) * 1000",
            "lower=sample.server_ms + shortest * 1000",
        ),
        ("clock-rounds-down", "math.ceil(self._bounds().upper)", "math.floor(self._bounds().upper)"),
    ),
    *of(
        "delayer/core/delay_headers.py",
        "tests/unit/core/test_delay.py",
        ("delay-rounds-down", "return math.ceil(number)", "return math.floor(number)"),
    ),
    *of(
        "delayer/core/hold.py",
        "tests/unit/core/test_hold.py",
        (
            "hold-forgets-doubt",
            "may_be_delivered=self.may_be_delivered or earlier.may_be_delivered",
            "may_be_delivered=self.may_be_delivered",
        ),
        ("hold-forgets-isolation", "isolated=self.isolated or earlier.isolated", "isolated=self.isolated"),
        ("late-message-is-retried", "return None if self.for_a_person else again_ms", "return again_ms"),
    ),
    *of(
        "delayer/core/plan.py",
        "tests/unit/core/test_plan.py",
        ("due-by-the-later-clock", "now_ms if now_lower_ms is None else now_lower_ms)", "now_ms)"),
    ),
    *of(
        "delayer/core/rate_limit.py",
        "tests/unit/core/test_rate_limit.py",
        ("token-bucket-has-no-bottom", "taken = min(wanted, int(self._tokens))", "taken = wanted"),
    ),
    *of(
        "delayer/core/cascade.py",
        "tests/unit/core/test_cascade.py",
        ("cascade-loses-dead-letters", 'DEAD_LETTER_STRATEGY: "at-least-once"', 'DEAD_LETTER_STRATEGY: "at-most-once"'),
        ("cascade-drops-when-full", '"x-overflow": "reject-publish"', '"x-overflow": "drop-head"'),
    ),
    *of(
        "delayer/intake/session.py",
        "tests/unit/intake/test_consume.py",
        ("ack-before-the-oldest", "self._order[0] in self._accepted", "self._accepted"),
    ),
    *of(
        "delayer/amqp/channel.py",
        "tests/unit/amqp/test_confirms.py",
        ("returned-counts-as-confirmed", "answers[position] = returned", "pass"),
        ("nacked-counts-as-confirmed", "answers[position] = _NACKED", "pass"),
    ),
    *of(
        "delayer/format/release.py",
        "tests/unit/format/test_release.py",
        (
            "deaths-stay-in-headers",
            "_REMOVED: Final = REQUEST_HEADERS | COUNTED | {X_DEATH, ID, LAST_DUE}",
            "_REMOVED: Final = REQUEST_HEADERS | COUNTED | {ID, LAST_DUE}",
        ),
        ("delay-keeps-its-sign", "cuts.append((type_at, stop, turned))", "pass"),
        ("repeated-delays-stay", "if name == DELAY and is_turned:", "if False:"),
    ),
    *of(
        "delayer/http/access.py",
        "tests/unit/http/test_access.py",
        ("any-host-is-ours", "return is_loopback(name)", "return True"),
        ("any-origin-may-post", 'return site in ("same-origin", "none")', "return True"),
    ),
    *of(
        "delayer/broker/circuit_breaker.py",
        "tests/unit/broker/test_circuit_breaker.py",
        ("breaker-opens-for-no-longer", "first * 2.0 ** min(failures - 1, 10)", "first"),
    ),
    *of(
        "delayer/store/lanes/lane.py",
        "tests/integration/test_store_mutants.py::test_the_next_owner_begins_no_later_than_the_stores_clock",
        ("cursor-from-the-later-clock", "self.clock.now_lower_ms(), *starts", "self.clock.now_upper_ms(), *starts"),
    ),
    *of(
        "delayer/store/lanes/lane.py",
        "tests/integration/test_store_lane.py",
        ("next-claim-waits-for-an-open-one", "            if claim.next_start > place\n", "            if False\n"),
        ("watermark-passes-open-claims", "now_lower_ms(), *starts)", "now_lower_ms())"),
    ),
    *of(
        "delayer/store/lanes/lane.py",
        "tests/integration/test_store_lane.py",
        ("nothing-is-claimed-beyond-the-horizon", "horizon_ms if next_ms is None", "NEVER_MS if next_ms is None"),
    ),
    *of(
        "delayer/store/lanes/cursor.py",
        "tests/integration/test_store_lane.py",
        ("rollback-leaves-the-place", "self.place = min(self.place, start)", "pass"),
    ),
    *of(
        "delayer/release/loop.py",
        "tests/unit/release/test_loop.py",
        ("published-at-the-claim", "[row.due_ms for row in sendable]", "[0 for _ in sendable]"),
        ("published-by-the-later-clock", "], self.live.now_lower_ms, written", "], self.live.now_upper_ms, written"),
        ("next-claim-overtakes", "        await before.wait()\n", ""),
    ),
    *of(
        "delayer/amqp/channel.py",
        "tests/unit/amqp/test_channels.py",
        ("writes-before-the-instant", "due = bisect_right(pace.due_ms, now_ms, index)", "due = len(batch)"),
    ),
    *of(
        "delayer/broker/isolation.py",
        "tests/conformance/test_publisher.py",
        ("isolation-before-the-instant", "            await asyncio.sleep(left)\n", "            break\n"),
    ),
    *of(
        "delayer/store/inbox.py",
        "tests/integration/test_sql_reader.py",
        ("inbox-freed-with-rows-in-flight", "if not wanted and not (self._rows or self._settled):", "if not wanted:"),
        ("postponed-rows-come-first", "ranges.take(sorted(self._postponed.ids))", "pass"),
        ("inbox-ranges-stay-open", "            self._ranges.close(closed)\n", "            pass\n"),
    ),
    *of(
        "delayer/store/inbox.py",
        "tests/acceptance/test_sql_inbox.py::test_a_transaction_that_commits_late_is_not_passed_over",
        ("inbox-ranges-close-at-once", "if oldest < self._mark.xid:", "if False:"),
    ),
    *of(
        "delayer/store/postgres.py",
        "tests/integration/test_sql_reader.py",
        ("stale-reader-moves", 'if status != f"DELETE {len(ids)}":', "if False:"),
    ),
    *of(
        "delayer/intake/inbox.py",
        "tests/faults/test_crash_inbox.py",
        ("inbox-moves-apart", "await self._inbox.move(operations, tags)", "await self._backlog.apply(operations)"),
    ),
    *of(
        "delayer/core/plan.py",
        "tests/unit/format/test_inbox.py",
        ("sql-delay-not-read", "if BY_SQL in request.headers else", "if False else"),
    ),
    *of(
        "migrations/versions/0002_sql_inbox.py",
        "tests/integration/test_sql_functions.py::test_a_hostile_search_path_changes_nothing",
        ("callers-search-path", " SECURITY DEFINER SET search_path = pg_catalog, pg_temp", " SECURITY DEFINER"),
        times=3,
    ),
)
