"""Access to read and to change: tables of hosts, origins, sessions and tokens."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from delayer.config.texts import is_loopback
from delayer.core.secret import Secret
from delayer.http.access import COOKIE, LASTS, LONGEST, Sessions, cookie_name, from_our_page, host_is_ours

TOKEN = "open-sesame-open-sesame"


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost", True), ("LOCALHOST.", True), ("a.localhost", True), ("127.0.0.1", True), ("127.8.9.1", True),
        ("[::1]", True), ("::1", True), ("192.168.1.1", False), ("localhost.evil.example", False), ("", False),
        ("127.0.0.1.evil.example", False), ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_loopback(host: str, ours: bool) -> None:
    assert is_loopback(host) == ours


@pytest.mark.parametrize(
    ("host", "listen", "ours"),
    [
        ("localhost:9419", "127.0.0.1:9419", True), ("127.0.0.1:1", "localhost:9419", True),
        ("[::1]:9419", "[::1]:9419", True), ("evil.example:9419", "127.0.0.1:9419", False),
        ("", "127.0.0.1:9419", False), ("[::1", "127.0.0.1:9419", False), ("box.example", "0.0.0.0:9419", True),
        ("box.example", "10.0.0.5:9419", True),
    ],
)  # fmt: skip
def test_a_loopback_address_answers_only_loopback_names(host: str, listen: str, ours: bool) -> None:
    assert host_is_ours(host, listen) == ours


@pytest.mark.parametrize(
    ("method", "site", "origin", "let_in"),
    [
        ("GET", "cross-site", "https://evil.example", True), ("POST", "same-origin", "http://localhost:9419", True),
        ("POST", "", "", True), ("POST", "none", "", True), ("POST", "cross-site", "", False),
        ("POST", "same-site", "", False), ("POST", "", "https://evil.example", False), ("POST", "", "null", False),
        ("POST", "same-origin", "null", True), ("POST", "", "http://localhost:9420", False),
    ],
)  # fmt: skip
def test_posts_of_other_pages_are_refused(method: str, site: str, origin: str, let_in: bool) -> None:
    assert from_our_page(method, site, origin, "localhost:9419") == let_in


class Place:
    """Sessions, with a clock and a token that the test can change."""

    def __init__(self, token: str | None = TOKEN, **more: int) -> None:
        self.token = None if token is None else Secret(token)
        self.now = 0.0
        self.sessions = Sessions(lambda: self.token, lambda: self.now, **more)


@pytest.fixture
def place() -> Place:
    return Place()


def request(cookie: str | None = "", authorization: str = "") -> Request:
    given: dict[str, str] = {"cookie": f"{COOKIE}={cookie}" if cookie else "", "authorization": authorization}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    return Request(scope)


async def test_the_token_opens_a_session_for_a_while(place: Place) -> None:
    name = place.sessions.open(TOKEN, "ada (page, ::1)")
    assert place.sessions.who(request(name)) == "ada (page, ::1)"
    place.now = LASTS - 1
    assert place.sessions.who(request(name)) == "ada (page, ::1)"
    place.now += LASTS + 1
    assert place.sessions.who(request(name)) is None


async def test_no_session_lasts_forever(place: Place) -> None:
    name = place.sessions.open(TOKEN, "ada")
    while place.now < LONGEST:
        assert place.sessions.who(request(name)) == "ada"
        place.now += LASTS
    place.now += 1
    assert place.sessions.who(request(name)) is None


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:9419", "delayer_session_9419"), ("[::1]:9420", "delayer_session_9420"),
        ("localhost", "delayer_session"), ("", "delayer_session"), ("localhost:x", "delayer_session"),
    ],
)  # fmt: skip
def test_two_daemons_of_a_host_have_a_cookie_each(host: str, name: str) -> None:
    assert cookie_name(host) == name


async def test_clients_without_the_token_stay_outside(place: Place) -> None:
    for said in ("", "wrong", TOKEN[:-1], TOKEN + "x", "\udc80"):
        assert place.sessions.open(said, "eve") is None
    assert place.sessions.who(request("invented")) is None
    assert place.sessions.who(request()) is None


async def test_another_token_ends_the_sessions_of_the_last(place: Place) -> None:
    name = place.sessions.open(TOKEN, "ada")
    place.token = Secret("another-token-altogether")
    assert place.sessions.who(request(name)) is None
    place.token = None
    assert place.sessions.open("", "eve") is None
    assert not place.sessions.can_open


async def test_a_wrong_header_is_refused_despite_a_valid_cookie(place: Place) -> None:
    name = place.sessions.open(TOKEN, "ada")
    assert place.sessions.who(request(name, "Bearer wrong")) is None


async def test_the_number_of_sessions_is_bounded() -> None:
    place = Place(most=3)
    names = [place.sessions.open(TOKEN, str(n)) for n in range(5)]
    assert [place.sessions.who(request(name)) for name in names] == [None, None, "2", "3", "4"]
