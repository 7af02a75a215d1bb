"""The page in a real browser, on real servers, for the tests of it. Needs Debian's chromium (`.ci/setup browser`);
without it they are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.own_vhost import OwnVhost
from tests.support.daemon import answered
from tests.support.raw import Inbox, Raw
from tests.support.web import Web, tokens_file

playwright = pytest.importorskip("playwright.async_api")

CHROMIUM = shutil.which("chromium")
TOKEN = "open-sesame-open-sesame"
HOUR = 3_600_000
PAGES = ("/", "/waiting", "/held", "/refused", "/schedules", "/audit-log", "/login")

NEEDS_CHROMIUM = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: `.ci/setup browser`"),
    pytest.mark.deadline(120),
]


@dataclass
class Shown:
    """A running daemon and a browser in front of it."""

    web: Web
    raw: Raw
    inbox: Inbox
    browser: Any
    config: Path
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def base(self) -> str:
        return f"http://{self.web.address}"

    async def tab(self, **more: Any) -> Any:
        """A new tab; its requests and errors are recorded."""
        context = await self.browser.new_context(base_url=self.base, **more)
        page = await context.new_page()
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        return page

    async def unlock(self, page: Any, who: str = "ada") -> None:
        await page.goto("/login")
        await page.get_by_label("Who you are").fill(who)
        await page.get_by_label("A token").fill(TOKEN)
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_role("button", name="Sign out").wait_for()

    async def waiting(self, *filters: str) -> list[dict[str, Any]]:
        return list((await answered(self.config, "list", *filters))["messages"])

    async def rows(self, aside: str) -> list[dict[str, Any]]:
        """The held or refused messages."""
        return list((await answered(self.config, aside, "list"))["messages"])

    async def acts(self) -> list[dict[str, Any]]:
        return list(await answered(self.config, "audit-log"))


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A browser."""
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield browser
        await browser.close()


@asynccontextmanager
async def shown(place: OwnVhost, store: str, tmp_path: Path) -> AsyncIterator[Shown]:
    config = tmp_path / "delayer.toml"
    place.write(config, "store", {"store": {"url": store}})
    environ = place.environ("store", store) | {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKENS_FILE": tokens_file(TOKEN)}
    async with place.working(environ) as (daemon, raw, inbox), chromium() as browser:
        web = await Web.of(daemon)
        this = Shown(web, raw, inbox, browser, config)
        yield this
        assert not this.complaints, this.complaints
        strangers = [url for url in this.asked if not url.startswith((this.base, "data:"))]
        assert not strangers, strangers
        assert await daemon.stop() == 0
        assert not [one for one in daemon.events if one["level"] == "error"], daemon.tail()


async def result(page: Any) -> str:
    """The notice on the list after a change."""
    return str(await page.locator(".notice strong").inner_text())
