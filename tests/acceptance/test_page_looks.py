"""The page in a real browser, on real servers: on a desk and on a telephone, by day and by night, with the
keyboard and without scripts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.page import (
    HOUR,
    PICTURES,
    TOKEN,
    Shown,
    keep,
    keyed,
    pytestmark,
    result,
    shown,
    unreadable,
)
from tests.acceptance.place import Place, delayed
from tests.faults.place import eventually

__all__ = ["pytestmark"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_desk_and_a_telephone(place: Place, store: str, tmp_path: Path, scheme: str) -> None:
    async with shown(place, store, tmp_path) as this:
        await this.raw.publish(*(delayed(f"order {n}", 20_000 + n * n * 900) for n in range(1500)))
        await this.raw.publish(*(delayed(f"lost {n}", 100, through="in.missing") for n in range(4)))
        await this.raw.publish(keyed(json.dumps({"order": 4711, "lines": 3}), "order-4711"), unreadable("{}"))
        await eventually(lambda: this.waiting("--key", "order-4711"), lambda rows: len(rows) == 1)
        await this.raw.publish(*(delayed(f"now {n}", n * 20) for n in range(300)))
        (row,) = await this.waiting("--key", "order-4711")
        paths = {"overview": "/", "waiting": "/waiting", "message": f"/message/{row['id']}", "held": "/held",
                 "refused": "/refused", "login": "/login"}  # fmt: skip
        if PICTURES:  # charts with something in them
            await eventually(lambda: _rates(this), lambda rates: sum(rates) > 0)
        for device, width in (("desk", 1280), ("telephone", 390)):
            page = await this.tab(viewport={"width": width, "height": 900}, color_scheme=scheme)
            await this.unlock(page)
            for name, path in paths.items():
                await page.goto(path)
                if name == "overview":
                    await page.locator("#due-chart canvas").wait_for()
                    await page.locator("#late-chart canvas").wait_for()
                    await _pressed(page)
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
                if PICTURES:
                    await keep(page, f"{name}-{device}-{scheme}.png", width)
            await page.context.close()


async def _rates(this: Shown) -> list[float]:
    return list((await this.web.get("/api/live")).json["series"]["released"])


async def _pressed(page: Any) -> None:
    """Each range of the chart can be chosen, and shows itself as chosen."""
    for name in ("Two years", "Two months", "Two days", "The coming hour"):
        button = page.get_by_role("button", name=name)
        await button.click()
        assert await button.get_attribute("aria-pressed") == "true"
        assert await page.locator(".choice [aria-pressed=true]").count() == 1


async def test_with_the_keyboard_and_without_scripts(place: Place, store: str, tmp_path: Path) -> None:
    async with shown(place, store, tmp_path) as this:
        await this.raw.publish(*(delayed(f"later {n}", 5 * HOUR) for n in range(2)))
        await eventually(this.waiting, lambda rows: len(rows) == 2)
        page = await this.tab()
        await page.goto("/")
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
        await page.get_by_role("button", name="Lock").wait_for()
        await page.goto("/waiting")
        await page.locator("tbody input").first.focus()
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
            assert not await plain.locator(what).first.is_visible(), "nothing that is empty or does nothing"
        await plain.get_by_text("The same as a table").click()
        assert await plain.get_by_role("cell", name="in 4 h to 5 h").is_visible()
        await plain.goto("/waiting")
        await plain.locator("tbody input").first.check()
        assert not await plain.get_by_label("All of this page").is_visible(), "only with scripts"
        await plain.get_by_role("button", name="Cancel", exact=True).click()
        await plain.get_by_role("button", name="Cancel it").click()
        assert await result(plain) == "Cancelled: 1 of 1"
        assert await this.waiting() == []


_DOTS = """() => {
  const canvas = document.querySelector("#late-chart canvas");
  if (!canvas) return 0;
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--second").trim();
  const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) found += data[at] === r && data[at + 1] === g && data[at + 2] === b;
  return found;
}"""


async def test_the_figures_move_by_themselves(place: Place, store: str, tmp_path: Path) -> None:
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
        # One message alone is a dot: a line would need two.

        async def dots() -> int:
            return int(await page.evaluate(_DOTS))

        assert await dots() == 0
        await this.raw.publish(delayed("now", 100))
        await eventually(dots, lambda count: count > 10)
