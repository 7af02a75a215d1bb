"""Changes over HTTP, with a stand-in for the daemon: their tokens, sessions and names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from delayer.format.refusal import NO_EDITS, RetryEdits
from delayer.set_aside.messages import Result
from tests.unit.http.inside import TOKEN, Inside, served


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Content_Length": "9999999"}, 413),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({"Origin": "https://evil.example"}, 403),
        ({}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {TOKEN}", "Content_Type": "text/plain"}, 400),
        ({"Authorization": f"Bearer {TOKEN}"}, 200),
    ],
    ids=range(8),
)
async def test_changes_need_the_token(headers: dict[str, str], status: int) -> None:
    inside = Inside()
    async with served(inside) as web:
        answer = await web.post("/actions/refused", {"verb": "retry", "id": "id-1"}, **headers)
        assert answer.status == status, answer.text
        who = "a program (token ops, http, 127.0.0.1)"
        assert inside.done == ([("refused retry", frozenset({"id-1"}), who)] if status == 200 else [])


@pytest.mark.parametrize(
    ("form", "mend"),
    [
        ({}, NO_EDITS),
        ({"delay": " 10s ", "set_header": "", "drop_header": ""}, RetryEdits.of(10_000, {}, [], {})),
        ({"set_header": ["tries:int=3", "who=me"], "drop_header": ["x-dealy", "b"]},
         RetryEdits.of(None, {"tries": 3, "who": "me"}, [b"x-dealy", b"b"], {})),
        ({"delay": "soon"}, "delay: expected a duration"),
        ({"delay": ["1s", "2s"]}, "delay: expected once"),
        ({"set_header": "tries:int=x"}, "set_header: tries: expected a value of type int"),
        ({"set_headers": "a=b"}, "Unknown field"),
    ],
    ids=str,
)  # fmt: skip
async def test_a_retry_of_refused_messages_fixes_headers(form: dict[str, Any], mend: RetryEdits | str) -> None:
    inside = Inside()
    async with served(inside) as web:
        headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
        answer = await web.post("/actions/refused", {"verb": "retry", "id": "id-1", **form}, **headers)
        if isinstance(mend, str):
            assert (answer.status, inside.done) == (400, [])
            assert mend in answer.text
        else:
            assert answer.json == {"heading": "Dropped: 1 of 1", "done": 1, "lines": ["one stays"], "found": {}}
            assert inside.mends == [mend]


@pytest.mark.parametrize(
    ("said", "who"),
    [
        ("nightly-job", "nightly-job"),
        ("x" * 200, "x" * 80),
        ("a\tb\x1b[2J", "ab2J"),
        (" ", "a program"),
        ("ada (token ops, page, 10.0.0.1)", "ada token ops, page, 10.0.0.1"),
    ],
)
async def test_a_program_names_its_user(said: str, who: str) -> None:
    inside = Inside()
    async with served(inside) as web:
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Delayer-Who": said}
        await web.post("/actions/refused", {"verb": "retry", "id": "id-1"}, **headers)
        assert [one for _, _, one in inside.done] == [f"{who} (token ops, http, 127.0.0.1)"]


async def test_a_session_is_a_protected_cookie() -> None:
    inside = Inside()
    async with served(inside) as web:
        assert (await web.post("/login", {"who": "ada", "token": "wrong"})).status == 403
        assert (await web.post("/login", {"who": "", "token": TOKEN})).status == 400
        answer = await web.post("/login", {"who": "ada (token root, page）", "token": TOKEN})
        assert answer.status == 303
        assert TOKEN not in str(answer)
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(re.split("; ?", cookie))
        assert cookie.startswith(f"delayer_session_{web.address.rpartition(':')[2]}=")
        session = {"Cookie": cookie.partition(";")[0]}
        asked = await web.post("/actions/refused", {"verb": "drop", "id": "id-1 $(reboot)"}, **session)
        assert (asked.status, "Drop 1 message?" in asked.text, inside.done) == (200, True, []), (
            "a person is asked first"
        )
        assert "&lt;script&gt;alert(1)&lt;/script&gt;, x-delay: " in asked.text, (
            "where it came in, and why it is refused"
        )
        for path, id in (("refused", "id-1"), ("strays", "s-1")):
            done = await web.post(f"/actions/{path}", {"verb": "drop", "id": id, "confirmed": "yes"}, **session)
            assert (done.status, done.headers["location"]) == (303, f"/{path}")
            assert "Dropped: 1 of 1" not in (await web.get(f"/{path}")).text, "for another client"
            assert "Dropped: 1 of 1" in (await web.get(f"/{path}", **session)).text
            assert "Dropped: 1 of 1" not in (await web.get(f"/{path}", **session)).text, "once"
        who = "ada token root, page (token ops, page, 127.0.0.1)"
        assert inside.done == [("refused drop", frozenset({"id-1"}), who), ("strays drop", frozenset({"s-1"}), who)]
        await web.post("/logout", {}, **session)
        assert (await web.post("/actions/refused", {"verb": "drop", "id": "id-1"}, **session)).status == 403


async def test_refused_clients_do_not_query_the_broker() -> None:
    inside = Inside()
    async with served(inside) as web:
        form = {"verb": "drop", "id": "id-1"}
        for more, status, looks in (
            ({}, 403, 1), ({"Authorization": "Bearer wrong"}, 401, 1), ({"Authorization": f"Bearer {TOKEN}"}, 200, 2),
        ):  # fmt: skip
            await web.get("/metrics")
            answer = await web.post("/actions/refused", form, **more)
            await web.get("/metrics")
            assert (answer.status, inside.looks) == (status, looks)
            assert ("found one that is not in" in answer.text) == ("wrong" in str(more))


async def test_reads_of_refused_messages_are_shared_for_seconds() -> None:
    inside = Inside()
    looks = []

    async def look(_name: str, limit: int) -> Result:
        looks.append(limit)
        return Result(len(looks))

    inside.look_aside = look  # type: ignore[method-assign]
    async with served(inside) as web:
        for _ in range(5):
            assert (await web.get("/refused")).status == 200
        assert len(looks) == 1
        await web.post("/actions/refused", {"verb": "retry", "id": "id-1"}, Authorization=f"Bearer {TOKEN}")
        assert "the first 0 are shown" in (await web.get("/refused")).text
        assert len(looks) == 2, "a change looks again"
