"""Parameters of the store's URL: an error names each problem, and never shows the password."""

from __future__ import annotations

import os
from pathlib import Path

import asyncpg
import pytest

from delayer.config.errors import ConfigError
from delayer.config.loading import load, store_url_errors

NO_FILE = Path(os.devnull)
URL = "postgresql://user:hunter2@127.0.0.1:1/delayer"


@pytest.fixture(autouse=True)
def _no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PGSSLROOTCERT", raising=False)


@pytest.mark.parametrize(
    ("query", "expected", "found"),
    [
        ("sslmode=verify", "sslmode to be disable, allow, prefer, require, verify-ca or verify-full", '"verify"'),
        ("target_session_attrs=rw", "target_session_attrs to be any, primary", '"rw"'),
        ("ssl_min_protocol_version=1.2", "ssl_min_protocol_version to be TLSv1, ", '"1.2"'),
        ("sslmode=require&sslrootcert=/no/such", "sslrootcert to be a file", '"/no/such": No such file or directory'),
        ("sslmode=prefer&sslcert=/no/such", "sslcert to be a file", '"/no/such": No such file or directory'),
        ("sslmode=verify-full", "sslrootcert, who signed the server's certificate, with sslmode=verify-full", "none"),
        ("sslmode", "a URL with name=value pairs, joined by &, behind its ?", "something else (not shown)"),
    ],
)
async def test_each_mistake_is_named(query: str, expected: str, found: str) -> None:
    [(wanted, there)] = store_url_errors(f"{URL}?{query}", {})
    assert wanted.startswith(expected)
    assert there == found
    with pytest.raises(ConfigError, match=r"store\.url: expected .*, found ") as told:
        load(NO_FILE, {"DELAYER_STORE__URL": f"{URL}?{query}"}, {})
    assert "hunter2" not in str(told.value)
    with pytest.raises((ValueError, FileNotFoundError)):  # the driver would fail at the first connection
        await asyncpg.connect(f"{URL}?{query}", timeout=5)


@pytest.mark.parametrize(
    "query",
    [
        "", "?", "?sslmode=", "?sslmode=disable&sslrootcert=/no/such", "?sslrootcert=/no/such", "?sslmode=require",
        "?target_session_attrs=read-write&application_name=me", "?host=/run/postgresql&sslmode=prefer",
    ],
)  # fmt: skip
async def test_parameters_of_the_driver_are_valid(query: str) -> None:
    assert store_url_errors(URL + query, {}) == []
    with pytest.raises(OSError, match=r"refused|No such file") as refused:  # port 1 has no listener
        await asyncpg.connect(URL + query, timeout=5)
    assert not isinstance(refused.value, ValueError)


def test_the_users_root_certificate_is_used(tmp_path: Path) -> None:
    verified = f"{URL}?sslmode=verify-ca"
    assert store_url_errors(verified, {"PGSSLROOTCERT": "/etc/ca.pem"}) == []
    assert store_url_errors(verified, {})
    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql" / "root.crt").write_text("a certificate")
    assert store_url_errors(verified, {}) == []


def test_all_mistakes_at_once() -> None:
    flags = {"store.url": f"{URL}?sslmode=on&target_session_attrs=rw", "intake.queue": "delays.due"}
    with pytest.raises(ConfigError) as told:
        load(NO_FILE, {}, flags)
    assert [problem.key for problem in told.value.problems].count("store.url") == 2
    assert len(told.value.problems) == 3


@pytest.mark.parametrize("who", ["ann@srv:pw", "ann:p@w"])
async def test_an_unescaped_at_sign_in_the_user_part_is_a_mistake(who: str) -> None:
    url = f"postgresql://{who}@localhost:1/d"
    ((expected, found),) = store_url_errors(url, {})
    assert "%40" in expected
    assert who not in found
    with pytest.raises((ValueError, OSError), match=r"invalid|not known|name resolution"):  # another host
        await asyncpg.connect(url, timeout=5)
    assert store_url_errors(url.replace("@", "%40", 1), {}) == []


@pytest.mark.parametrize("place", ["db1:5433,db2:5434", "db1,db2:5434", "[::1]:5433,db2"])
def test_each_of_several_hosts_may_have_its_port(place: str) -> None:
    url = f"postgresql://user:hunter2@{place}/delayer?target_session_attrs=primary"
    assert load(NO_FILE, {"DELAYER_STORE__URL": url}, {}).store_url == url


@pytest.mark.parametrize("place", ["db1:5433,db2:x", "db1:0,db2", "db1,db2:99999"])
def test_a_wrong_port_of_several_is_a_mistake(place: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url: expected a URL like") as told:
        load(NO_FILE, {"DELAYER_STORE__URL": f"postgresql://user:hunter2@{place}/delayer"}, {})
    assert "hunter2" not in str(told.value)
