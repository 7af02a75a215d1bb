"""Access to read and to change: tables of hosts, origins, sessions and tokens."""

from __future__ import annotations

import hashlib
from http import cookies
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from delayer.config.model import Settings
from delayer.config.texts import is_loopback
from delayer.config.tokens import Role
from delayer.http.access import COOKIE, LASTS, LONGEST, Sessions, Tokens, cookie_name, from_our_page, host_is_ours
from tests.support.logged import capture_logs
from tests.support.web import tokens_file
from tests.unit.http.inside import Inside, served

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


def test_a_malformed_origin_is_another_site() -> None:
    assert not from_our_page("POST", "", "http://[", "localhost:9419")


class Place:
    """Sessions, with a clock and a file of tokens that the test can change."""

    def __init__(self, **more: int) -> None:
        self.file: str | None = tokens_file(TOKEN)
        self.now = 0.0
        self.sessions = Sessions(Tokens(lambda: self.file), lambda: self.now, **more)

    def open(self, said: str, who: str) -> str | None:
        return self.sessions.open(said, who, "::1")

    def who(self, request: Request) -> str | None:
        client = self.sessions.client(request)
        return None if client is None else client.who


@pytest.fixture
def place() -> Place:
    return Place()


def request(cookie: str | None = "", authorization: str = "") -> Request:
    given: dict[str, str] = {"cookie": f"{COOKIE}={cookie}" if cookie else "", "authorization": authorization}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    return Request(scope)


async def test_the_token_opens_a_session_for_a_while(place: Place) -> None:
    name = place.open(TOKEN, "ada")
    assert place.who(request(name)) == "ada (token ops, page, ::1)"
    place.now = LASTS - 1
    assert place.who(request(name)) == "ada (token ops, page, ::1)"
    place.now += LASTS + 1
    assert place.who(request(name)) is None


async def test_no_session_lasts_forever(place: Place) -> None:
    name = place.open(TOKEN, "ada")
    while place.now < LONGEST:
        assert place.who(request(name)) == "ada (token ops, page, ::1)"
        place.now += LASTS
    place.now += 1
    assert place.who(request(name)) is None


async def test_only_our_cookie_is_read_and_nothing_is_unquoted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.9 unquotes a cookie in a time that grows with the square of its length (CVE-2024-7592)."""
    unquoted: list[str] = []
    monkeypatch.setattr(cookies, "_unquote", lambda text: unquoted.append(text) or text)
    name = place.open(TOKEN, "ada")
    foreign = '"' + "\\\\" * 30_000 + '"'
    for said in (name, f"x; other={foreign}; {COOKIE} = {name} ;", f'old; {COOKIE}={name}; {COOKIE}_1="a=b"'):
        assert place.who(request(said)) == "ada (token ops, page, ::1)", said[:20]
    for said in (foreign, f'"{name}"', f"{name}; {COOKIE}=", name + " " * 100 + "x"):
        assert place.who(request(said)) is None, said[:20]
    assert not unquoted


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
        assert place.open(said, "eve") is None
    assert place.who(request("invented")) is None
    assert place.who(request()) is None


async def test_another_token_ends_the_sessions_of_the_last(place: Place) -> None:
    name = place.open(TOKEN, "ada")
    place.file = tokens_file("another-token-altogether")
    assert place.who(request(name)) is None
    place.file = None
    assert place.open("", "eve") is None
    assert not place.sessions.can_open


async def test_a_wrong_header_is_refused_despite_a_valid_cookie(place: Place) -> None:
    name = place.open(TOKEN, "ada")
    assert place.who(request(name, "Bearer wrong")) is None


async def test_a_token_ends_no_sessions_but_its_own_oldest() -> None:
    place = Place(most=3)
    place.file = tokens_file("grafana read only-to-look-at-it", TOKEN)
    ada = place.open(TOKEN, "ada")
    names = [place.open("only-to-look-at-it", str(n)) for n in range(5)]
    shown = [*[None] * 2, *(f"{n} (token grafana, page, ::1)" for n in (2, 3, 4))]
    assert [place.who(request(name)) for name in names] == shown
    assert place.who(request(ada)) == "ada (token ops, page, ::1)"


async def test_sessions_of_tokens_that_are_gone_take_no_memory() -> None:
    place = Place(most=3)
    for number in range(5):
        place.file = tokens_file(token := f"one-of-many-tokens-{number}")
        assert place.open(token, "ada") is not None
    assert len(place.sessions._sessions) == 1


HASH = hashlib.sha256(TOKEN.encode()).hexdigest()
LINES = {
    "shop publish open-sesame": "line 2: expected a token of at least 16 printable ASCII characters",
    "shop publish sha256:abc": "line 2: expected 64 hexadecimal digits after sha256:",
    "shop admin open-sesame-open": "line 2: expected a role of read, publish, act",
    "-shop act open-sesame-open": "line 2: expected a name of 1 to 64 letters",
    "shop act open sesame-open-sesame": "line 2: expected NAME ROLE TOKEN",
    "a act open-sesame-open-sesame-again": "line 2: expected a name that no line above has",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_with_a_mistake_lets_nobody_in_and_is_logged_once(line: str) -> None:
    tokens = Tokens(lambda: file)
    file = tokens_file(f"a read {TOKEN}", line)
    with capture_logs() as logs:
        found = [tokens.find(TOKEN) for _ in range(3)]
    assert [one.name for one in found if one] == ["a"] * 3
    assert tokens.find(line.rsplit(maxsplit=1)[-1]) is None
    [told] = logs
    assert told["event"] == "token not used" and told["reason"].startswith(LINES[line])
    assert not set(told["reason"].split()) & {"open-sesame", "open-sesame-open"}


def test_the_file_is_read_again_when_it_changes() -> None:
    file = tokens_file(f"a read {TOKEN}", f"b publish sha256:{HASH}")
    tokens = Tokens(lambda: file)
    found = tokens.find(TOKEN)
    assert found is not None and (found.name, found.role) == ("b", Role.PUBLISH), "of two with one token, the last"
    Path(file).write_text(f"# {HASH}\n\nc act {TOKEN}\n")
    found = tokens.find(TOKEN)
    assert found is not None and (found.name, found.role) == ("c", Role.ACT)
    with capture_logs() as logs:
        for _ in range(3):
            Path(file).unlink(missing_ok=True)
            assert tokens.find(TOKEN) is None
    assert [one["reason"] for one in logs] == ["No such file or directory"]
    Path(file).write_text(f"d read {TOKEN}\n")
    assert tokens.find(TOKEN) is not None


@pytest.mark.parametrize(
    ("role", "allowed"), [("read", {"read"}), ("publish", {"publish"}), ("act", {"read", "publish", "act"})]
)
def test_a_role_allows_no_more_than_it_says(role: str, allowed: set[str]) -> None:
    place = Place()
    place.file = tokens_file(f"a {role} {TOKEN}")
    asked = request(None, f"Bearer {TOKEN}")
    assert {needed for needed in Role if place.sessions.allows(asked, needed)} == allowed
    assert (place.open(TOKEN, "ada") is not None) == ("read" in allowed), "the page is for reading"


async def test_a_daemon_without_a_file_of_tokens_says_so() -> None:
    inside = Inside()
    inside.settings = Settings.model_validate({"mode": "native", "http": {"listen": "127.0.0.1:0"}})
    async with served(inside) as web:
        for more, found in (({}, "none"), ({"Authorization": "Bearer x"}, "one")):
            answer = await web.get("/api/held", **more)
            assert answer.json["detail"].endswith(f"found {found}; no [http] tokens_file is configured."), answer.text
            assert answer.json["next"].startswith("name a file in [http] tokens_file")
