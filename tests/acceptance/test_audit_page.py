"""The audit's page in a real browser: it fits a desk and a telephone, and asks nobody for anything. Needs
Debian's chromium (`.ci/setup browser`); without it these tests are skipped."""

from __future__ import annotations

import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from delayer.audit import report_html
from tests.unit.audit import audit_reports

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--force-device-scale-factor=1",
)  # fmt: skip
NOWHERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
WIDE, NARROW = 1280, 390
# Stands around the page and looks at it: the page itself may run nothing.
OBSERVER = """<!doctype html><title>observer</title>
<iframe id=page src=/audit.html style="width:{width}px;height:3000px"></iframe><pre id=seen></pre><script>
page.onload = () => {{
  const inner = page.contentDocument, root = inner.documentElement;
  seen.textContent = JSON.stringify({{
    title: inner.title, width: root.scrollWidth, room: root.clientWidth,
    charts: [...inner.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width).length,
    loaded: page.contentWindow.performance.getEntriesByType('resource').length,
    foreign: inner.querySelectorAll('script, img, iframe, object, embed').length,
    wide: [...inner.querySelectorAll('body *')]
      .filter(one => one.getBoundingClientRect().right > root.clientWidth + 1 && !one.closest('.scroll, thead, svg'))
      .map(one => one.outerHTML.slice(0, 200)),
    links: [...inner.querySelectorAll('a')].filter(one => !inner.querySelector(one.getAttribute('href'))).length,
  }});
}};
</script>"""


@dataclass
class Site:
    """Serves the page and its observer on loopback, and writes down what was asked for."""

    pages: dict[str, str]
    asked: list[str] = field(default_factory=list)
    port: int = 0


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site({"/audit.html": report_html.page(audit_reports.full())})
    site.pages |= {f"/{width}": OBSERVER.format(width=width) for width in (WIDE, NARROW)}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            page = site.pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield site
        server.shutdown()


def browse(directory: Path, url: str, *flags: str) -> str:
    """What chromium prints for ``url``, with a profile of its own."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: `.ci/setup browser`")
    command = [CHROMIUM, *FLAGS, NOWHERE, f"--user-data-dir={directory / 'profile'}", *flags, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("width", [WIDE, NARROW], ids=["desk", "telephone"])
def test_it_fits_and_asks_for_nothing(site: Site, tmp_path: Path, width: int) -> None:
    dom = browse(
        tmp_path,
        f"http://127.0.0.1:{site.port}/{width}",
        "--dump-dom",
        "--virtual-time-budget=10000",
        f"--window-size={width + 60},3200",
    )
    found = re.search(r"<pre id=\"seen\">(.*?)</pre>", dom, re.DOTALL)
    assert found, dom[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert seen["title"].startswith("delayer audit 2025-11-22"), "no name that came over AMQP ran as a script"
    assert (seen["foreign"], seen["loaded"]) == (0, 0)
    assert seen["wide"] == []
    assert seen["width"] <= seen["room"], "nothing to scroll sideways for"
    assert seen["charts"] == 3
    assert seen["links"] == 0, "every link leads somewhere on the page"
    assert [path for path in site.asked if path != "/favicon.ico"] == [f"/{width}", "/audit.html"]
