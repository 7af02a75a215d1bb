"""What `make run` starts: one daemon with its page, on private servers."""

from __future__ import annotations

import asyncio
import json
from urllib.request import Request, urlopen

from tests.support.stack import TOKEN, running_stack


async def test_the_stack_to_try_starts_with_a_page_and_a_token() -> None:
    async with running_stack("store", page=True) as stack:
        asked = Request(f"http://{stack.page}/api/messages", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = await asyncio.to_thread(urlopen, asked, timeout=20)
        with answer:
            assert json.load(answer)["messages"] == []
