"""The pictures of the page in docs/page: `python -m tests.support.pictures` renders them again.

Private servers and a daemon get a small shop's backlog, and traffic for a minute. Needs Debian's chromium.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractExchange
from playwright.async_api import Browser, async_playwright

from tests.support.stack import TOKEN, Stack, running_stack

PAGE: Final = Path(__file__).parents[2] / "docs" / "page"
ROUTES: Final = ({"from": "orders.in", "to": "orders.out"}, {"from": "mail.in", "to": ""})
SCHEDULE: Final = (
    *("schedule", "add", "report", "--cron", "0 7 * * MON-FRI", "--zone", "Europe/Berlin"),
    *("--to", "orders.out", "--routing-key", "orders.eu"),
)
ORDERS: Final = 900
MINUTE: Final = 60
HOUR: Final = 3600
RATE: Final = 15
"""Messages a second while the rates of the last minute build up."""


async def send(exchange: AbstractExchange, key: str, seconds: float | str, body: str, **headers: str) -> None:
    delay = seconds if isinstance(seconds, str) else int(seconds * 1000)
    named = {"x-delay": delay} | {name.replace("_", "-"): value for name, value in headers.items()}
    message = aio_pika.Message(body.encode(), headers=named, delivery_mode=2)
    await exchange.publish(message, key)


def region(number: int) -> str:
    return "orders.us" if number % 3 == 1 else "orders.eu"


async def fill(stack: Stack) -> None:
    """Send everything that the pictures show, and traffic for a minute."""
    async with await aio_pika.connect(stack.broker_url) as connection:
        channel = await connection.channel()
        out = await channel.declare_exchange("orders.out", aio_pika.ExchangeType.TOPIC, durable=True)
        for name in ("shipping", "mail.inbox"):
            await channel.declare_queue(name, durable=True)
        await (await channel.get_queue("shipping")).bind(out, "#")
        orders, mail = [await channel.get_exchange(name) for name in ("orders.in", "mail.in")]
        for number in range(ORDERS):
            key = {"x_delay_key": f"order-{4711 + number}"} if number % 20 == 7 else {}
            seconds = 2 * MINUTE + 6 * HOUR * (number / ORDERS) ** 2
            await send(orders, region(number), seconds, f'{{"order":{4711 + number}}}', **key)
        for number in range(60):
            await send(mail, "mail.inbox", 2 * HOUR, f"reminder {number}")
        for queue, messages in (("mail.gone", 5), ("mail.lost", 4)):
            for number in range(messages):
                await send(mail, queue, 0.1, f"reminder {number}")
        for number in range(3):
            await send(orders, region(number), "soon", f"order {number}")
        for number in range(RATE * MINUTE):
            await send(orders, region(number), 1 + number % 4, f'{{"order":{number}}}')
            await asyncio.sleep(1 / RATE)


async def take(browser: Browser, stack: Stack, name: str, path: str, height: int, **more: Any) -> None:
    """Take one picture as a user who has signed in. ``height``: 0 for the whole page."""
    size = {"width": 1280, "height": height or 900} | more.pop("size", {})
    where = {"timezone_id": "Europe/Berlin", "locale": "en-GB", "base_url": f"http://{stack.page}"}
    page = await (await browser.new_context(viewport=size, **where, **more)).new_page()
    await page.goto("/login")
    await page.get_by_label("Who you are").fill("ada")
    await page.get_by_label("A token").fill(TOKEN)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("button", name="Sign out").wait_for()
    if path == "a message":
        await page.goto("/waiting?key=order-4718")
        await page.locator("tbody a").click()
    else:
        await page.goto(path)
    await page.wait_for_load_state("networkidle")
    await page.screenshot(path=PAGE / f"{name}.png", full_page=not height)


async def main() -> None:
    async with running_stack("store", ROUTES, page=True) as stack, async_playwright() as driver:
        await stack.delayer(*SCHEDULE)
        await fill(stack)
        browser = await driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        await take(browser, stack, "overview", "/", 0)
        await take(browser, stack, "waiting", "/waiting", 900)
        await take(browser, stack, "message", "a message", 0)
        await take(browser, stack, "held-dark", "/held", 700, color_scheme="dark")
        await take(browser, stack, "telephone-dark", "/", 1500, size={"width": 390}, color_scheme="dark")
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
