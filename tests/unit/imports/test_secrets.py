"""Messages about a URL never show its password, in any spelling or position."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delayer.amqp.address import Address
from delayer.config.errors import ConfigError
from delayer.config.loading import load
from delayer.core.readable import mask
from delayer.core.secret import SecretUrl, concealed
from delayer.imports.databases import Database, database_url
from delayer.imports.state_machine import BadSource

MARK = "Zq7w"
"""Part of every password, and of nothing else."""
KEYS = ("broker.url", "broker.management_url", "store.url")
SCHEMES = {"broker.url": "amqp", "broker.management_url": "http", "store.url": "postgresql"}
POSITIONS = (
    "{s}://user:{p}@host:5672/name",
    "{s}://:{p}@host/",
    "{s}://user:{p}@[::1]:1/name?a=b",
    "{s}://user:{p}@host:99999/",
    "{s}://user:{p}@host/a/b",
    "{s}://user:{p}@",
    "{s}:/user:{p}@host/",
    "{s}:user:{p}@host/",
    "{s}://host/name?password={p}",
    "{s}://host/name?sslmode=x&password={p}&user=me",
    "{s}://user@host/name?PASSWORD={p}",
    "//user:{p}@host/name",
    "host=h password={p}",
)
ANY = st.text(st.characters(codec="utf-8"), max_size=8) | st.text("@/:?#&=%;'\" \t\n\\\0[]ab1", max_size=8)
passwords = st.builds(lambda before, after: before + MARK + after, ANY, ANY)


def every_byte(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


SPELLINGS = (str, lambda text: quote(text, safe=""), every_byte)


def assert_hidden(text: str) -> None:
    assert MARK not in text
    assert every_byte(MARK) not in text


def told(key: str, url: str) -> str:
    """The error of a wrong URL, or the printed forms of a right one."""
    try:
        settings = load(None, {}, {key: url})
    except ConfigError as wrong:
        return f"{wrong}{wrong.problems!r}"
    said = repr(settings) + str(settings.broker.url)
    return said + (str(Address.parse(url)) + repr(Address.parse(url)) if key == "broker.url" else "")


@given(passwords, st.sampled_from(SPELLINGS), st.sampled_from(POSITIONS), st.sampled_from(KEYS))
@example("SEC " + MARK, str, POSITIONS[0], "broker.url")
@example("a\tb" + MARK, str, POSITIONS[0], "store.url")
@example('SEC"' + MARK, str, "{s}://localhost:99999/d?password={p}&user=x", "store.url")
@example("p@1/" + MARK, str, POSITIONS[0], "broker.url")
@example(f"p@{MARK}/a", str, POSITIONS[0], "broker.url")
@example(f"p@{MARK}?a", str, POSITIONS[0], "store.url")
def test_no_text_about_a_url_shows_its_password(password: str, spelling: object, position: str, key: str) -> None:
    assert callable(spelling)
    for scheme in (SCHEMES[key], "ftp"):
        url = position.format(s=scheme, p=spelling(password))
        assert_hidden(told(key, url))
        assert_hidden(str(SecretUrl(url)) + repr(SecretUrl(url)) + concealed(url))


@given(passwords, st.sampled_from(SPELLINGS))
def test_no_text_about_a_url_file_shows_a_password(
    tmp_path_factory: pytest.TempPathFactory, password: str, spelling: object
) -> None:
    assert callable(spelling)
    file = tmp_path_factory.getbasetemp() / "url"
    for key in KEYS[::2]:
        file.write_text(POSITIONS[0].format(s=SCHEMES[key], p=spelling(password)), "utf-8")
        assert_hidden(told(f"{key}_file", str(file)))
        assert_hidden(told(f"{key}_file", POSITIONS[0].format(s="http", p=spelling(password)) + "\0"))


@given(passwords, st.sampled_from(SPELLINGS), st.sampled_from(POSITIONS[:-1]))
@example(f"p@{MARK}/a", str, POSITIONS[0])
def test_no_text_about_a_source_shows_its_password(password: str, spelling: object, position: str) -> None:
    assert callable(spelling)
    for scheme in ("mysql", "postgresql", "mssql", "oracle"):
        try:
            url = database_url(position.format(s=scheme, p=spelling(password)))
        except BadSource as wrong:
            assert_hidden(str(wrong))
        else:
            assert_hidden(Database(url).shown)


@example(f"'ab'{MARK}", str)
@given(passwords.filter(lambda text: not re.search(r"\s", text)), st.sampled_from(SPELLINGS))
def test_no_error_of_a_driver_shows_a_password(password: str, spelling: object) -> None:
    assert callable(spelling)
    for position in (POSITIONS[0], POSITIONS[3], "{s}://host/name?password={p}", "host=h password={p} user=u"):
        assert_hidden(mask(f"cannot reach {position.format(s='postgresql', p=spelling(password))}, says the driver"))
