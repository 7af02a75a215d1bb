"""The audit's page in a real browser: it fits desktop and phone screens, and makes no network requests. Needs
Debian's chromium (`.ci/setup browser`); without it these tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from delayer.audit import report_html
from tests.acceptance.page import NEEDS_CHROMIUM, chromium
from tests.unit.audit import audit_reports

pytestmark = NEEDS_CHROMIUM

LOOK = """() => {
  const root = document.documentElement;
  return {
    title: document.title, width: root.scrollWidth, room: root.clientWidth,
    charts: [...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width).length,
    foreign: document.querySelectorAll('script, img, iframe, object, embed').length,
    wide: [...document.querySelectorAll('body *')]
      .filter(one => one.getBoundingClientRect().right > root.clientWidth + 1 && !one.closest('.scroll, thead, svg'))
      .map(one => one.outerHTML.slice(0, 200)),
    broken: [...document.querySelectorAll('a')].filter(one => !document.querySelector(one.getAttribute('href'))).length,
  };
}"""


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "telephone"])
async def test_the_audit_page_fits_and_requests_nothing(tmp_path: Path, width: int) -> None:
    file = tmp_path / "audit.html"
    report_html.write(audit_reports.full(), file)
    asked: list[str] = []
    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": width, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(file.as_uri(), wait_until="networkidle")
        seen = await page.evaluate(LOOK)
    assert seen["title"].startswith("delayer audit 2025-11-22"), "no name that came over AMQP ran as a script"
    assert seen["foreign"] == 0
    assert seen["wide"] == []
    assert seen["width"] <= seen["room"], "nothing to scroll sideways for"
    assert seen["charts"] == 9
    assert seen["broken"] == 0, "every link leads somewhere on the page"
    assert asked == [file.as_uri()]
