"""The dump that docs/importing.md tells people to make, made by a real broker, and imported.

Debian's brokers have no delayed-message plugin: its table is stood in for by one of the same name and shape, with
messages that the broker's own code makes, in the form of its version.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from delayer.broker.admin import Admin
from delayer.core.topology import Exchange, Topology
from tests.integration.cli import Run
from tests.integration.test_store_lane import sql
from tests.support.rabbitmq import RabbitMQ
from tests.support.raw import Props, array, number, text
from tests.support.rows import conserved

DOCUMENT = Path(__file__).parents[2] / "docs" / "importing.md"
DUE_MS = 4_000_000_000_000
# What the plugin keeps: a row a message in a table that is named after the node, and an index beside it.
PLANT = """
Content = fun(Headers, Body) ->
    rabbit_basic:build_content({'P_basic', <<"text/plain">>, undefined, Headers, 2, undefined, undefined, undefined,
        <<"60000">>, <<"m-1">>, undefined, undefined, undefined, undefined, undefined}, Body) end,
Message = fun(X, Key, C) ->
    case code:ensure_loaded(mc_amqpl) of
        {module, _} -> {ok, M} = mc_amqpl:message(X, Key, C), M;
        _ -> {ok, M} = rabbit_basic:message(X, Key, C), {delivery, false, false, self(), M, undefined, noflow}
    end end,
Row = fun(N, VHost, Name, Key, Headers, Body) ->
    X = {resource, VHost, exchange, Name},
    Exchange = setelement(2, erlang:make_tuple(13, undefined, [{1, exchange}]), X),
    {delay_entry, {delay_key, 4000000000000 + N, Exchange}, Message(X, Key, Content(Headers, Body)), make_ref()} end,
Plant = fun() ->
    Table = list_to_atom("rabbit_delayed_message" ++ atom_to_list(node())),
    Index = list_to_atom(atom_to_list(Table) ++ "_index"),
    ets:new(Table, [named_table, public, bag, {keypos, 2}]),
    ets:new(Index, [named_table, public, ordered_set]),
    ets:insert(Index, {4000000000000, x}),
    ets:insert(Table, [
        Row(0, <<"VHOST">>, <<"orders.delayed">>, <<"orders.eu">>, [{<<"x-delay">>, signedint, 5000}], <<0,255,10,13>>),
        Row(1, <<"VHOST">>, <<"mail.delayed">>, <<"outbox">>, [{<<"x-delay">>, longstr, <<"7">>},
            {<<"CC">>, array, [{longstr, <<"copy">>}]}, {<<"BCC">>, array, [{longstr, <<"blind">>}]}], <<"mail">>),
        Row(2, <<"VHOST">>, <<"orders.delayed">>, <<"same">>, [], <<>>),
        Row(2, <<"VHOST">>, <<"orders.delayed">>, <<"same">>, [], <<>>),
        Row(3, <<"another">>, <<"orders.delayed">>, <<"k">>, [], <<"x">>)]),
    receive stop -> ok end end,
register(delayer_planted, spawn(Plant)), timer:sleep(500), ok.
"""


def one_liner() -> str:
    """What stands between the quotes in the documentation."""
    found = re.search(r"rabbitmqctl eval --silent '(.*?)' > dump.txt", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


async def test_the_documented_dump_of_a_real_broker(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str, tmp_path: Path
) -> None:
    if not rabbitmq.knows_old_messages:
        pytest.skip("RabbitMQ 4.3 cannot run the plugin: a dump is made before the upgrade")
    name = vhost.rpartition("/")[2]
    await asyncio.to_thread(rabbitmq.ctl, "eval", PLANT.replace("VHOST", name))
    try:
        dump = tmp_path / "dump.txt"
        dump.write_text(await asyncio.to_thread(rabbitmq.ctl, "eval", one_liner()))
    finally:
        await asyncio.to_thread(rabbitmq.ctl, "eval", "delayer_planted ! stop, ok.")
    assert dump.read_text().split("\n")[-2] == "5"
    async with await Admin.connect(vhost) as admin:
        await admin.declare(Topology((Exchange("orders.delayed", "topic"), Exchange("orders.out", "topic"))))
    delayer("db", "upgrade")
    route = json.dumps([{"from": "orders.delayed", "to": "orders.out"}])
    args = ("import", "delayed-exchange", "run", str(dump), "--exchange", "mail.delayed=mail.out", "--yes", "--json")
    report = json.loads(delayer(*args, expect=1, DELAYER_ROUTE=route).stdout)
    assert (report["parked"], report["held"]) == (3, 1)
    assert report["left"] == {"of virtual host 'another'": 1}
    async with sql(database) as admin:
        rows = await admin.fetch("SELECT * FROM message ORDER BY due_at, id")
        [held] = await admin.fetch("SELECT * FROM held")
        await conserved(admin)
    assert [(row["due_at"] - DUE_MS, row["exchange"], row["routing_key"], row["body"]) for row in rows] == [
        (0, b"orders.delayed", b"orders.eu", b"\0\xff\n\r"),
        (2, b"orders.delayed", b"same", b""),
        (2, b"orders.delayed", b"same", b""),
    ]
    assert {(row["to_exchange"], row["to_key"]) for row in rows} == {
        (b"orders.out", b"orders.eu"), (b"orders.out", b"same")
    }  # fmt: skip
    bare = Props(content_type=b"text/plain", delivery_mode=2, expiration=b"60000", message_id=b"m-1")
    assert Props.decode(rows[0]["properties"]) == Props(
        **{**bare.__dict__, "headers": ((b"x-delay", number("I", 5000)),)}
    )
    assert (held["to_exchange"], held["to_key"], held["body"]) == (b"mail.out", b"outbox", b"mail")
    headers = dict(Props.decode(held["properties"]).headers or ())
    assert headers[b"x-delay"] == text("7")
    # The broker took BCC away when the message came in; it acts again.
    assert (headers[b"CC"], headers[b"BCC"]) == (array(text("copy")), array(text("blind")))
