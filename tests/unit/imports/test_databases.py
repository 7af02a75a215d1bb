"""Of a source's URL is shown and kept which database it is, and never a password, wherever its driver takes one."""

from __future__ import annotations

from urllib.parse import quote_plus

import pytest

from delayer.imports.databases import Database, database_url
from delayer.imports.state_machine import BadSource, SourceLost

SECRET = "s3cr;t{x"
URLS = {
    f"postgresql://me:{quote_plus(SECRET)}@db/sales": ("db/sales", "me"),
    f"postgresql:///sales?host=db&user=me&password={quote_plus(SECRET)}": ("sales?", "host=db", "user=me"),
    f"mysql://me@db/sales?passwd={quote_plus(SECRET)}&ssl_key=/k": ("me@db/sales",),
    f"mssql://me:{quote_plus(SECRET)}@db/sales?driver=ODBC+Driver+18": ("db/sales", "driver=ODBC+Driver+18"),
}


@pytest.mark.parametrize(("url", "told"), URLS.items(), ids=map(str, range(len(URLS))))
def test_the_shown_database_without_its_password(url: str, told: tuple[str, ...]) -> None:
    shown = Database(database_url(url)).shown
    assert all(one in shown for one in told), shown
    assert "s3cr" not in shown


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///x", "nonsense://db/sales", "mysql+pymysql://me:s3cret@127.0.0.1:1/sales",
        "postgresql://me:s3cret@127.0.0.1:1/sales?nonsense=s3cret", "mysql://me:s3cret@127.0.0.1:1/sales?ssl=true",
    ],
)  # fmt: skip
async def test_a_url_that_cannot_be_right(url: str) -> None:
    database = Database(database_url(url))
    with pytest.raises(BadSource, match="the source's URL") as raised:
        async with database.connected():
            pass
    assert "s3cret" not in str(raised.value)


async def test_urls_as_other_tools_have_them() -> None:
    url = database_url("postgres://me@127.0.0.1:1/sales?sslmode=require")
    assert url.render_as_string() == "postgresql+asyncpg://me@127.0.0.1:1/sales?ssl=require"
    with pytest.raises(SourceLost):
        async with Database(url).connected():
            pass


def test_an_odbc_connection_string_is_refused_and_not_shown() -> None:
    with pytest.raises(BadSource, match="found odbc_connect") as raised:
        database_url("mssql:///?odbc_connect=SERVER%3Dsql7%3BPWD%3Ds3cret")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("port", [0, 65_536, 99_999])
def test_a_port_that_is_none_is_not_taken_modulo(port: int) -> None:
    with pytest.raises(BadSource, match="expected a port from 1 to 65535"):
        database_url(f"postgresql://me:s3cret@localhost:{port}/sales")


@pytest.mark.parametrize("name", ["ssl_ca", "ssl_cert", "ssl_key"])
async def test_a_file_that_is_not_there_is_named(name: str) -> None:
    database = Database(database_url(f"mysql://me:s3cret@127.0.0.1:1/sales?{name}=/no/such"))
    with pytest.raises(BadSource, match=f"{name}: /no/such: No such file or directory"):
        async with database.connected():
            pass
