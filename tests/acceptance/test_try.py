"""What `make run` starts: one daemon with its page, on private servers, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from urllib.request import Request, urlopen

from tests.support.stack import TOKEN, running_stack


async def test_the_stack_to_try_starts_with_a_page_and_a_token() -> None:
    async with running_stack("store", page=True) as stack:
        asked = Request(f"http://{stack.page}/api/messages", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = await asyncio.to_thread(urlopen, asked, timeout=20)
        with answer:
            assert json.load(answer)["messages"] == []


async def test_ctrl_c_prints_no_traceback() -> None:
    """A message arrives at this moment, and all processes of the terminal get the signal."""
    up = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.up",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert up.stdout is not None
    said = await up.stdout.readuntil(b"Ctrl-C stops")
    page = re.search(rb"page +http://(\S+)", said)
    assert page
    message = json.dumps({"delay": 0, "body": "x"}).encode()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    asked = Request(f"http://{page[1].decode()}/api/messages", message, headers)
    (await asyncio.to_thread(urlopen, asked, timeout=20)).close()
    os.killpg(up.pid, signal.SIGINT)
    rest, _ = await up.communicate()
    assert (up.returncode, b"Traceback" in rest) == (0, False), rest.decode()
    assert rest.rstrip().endswith(b"stopped; the broker, the database and their data are gone."), rest.decode()
