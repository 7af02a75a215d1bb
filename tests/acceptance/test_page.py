"""The page in a real browser, on real servers: every action, hostile messages, and the rights of programs. Also on a
telephone, with the keyboard, and without scripts.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.own_vhost import OwnVhost, delayed, unreadable
from tests.acceptance.page import HOUR, NEEDS_CHROMIUM, PAGES, TOKEN, result, shown
from tests.support.place import eventually
from tests.support.raw import Message, Props, number, text

pytestmark = NEEDS_CHROMIUM
HOSTILE = [
    '<script>window.hacked=1</script>',
    '"><img src=x onerror=window.hacked=1>',
    "'onmouseover='window.hacked=1",
    "</textarea></pre></code><svg/onload=window.hacked=1>",
    "javascript:window.hacked=1",
    "{{7*7}}${7*7}<%=7*7%>",
    "<iframe src=//evil.example>",
    "<a hx-get=/metrics hx-trigger=load>x</a>",
    "\u202eevil\u200b\x00\x1b[31m",
    "<style>*{display:none}</style>",
    "&lt;b&gt;&#x3c;script&#x3e;",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
]  # fmt: skip


@pytest.mark.words
async def test_every_action(place: OwnVhost, store: str, tmp_path: Path) -> None:
    async with shown(place, store, tmp_path) as this:
        await this.raw.publish(*(delayed(f"later {n}", (5 + n) * HOUR) for n in range(8)))
        await this.raw.publish(*(delayed(f"lost {n}", 100, through="in.missing") for n in range(3)))
        await this.raw.publish(
            delayed("keyed", HOUR, under="order-4711"), *(unreadable(f"refused {n}") for n in range(3))
        )
        await eventually(this.waiting, lambda rows: len(rows) == 9)
        page = await this.tab()
        # Without a token there is nothing to press.
        await page.goto("/waiting")
        assert await page.get_by_role("button", name="Cancel").count() == 0
        await page.goto("/login")
        await page.get_by_label("Who you are").fill("eve")
        await page.get_by_label("A token").fill("wrong")
        await page.get_by_role("button", name="Sign in").click()
        assert "No token with the role" in await page.get_by_role("alert").inner_text()
        this.complaints.clear()  # the browser's own word for that answer's 403
        await this.unlock(page)

        await page.goto("/waiting")
        rows = await this.waiting()
        await page.get_by_label(f"Choose {rows[1]['id']}").check()
        await page.get_by_label(f"Choose {rows[2]['id']}").check()
        await page.get_by_role("button", name="Cancel", exact=True).click()
        assert await page.locator("h1").inner_text() == "Cancel 2 messages?"
        facts = await page.locator(".facts").inner_text()
        assert all(f"{row['id']}\nout / inbox, due 2" in facts for row in rows[1:3])
        assert len(await this.waiting()) == 9, "asked first"
        await page.get_by_role("button", name="Cancel them").click()
        assert await result(page) == "Cancelled: 2 of 2"
        assert len(await this.waiting()) == 7

        await page.goto("/waiting")
        moved = (await this.waiting())[-1]
        await page.get_by_label(f"Choose {moved['id']}").check()
        await page.locator("#at").fill("2h")
        await page.get_by_role("button", name="Reschedule", exact=True).click()
        assert await result(page) == "Rescheduled: 1 of 1"
        found = next(row for row in await this.waiting() if row["id"].split("@")[0] == moved["id"].split("@")[0])
        assert found["due_ms"] < moved["due_ms"]

        # One message, found by its key, and moved by its page.
        await page.goto("/waiting")
        await page.get_by_label("Key (x-delay-key)").fill("order-4711")
        await page.get_by_role("button", name="Filter").click()
        await page.locator("tbody a").click()
        assert "keyed" in await page.locator("pre").inner_text()
        await page.locator("#by").fill("30m")
        await page.get_by_role("button", name="Reschedule").click()
        assert await result(page) == "Rescheduled: 1 of 1"
        (row,) = await this.waiting("--delay-key", "order-4711")
        await page.goto("/")
        await page.goto("/waiting")
        await page.get_by_label("A message by its id").fill(row["id"])
        await page.get_by_role("button", name="Show").click()
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_role("button", name="Cancel it").click()
        assert await result(page) == "Cancelled: 1 of 1"

        # All messages of a filter: counted, confirmed, done.
        await page.goto("/waiting?due_after=9h")
        await page.locator("#all-by").fill("1h")
        await page.get_by_role("button", name="Reschedule them…").click()
        assert re.fullmatch(r"Reschedule \d messages by 1h\?", await page.locator("h1").inner_text())
        await page.get_by_role("button", name="Reschedule them").click()
        assert (await result(page)).startswith("Rescheduled: ")
        # The action applies to the counted messages: it keeps the absolute times that the words meant at the count.
        await page.goto("/waiting?due_before=90d")
        await page.get_by_role("button", name="Cancel them…").click()
        fixed = await page.locator("input[name=due_before]").get_attribute("value")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fixed)
        assert fixed in await page.locator(".facts").inner_text()
        await page.goto("/waiting")
        await page.get_by_role("button", name="Cancel them…").click()
        assert await page.locator("h1").inner_text() == "Cancel 6 messages?"
        assert len(await this.waiting()) == 6, "asked first"
        # Without a filter the operator must type the number.
        await page.locator("#typed").fill("5")
        await page.get_by_role("button", name="Cancel them").click()
        assert await page.get_by_role("alert").inner_text() == "Expected 6, found 5."
        assert len(await this.waiting()) == 6
        await page.locator("#typed").fill("6")
        await page.get_by_role("button", name="Cancel them").click()
        assert await result(page) == "Cancelled: 6"
        assert await this.waiting() == []

        await page.goto("/held")
        assert (
            "NO_ROUTE" in await page.locator("tbody").last.inner_text()
            or "404" in await page.locator("tbody").last.inner_text()
        )
        await page.locator(".list tbody input").nth(0).check()
        await page.get_by_role("button", name="Try again now").click()
        assert await result(page) == "To be tried again now: 1 of 1"
        await page.goto("/held")
        await page.get_by_label("All of this page").check()
        assert await page.locator(".list tbody input:not(:checked)").count() == 0
        await page.get_by_role("button", name="Drop", exact=True).click()
        await page.get_by_role("button", name="Drop them").click()
        assert await result(page) == "Dropped: 3 of 3"

        await page.goto("/refused")
        assert "expected" in await page.locator("tbody").last.inner_text()
        await page.get_by_text("Properties and headers").first.click()
        assert "x-delay (string)" in await page.locator("tbody dl").first.inner_text()
        await page.locator(".list tbody input").nth(0).check()
        await page.get_by_role("button", name="Publish again").click()
        assert await result(page) == "Published again: 1 of 1"
        assert "Refused again within 2 s: 1." in await page.get_by_role("status").inner_text()
        await page.goto("/refused")
        await page.locator("tr", has_text="refused 1").locator("input").check()
        await page.get_by_label("Set the delay").fill("5h")
        await page.get_by_role("button", name="Publish again").click()
        assert "Refused again within 2 s: 0." in await page.get_by_role("status").inner_text()
        (mended,) = await eventually(this.waiting, lambda rows: len(rows) == 1)
        assert mended["message_id"] == "refused 1"
        await page.goto("/refused")
        await page.get_by_label("All of this page").check()
        assert await page.locator(".list tbody input:not(:checked)").count() == 0
        await page.get_by_role("button", name="Drop", exact=True).click()
        await page.get_by_role("button", name="Drop them").click()
        assert await result(page) == "Dropped: 2 of 2"
        assert await this.rows("refused") == []

        await page.get_by_role("link", name="Audit log").click()
        assert "ada (token ops, page, 127.0.0.1)" in await page.locator("tbody").last.inner_text()
        assert {one["who"] for one in await this.acts()} == {"ada (token ops, page, 127.0.0.1)"}
        assert len(await this.acts()) == 11
        await page.get_by_role("button", name="Sign out").click()
        await page.goto("/waiting")
        assert await page.get_by_role("button", name="Cancel").count() == 0


async def test_the_enter_key_and_input_errors(place: OwnVhost, store: str, tmp_path: Path) -> None:
    """Enter in a field starts the field's action, unless it cannot be undone; an error has no consequences."""
    async with shown(place, store, tmp_path) as this:
        await this.raw.publish(*(delayed(f"later {n}", (5 + n) * HOUR) for n in range(2)))
        await this.raw.publish(delayed("lost", 100, through="in.missing"), unreadable("refused"))
        rows = await eventually(this.waiting, lambda rows: len(rows) == 2)
        page = await this.tab()
        await this.unlock(page)
        for path in (f"/message/{rows[0]['id']}", "/waiting"):
            await page.goto(path)
            if path == "/waiting":
                await page.get_by_label(f"Choose {rows[1]['id']}").check()
            await page.locator("#at").fill("20h")
            await page.keyboard.press("Enter")
            assert await result(page) == "Rescheduled: 1 of 1"
        await page.goto("/waiting")
        await page.locator("#all-by").fill("1h")
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="Reschedule 2 messages by 1h?").wait_for()

        (lost,) = await this.rows("held")
        await page.goto(f"/message/{lost['id']}")
        await page.locator("#by").fill("2h")
        await page.keyboard.press("Enter")
        assert await result(page) == "Rescheduled: 1 of 1", "and not tried now"
        plain = await this.tab(java_script_enabled=False)
        await this.unlock(plain)
        for path in ("/held", "/refused"):
            for tab in (page, plain):
                await tab.goto(path)
                await tab.locator(".list tbody input").first.check()
                await tab.keyboard.press("Enter")
                if tab is plain:
                    await tab.wait_for_url("**?id=*")  # the list once more
                assert await tab.locator("h1").inner_text() == f"{path[1:].capitalize()} messages"
        assert len(await this.acts()) == 3
        # With nothing chosen, the page says so immediately.
        await page.goto("/waiting")
        await page.locator("#at").fill("2h")
        await page.get_by_role("button", name="Reschedule", exact=True).click()
        assert await page.get_by_role("alert").inner_text() == "Choose at least one message."
        assert await page.locator("#at").input_value() == "2h"
        # An invalid instant: the choice and the text are still there.
        rows = await this.waiting()
        await page.get_by_label(f"Choose {rows[1]['id']}").check()
        await page.locator("#at").fill("yesterday")
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="Reschedule").wait_for()
        assert 'found "yesterday"' in await page.get_by_role("alert").inner_text()
        this.complaints.clear()  # the browser's own word for that answer's 400
        assert rows[1]["id"] in await page.locator(".facts").inner_text()
        assert await page.locator("#at").input_value() == "yesterday"
        await page.locator("#at").fill("30h")
        await page.keyboard.press("Enter")
        assert await result(page) == "Rescheduled: 1 of 1"
        assert len(await this.acts()) == 4


async def test_content_of_messages_is_shown_as_text(place: OwnVhost, store: str, tmp_path: Path) -> None:
    async with shown(place, store, tmp_path) as this:
        for evil in HOSTILE:
            name = evil.encode()[:200]
            props = Props(
                headers=((b"x-delay", number("I", 5 * HOUR)), (b"x-delay-key", text(evil)), (name[:100], text(evil))),
                message_id=name, content_type=name, app_id=name, delivery_mode=2,
            )  # fmt: skip
            late = Props(headers=((b"x-delay", number("I", 10)), (b"x", text(evil))), message_id=name, delivery_mode=2)
            wrong = Props(headers=((b"x-delay", text(evil)),), message_id=name, delivery_mode=2)
            await this.raw.publish(
                Message("in", name, props, evil.encode()),
                Message("in.missing", name, late, evil.encode()),
                Message("in", name, wrong, evil.encode()),
            )
        await eventually(this.waiting, lambda rows: len(rows) == len(HOSTILE))
        page = await this.tab()
        await this.unlock(page, who=HOSTILE[0])
        rows = await this.waiting()
        held = await this.rows("held")
        assert len(held) == len(HOSTILE)
        messages = [f"/message/{row['id']}" for row in (*rows, *held)]
        forms = [
            f"/waiting?route={evil}&key={evil}&header={evil}" for evil in ("%22%3E%3Cscript%3E", "%3Cimg%20src%3Dx%3E=")
        ]
        answers = {}
        for path in (*PAGES, *messages, *forms):
            answers[path] = await page.goto(path)
            assert answers[path].status < 500, path
            seen = await page.evaluate(
                "() => [window.hacked, document.querySelectorAll('script:not([src]), iframe, svg, img, "
                "meta[http-equiv], main style, [onerror], [onload], [onmouseover], a[href^=javascript]').length]"
            )
            assert seen == [None, 0], (path, seen)
        await page.goto("/waiting")
        text_of = await page.locator("tbody").last.inner_text()
        assert "<script>window.hacked=1</script>" in text_of
        assert "\\u202e" in text_of
        assert "49" not in re.findall(r"\d\d(?=<%)", text_of)
        # Even an injected script would not run.
        blocked = await page.evaluate(
            "() => { const one = document.createElement('script'); one.textContent = 'window.hacked = 2';"
            " document.body.append(one); return window.hacked }"
        )
        assert blocked is None
        assert [one for one in this.complaints if "Content Security Policy" in one]
        this.complaints.clear()
        policy = answers["/"].headers["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'")


async def test_programs_act_only_with_the_token_in_a_header(place: OwnVhost, store: str, tmp_path: Path) -> None:
    async with shown(place, store, tmp_path) as this:
        await this.raw.publish(*(delayed(f"later {n}", 5 * HOUR) for n in range(3)))
        rows = await eventually(this.waiting, lambda rows: len(rows) == 3)
        form = {"verb": "cancel", "id": rows[0]["id"]}
        for more in (
            {}, {"Authorization": "Bearer wrong"}, {"Cookie": "delayer_session=x"},
            {"Authorization": f"Bearer {TOKEN}", "Origin": "https://evil.example"},
            {"Authorization": f"Bearer {TOKEN}", "Sec_Fetch_Site": "cross-site"},
        ):  # fmt: skip
            status = 401 if more.get("Authorization") == "Bearer wrong" else 403
            assert (await this.web.post("/actions/messages", form, **more)).status == status
        assert (await this.web.get(f"/actions/messages?token={TOKEN}&verb=cancel&id={rows[0]['id']}")).status == 405
        assert (await this.web.get("/", Host="evil.example")).status == 421
        for slip in ("rout=in", "route=in&route=out", "after=9", "due_before=soon"):
            assert (await this.web.get(f"/waiting?{slip}")).status == 400
        assert len(await this.waiting()) == 3
        allowed = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
        answer = await this.web.post("/actions/messages", form, **allowed)
        assert (answer.status, answer.json["done"]) == (200, 1)
        again = await this.web.post("/actions/messages", form, **allowed)
        assert again.json["done"] == 0
        for wrong in ({"verb": "hold"}, {"verb": "drop"}, {"verb": "cancel"}, {"verb": "cancel", "id": "x"},
                      {"verb": "reschedule", "id": rows[1]["id"]}):  # fmt: skip
            assert (await this.web.post("/actions/messages", wrong, **allowed)).status == 400
        counted = await this.web.post("/actions/messages", {"verb": "cancel", "route": "in"}, **allowed)
        step = {"next": "nothing was changed; repeat with confirmed=yes"}
        matched = {"heading": "Matched: 2", "matched": 2, "lines": [], "found": {}, "confirmed": False}
        assert counted.json == matched | step
        for slip in ({"rout": "in"}, {"key": ""}, {}, {"route": ["in", "else"]}):
            answer = await this.web.post("/actions/messages", {"verb": "cancel", "confirmed": "yes", **slip}, **allowed)
            assert answer.status == 400, answer.text
        empty = await this.web.post("/actions/messages", {"verb": "cancel", "confirmed": "yes", "route": ""}, **allowed)
        assert empty.json["done"] == 0, "the empty route is one of the routes"
        assert len(await this.waiting()) == 2
        form = {"verb": "cancel", "route": "in", "confirmed": "yes", "counted": "9" * 5_000}
        done = await this.web.post("/actions/messages", form, **allowed)
        assert done.json["done"] == 2
        assert {one["who"] for one in await this.acts()} == {"a program (token ops, http, 127.0.0.1)"}
        assert await asyncio.to_thread(this.config.read_text)


async def test_the_page_fits_a_desk_and_a_telephone(place: OwnVhost, store: str, tmp_path: Path) -> None:
    async with shown(place, store, tmp_path) as this:
        await this.raw.publish(*(delayed(f"order {n}", 20_000 + n * n * 900) for n in range(1500)))
        await this.raw.publish(*(delayed(f"lost {n}", 100, through="in.missing") for n in range(4)))
        await this.raw.publish(
            delayed(json.dumps({"order": 4711, "lines": 3}), HOUR, under="order-4711"), unreadable("{}")
        )
        await eventually(lambda: this.waiting("--delay-key", "order-4711"), lambda rows: len(rows) == 1)
        await this.raw.publish(*(delayed(f"now {n}", n * 20) for n in range(300)))
        (row,) = await this.waiting("--delay-key", "order-4711")
        paths = {"overview": "/", "waiting": "/waiting", "message": f"/message/{row['id']}", "held": "/held",
                 "refused": "/refused", "login": "/login"}  # fmt: skip
        for device, width in (("desk", 1280), ("telephone", 390)):
            page = await this.tab(viewport={"width": width, "height": 900}, timezone_id="Asia/Kolkata")
            await this.unlock(page)
            for name, path in paths.items():
                await page.goto(path)
                if name == "overview":
                    await page.locator("#due-chart canvas").wait_for()
                    await page.locator("#late-chart canvas").wait_for()
                    await _pressed(page)
                if name == "message":
                    assert await page.locator("pre").inner_text() == '{\n  "order": 4711,\n  "lines": 3\n}'
                    assert "GMT+5:30" in await page.locator("time + span").first.inner_text()
                room = await page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
                assert room[0] <= room[1], f"{name} on a {device}: {room}"
                targets = await page.evaluate(
                    "() => [...document.querySelectorAll('button, nav a, input:not([type=hidden], [type=checkbox])')]"
                    ".map(one => one.getBoundingClientRect()).filter(box => box.width && box.height < 40).length"
                )
                assert targets == 0, f"{name} on a {device}: things too small to press"
                if name == "overview":
                    tiles = await page.evaluate(
                        "() => [...document.querySelectorAll('.tiles > div')].map(e => e.offsetTop)"
                    )
                    assert {tiles.count(row) for row in tiles} == {5 if width > 1_000 else 2}, "rows of tiles are full"
            await page.context.close()


async def test_times_count_down_and_tables_are_sortable(place: OwnVhost, store: str, tmp_path: Path) -> None:
    async with shown(place, store, tmp_path) as this:
        await this.raw.publish(*(delayed("x" * n, n * HOUR) for n in (3, 20, 100)))
        rows = await eventually(this.waiting, lambda rows: len(rows) == 3)
        page = await this.tab(timezone_id="Asia/Kolkata")
        await this.unlock(page)
        await page.goto("/waiting")
        bodies = page.locator("tbody [data-label=size]")
        for direction, sizes in (("ascending", ["3 B", "20 B", "100 B"]), ("descending", ["100 B", "20 B", "3 B"])):
            await page.get_by_role("button", name="size").click()
            assert await bodies.all_inner_texts() == sizes
            assert await page.locator("th[aria-sort]").get_attribute("aria-sort") == direction
        assert await page.locator("caption").count() == 0, "the page has the whole list"
        # The clock of the page moves on: the texts follow.
        first = page.locator("[data-at]").last
        text_of = await first.inner_text()
        assert text_of.startswith("in 2 h 59 min")
        await page.evaluate("() => { const now = Date.now; Date.now = () => now() + 3600000 }")
        await page.wait_for_function(
            "() => [...document.querySelectorAll('[data-at]')].pop().textContent.startsWith('in 1 h 59')"
        )
        # The calendar means the reader's own time.
        await page.get_by_label(f"Choose {rows[0]['id']}").check()
        await page.locator("#at + .picker").fill("2031-01-31T08:30:15")
        assert await page.locator("#at").input_value() == "2031-01-31T03:00:15Z"
        await page.get_by_role("button", name="Reschedule", exact=True).click()
        assert await result(page) == "Rescheduled: 1 of 1"
        assert 1_927_594_815_000 in {row["due_ms"] for row in await this.waiting()}
        await page.goto(f"/message/{rows[1]['id']}")
        async with page.expect_download() as download:
            await page.get_by_role("link", name="Download the body").click()
        assert await asyncio.to_thread((await (await download.value).path()).read_bytes) == b"x" * 20
        await this.raw.publish(*(delayed("x", 200 * HOUR) for _ in range(50)))
        await eventually(this.waiting, lambda rows: len(rows) == 50)
        await page.goto("/waiting")
        await page.get_by_role("button", name="size").click()
        assert "not the whole list" in await page.locator("caption").inner_text()


async def _pressed(page: Any) -> None:
    """Each range of the chart can be chosen, and shows itself as chosen."""
    for name in ("Two years", "Two months", "Two days", "The coming hour"):
        button = page.get_by_role("button", name=name)
        await button.click()
        assert await button.get_attribute("aria-pressed") == "true"
        assert await page.locator(".choice [aria-pressed=true]").count() == 1


async def test_with_the_keyboard_and_without_scripts(place: OwnVhost, store: str, tmp_path: Path) -> None:
    async with shown(place, store, tmp_path) as this:
        await this.raw.publish(*(delayed(f"later {n}", 5 * HOUR) for n in range(2)))
        await eventually(this.waiting, lambda rows: len(rows) == 2)
        page = await this.tab()
        await page.goto("/")
        await page.get_by_role("button", name="Two days", pressed=True).wait_for()  # The first range with messages.
        await page.keyboard.press("Tab")
        assert await page.evaluate("() => document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        assert await page.evaluate("() => document.activeElement.id") == "main"
        await page.goto("/login")
        await page.get_by_label("Who you are").focus()
        await page.keyboard.type("ada")
        await page.keyboard.press("Tab")
        await page.keyboard.type(TOKEN)
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Sign out").wait_for()
        await page.goto("/waiting")
        await page.locator(".list tbody input").first.focus()
        await page.keyboard.press("Space")
        await page.get_by_role("button", name="Cancel", exact=True).focus()
        outline = await page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Cancel it").focus()
        await page.keyboard.press("Enter")
        assert await result(page) == "Cancelled: 1 of 1"
        assert outline != "none", "the focus is seen"

        plain = await this.tab(java_script_enabled=False)
        await this.unlock(plain)
        await plain.goto("/")
        assert "Waiting in the store" in await plain.locator("main").inner_text()
        for what in (".chart", ".choice", "figure"):
            assert not await plain.locator(what).first.is_visible(), "no element without a function is visible"
        await plain.get_by_text("The same as a table").click()
        assert await plain.get_by_role("cell", name="in 4 h to 5 h").is_visible()
        await plain.goto("/waiting")
        await plain.locator(".list tbody input").first.check()
        assert not await plain.get_by_label("All of this page").is_visible(), "only with scripts"
        await plain.get_by_role("button", name="Cancel", exact=True).click()
        await plain.get_by_role("button", name="Cancel it").click()
        assert await result(plain) == "Cancelled: 1 of 1"
        assert await this.waiting() == []


async def test_the_figures_refresh_by_themselves(place: OwnVhost, store: str, tmp_path: Path) -> None:
    async with shown(place, store, tmp_path) as this:
        page = await this.tab()
        await page.goto("/")
        tile = page.locator(".tiles dd").first
        assert await tile.inner_text() == "0"
        await page.locator(".tiles").get_by_role("link", name="Held").focus()
        await this.raw.publish(*(delayed(f"later {n}", 5 * HOUR) for n in range(1234)))

        async def said() -> str:
            return str(await tile.inner_text())

        await eventually(said, lambda count: count == "1\u202f234")
        focused = await page.evaluate("() => document.activeElement.textContent")
        assert focused == "Held", "and the keyboard stays where it was"
