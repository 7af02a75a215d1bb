"""SIGHUP: a live switch of the mode, park_beyond, bad files that change nothing, and the notifications to systemd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.conftest import Notices
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.world import STORE_SECRET, assert_no_secret, secret_store_url
from tests.support.daemon import DaemonProcess
from tests.support.place import eventually
from tests.support.raw import Arrival, Inbox, content
from tests.support.servers import Postgres


def by_store(arrival: Arrival) -> bool:
    """The id of a released row is its number; every other id is random."""
    return len(content(arrival.props.one(b"x-delayer-id"))) < 32


def check_all(inbox: Inbox, bodies: list[bytes]) -> None:
    assert set(inbox.counts) == set(bodies)
    for body in bodies:
        arrival = inbox.only(body)
        assert arrival.at_ms >= arrival.due_ms


async def test_a_bad_file_changes_nothing(place: OwnVhost, store: str, tmp_path: Path) -> None:
    config, sections = tmp_path / "delayer.toml", {"store": {"url": store}}
    place.write(config, "store", sections)
    async with place.working(config=config) as (daemon, raw, inbox):
        sent: list[bytes] = []

        async def refused_because(*expected: str) -> None:
            seen = len(daemon.events)
            daemon.reload()
            event = await daemon.event("reload refused", after=seen)
            for words in expected:
                assert words in event["reason"]
            message = delayed(f"after reload {len(sent)}", 500)
            await raw.publish(message)
            sent.append(message.body)
            await inbox.got(sent)
            assert by_store(inbox.only(message.body))

        place.write(config, "nativ", {"intake": {"max_delay": 7}, **sections})
        await refused_because("mode", "nativ", "intake.max_delay", str(config))
        config.write_text("mode = \n")
        await refused_because(str(config), "line 1")
        config.unlink()
        await refused_because(str(config))
        place.write(config, "native", {"store": {"url": f"postgresql://u:{STORE_SECRET}@:bad/x"}})
        await refused_because("store.url")

        seen = len(daemon.events)
        place.write(config, "native", {"intake": {"queue": "other"}, **sections})
        daemon.reload()
        assert (await daemon.event("restart needed", after=seen))["keys"] == ["intake.queue"]
        await daemon.event("mode switched", after=seen)
        await raw.publish(delayed("native now", 500))
        await inbox.got([*sent, b"native now"])
        assert not by_store(inbox.only(b"native now"))
        assert await daemon.stop() == 0
        check_all(inbox, [*sent, b"native now"])
        assert_no_secret(daemon)


async def test_a_reload_uses_a_first_store_once_it_is_fit(
    place: OwnVhost, postgres: Postgres, empty_database: str, schema: str, tmp_path: Path
) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "native", {})
    async with place.working(config=config) as (daemon, raw, inbox):
        place.write(config, "store", {"store": {"url": secret_store_url(postgres, empty_database.rpartition("/")[2])}})
        daemon.reload()
        assert "delayer db upgrade" in (await daemon.event("reload refused"))["reason"]
        seen = len(daemon.events)
        place.write(config, "store", {"store": {"url": "postgresql://127.0.0.1:1/x?sslmode=perhaps"}})
        daemon.reload()
        await daemon.event("reload refused", after=seen)
        await raw.publish(delayed("still native", 500))
        await inbox.got([b"still native"])
        assert not by_store(inbox.only(b"still native"))

        # The next store is fit, and not the default one: the daemon has used no store yet, so any will do.
        place.write(config, "store", {"store": {"url": secret_store_url(postgres, schema), "lanes": 1}})
        daemon.reload()
        assert {"store.url", "store.lanes"} <= set((await daemon.event("reloaded"))["keys"])
        assert not [event for event in daemon.events if event["event"] == "restart needed"]
        await raw.publish(delayed("in the store", 500))
        await inbox.got([b"in the store"])
        assert by_store(inbox.only(b"in the store"))

        # Now the store holds messages: a change to another store needs a restart.
        place.write(config, "store", {"store": {"url": "postgresql://127.0.0.1:1/other", "lanes": 1}})
        seen = len(daemon.events)
        daemon.reload()
        assert (await daemon.event("restart needed", after=seen))["keys"] == ["store.url"]
        await raw.publish(delayed("in the same store", 500))
        await inbox.got([b"in the same store"])
        assert by_store(inbox.only(b"in the same store"))
        assert await daemon.stop() == 0
        assert_no_secret(daemon)


async def test_park_beyond_splits_short_from_long(place: OwnVhost, store: str, tmp_path: Path) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "store", {"store": {"url": store, "park_beyond": "1500ms"}})
    async with place.working(config=config) as (daemon, raw, inbox):
        split = [delayed(f"{name} {n}", delay) for n in range(20) for name, delay in (("short", 900), ("long", 2600))]
        await raw.publish(*split, delayed("at once", 0))
        await inbox.got(message.body for message in split)
        for message in split:
            assert by_store(inbox.only(message.body)) == message.body.startswith(b"long")
        place.write(config, "store", {"store": {"url": store}})
        daemon.reload()
        await daemon.event("reloaded")
        await raw.publish(delayed("short, parked now", 900))
        await inbox.got([b"short, parked now", b"at once"])
        assert by_store(inbox.only(b"short, parked now"))
        assert await daemon.stop() == 0
        await raw.round_trip()
        check_all(inbox, [*(message.body for message in split), b"at once", b"short, parked now"])


@pytest.mark.parametrize("first", ["native", "store"])
async def test_native_mode_with_a_store(
    place: OwnVhost, postgres: Postgres, schema: str, tmp_path: Path, first: str
) -> None:
    """Keys work, parked messages are released, and unroutable ones are held in the store: from the start on, or after
    a switch."""
    config = tmp_path / "delayer.toml"
    store = {"store": {"url": secret_store_url(postgres, schema)}}
    place.write(config, first, store)
    async with place.working(config=config) as (daemon, raw, inbox):
        if first == "store":
            place.write(config, "native", store)
            daemon.reload()
            await daemon.event("mode switched")
        else:
            await daemon.event("lane taken")

        astray = [delayed("astray", 700, through="in.missing"), delayed("astray at once", 0, through="in.missing")]
        await raw.publish(delayed("replaced", 1500, under="k"), *astray)
        await raw.publish(
            delayed("keyed", 1500, under="k"), delayed("cascaded", 700), delayed("queued", 700, through="in.queue")
        )
        bodies = [b"keyed", b"cascaded", b"queued"]
        await inbox.got(bodies)
        assert [by_store(inbox.only(body)) for body in bodies] == [True, False, False]
        held = "SELECT FROM held WHERE kind = 'closed_channel'"
        await eventually(lambda: postgres.execute(held, database=schema) == "SELECT 2")
        assert place.things.depth("delayer.delay-strays") == 0
        assert await daemon.stop() == 0
        await raw.round_trip()
        check_all(inbox, bodies)
        assert_no_secret(daemon)


async def test_systemd_gets_ready_when_a_reload_is_in_force(
    place: OwnVhost, store: str, tmp_path: Path, notices: Notices
) -> None:
    """`systemctl reload` waits for this notification."""
    config = tmp_path / "delayer.toml"
    place.write(config, "store", {"store": {"url": store}})
    async with DaemonProcess({}, config=config) as daemon:
        await daemon.ready()
        await eventually(lambda: notices.said("READY=1", "mode store"))

        place.write(config, "native", {"store": {"url": store}})
        daemon.reload()
        await eventually(lambda: notices.said("RELOADING=1\nMONOTONIC_USEC="))
        await eventually(lambda: notices.said("READY=1", "STATUS=mode native"))
        assert (await daemon.event("mode switched"))["now"] == "native", "logged before systemd is told"

        config.write_text('mode = "nativ"\n')
        daemon.reload()
        await eventually(lambda: notices.said("RELOADING=1\nMONOTONIC_USEC="))
        await eventually(lambda: notices.said("READY=1", "STATUS=mode native; the last reload was refused", "nativ"))
        assert "nativ" in (await daemon.event("reload refused"))["reason"]
        assert await daemon.stop() == 0
        await eventually(lambda: notices.said("STOPPING=1"))
