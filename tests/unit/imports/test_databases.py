"""A source's URL: the text shown and stored contains the database but never the password, wherever it is in the URL."""

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


HERE = "me:s3cret@127.0.0.1:1/sales"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sqlite:///x", ""), ("nonsense://db/sales", ""), (f"mysql+pymysql://{HERE}", ""),
        (f"postgresql://{HERE}?nonsense=s3cret", ""), (f"mysql://{HERE}?ssl=true", ""),
        ("mssql:///?odbc_connect=SERVER%3Dsql7%3BPWD%3Ds3cret", "found odbc_connect"),
        # A driver must not take these modulo 65,536.
        *((f"postgresql://me:s3cret@localhost:{n}/sales", "a port from 1 to 65535") for n in (0, 65_536, 99_999)),
    ],
)  # fmt: skip
async def test_an_invalid_url_is_refused(url: str, why: str) -> None:
    with pytest.raises(BadSource, match=f"the source's URL.*{why}") as raised:
        async with Database(database_url(url)).connected():
            pass
    assert "s3cret" not in str(raised.value)


async def test_urls_of_other_tools_are_read() -> None:
    url = database_url("postgres://me@127.0.0.1:1/sales?sslmode=require")
    assert url.render_as_string() == "postgresql+asyncpg://me@127.0.0.1:1/sales?ssl=require"
    with pytest.raises(SourceLost):
        async with Database(url).connected():
            pass
