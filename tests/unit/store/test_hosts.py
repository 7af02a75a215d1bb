"""A store whose URL names several hosts: one that does not answer keeps no other from being asked."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import asyncpg
import pytest

from delayer.store import hosts

URL = "postgresql://me:pw@{}/delayer?target_session_attrs=primary"


class Opened:
    def __init__(self, host: str) -> None:
        self.host = host
        self.cut = False

    def terminate(self) -> None:
        self.cut = True


class Hosts:
    """What each host does: it answers, raises its error, or says nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **does: BaseException | str) -> None:
        self._does = {URL.format(host): (host, what) for host, what in does.items()}
        self.asked: list[str] = []
        self.opened: list[Opened] = []
        self.given_up: list[str] = []
        monkeypatch.setattr(asyncpg, "connect", self._connect)
        monkeypatch.setattr(hosts, "NEXT_HOST_SECONDS", 0.0)

    async def _connect(self, url: str, **how: Any) -> Opened:
        host, what = self._does[url]
        assert how == {"timeout": 10.0}
        self.asked.append(host)
        if isinstance(what, BaseException):
            raise what
        if what == "silent":
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.append(host)
        self.opened.append(one := Opened(host))
        return one


async def opened(url: str) -> Opened:
    return cast(Opened, await hosts.connect(url, timeout=10.0))


async def test_a_silent_host_does_not_keep_the_next_from_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hosts(monkeypatch, db1="silent", db2="answers")
    assert (await opened(URL.format("db1,db2"))).host == "db2"
    await asyncio.sleep(0)
    assert there.given_up == ["db1"]


@pytest.mark.parametrize("error", [ConnectionRefusedError(), asyncpg.TargetServerAttributeNotMatched("a standby")])
async def test_the_next_host_is_asked_after_an_error(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    there = Hosts(monkeypatch, db1=error, db2="answers", db3="answers")
    assert (await opened(URL.format("db1,db2,db3"))).host == "db2"
    assert there.asked == ["db1", "db2"]


async def test_a_host_that_answers_after_all_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hosts(monkeypatch, db1="answers", db2="answers")
    monkeypatch.setattr(asyncio, "wait", _both(asyncio.wait))
    chosen = await opened(URL.format("db1,db2"))
    await asyncio.sleep(0)
    assert [one.cut for one in there.opened if one is not chosen] in ([], [True])
    assert not chosen.cut


def _both(wait: Any) -> Any:
    """The first look finds nobody, so that both answer before the second."""
    looks = iter([True])

    async def later(asked: Any, **how: Any) -> Any:
        if next(looks, False):
            return set(), asked
        await wait(asked)
        return await wait(asked, **how)

    return later


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (asyncpg.TargetServerAttributeNotMatched("a standby"), ConnectionRefusedError("db2"), "db2"),
        (ConnectionRefusedError("db1"), asyncpg.InvalidPasswordError("db2"), "db1"),
        (asyncpg.TargetServerAttributeNotMatched("both standbys"), asyncpg.TargetServerAttributeNotMatched(""), "both"),
    ],
)
async def test_the_error_is_that_of_a_host_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, first: BaseException, second: BaseException, told: str
) -> None:
    Hosts(monkeypatch, db1=first, db2=second)
    with pytest.raises(type(first) if told != "db2" else OSError, match=told):
        await opened(URL.format("db1,db2"))


async def test_a_caller_that_gives_up_leaves_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hosts(monkeypatch, db1="silent", db2="silent")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await opened(URL.format("db1,db2"))
    await asyncio.sleep(0)
    assert sorted(there.given_up) == ["db1", "db2"]


async def test_only_the_driver_prefers_a_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def connect(url: str, **_: Any) -> Opened:
        asked.append(url)
        return Opened(url)

    monkeypatch.setattr(asyncpg, "connect", connect)
    url = "postgresql://db1,db2/delayer?target_session_attrs=prefer-standby"
    await opened(url)
    assert asked == [url]


async def test_a_list_whose_comma_is_escaped_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def connect(url: str, **_: Any) -> Opened:
        asked.append(url)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncpg, "connect", connect)
    with pytest.raises(ConnectionRefusedError):
        await opened("postgresql:///delayer?host=db1%2Cdb2")
    assert asked == ["postgresql:///delayer?host=db1", "postgresql:///delayer?host=db2"]


async def test_a_single_host_is_asked_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hosts(monkeypatch, db1="answers")
    await opened(URL.format("db1"))
    assert there.asked == ["db1"]
