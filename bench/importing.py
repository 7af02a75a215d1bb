"""How fast an import is, and in how much memory: timeouts of NServiceBus SQL Persistence out of PostgreSQL, staging and
removal there included; an export and its way back; a dump of the delayed-message plugin.

Source and store are databases of one server here, so both share its cores and its disk. Memory is told for a tenth of
the messages as well: if it grew with what is imported, the two would differ.
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncpg

from bench.meter import peak_mb
from bench.run import Bench
from bench.servers import Place
from tests.rig.daemon import EXECUTABLE

DAYS = 60
TABLE = """
CREATE TABLE "Sales_TimeoutData" ("Id" uuid PRIMARY KEY, "Destination" character varying(200), "SagaId" uuid,
    "State" bytea, "Time" timestamp, "Headers" text, "PersistenceVersion" character varying(23));
CREATE INDEX "Sales_TimeoutData_TimeIdx" ON "Sales_TimeoutData" ("Time");
CREATE INDEX "Sales_TimeoutData_SagaIdx" ON "Sales_TimeoutData" ("SagaId")
"""
# As the persister writes them: indented JSON, a dozen headers.
HEADERS = {
    "NServiceBus.MessageId": "8a3c1f0e-4b1e-4b9c-9f5d-b0a500f1a2c3",
    "NServiceBus.MessageIntent": "Send",
    "NServiceBus.ConversationId": "1d0f6b62-5e0c-4f4e-8a2d-b0a500f1a2c3",
    "NServiceBus.CorrelationId": "8a3c1f0e-4b1e-4b9c-9f5d-b0a500f1a2c3",
    "NServiceBus.IsSagaTimeoutMessage": "True",
    "NServiceBus.SagaId": "5f2f2b30-7b49-4d6a-9d2e-b0a500f1a2c3",
    "NServiceBus.SagaType": "Sales.OrderSaga, Sales, Version=1.0.0.0, Culture=neutral, PublicKeyToken=null",
    "NServiceBus.OriginatingMachine": "SERVER7",
    "NServiceBus.OriginatingEndpoint": "Sales",
    "NServiceBus.ContentType": "application/json",
    "NServiceBus.EnclosedMessageTypes": "Sales.OrderTimeout, Sales, Version=1.0.0.0, Culture=neutral",
    "NServiceBus.Version": "7.8.6",
    "NServiceBus.TimeSent": "2026-04-29 22:11:26:330982 Z",
    "NServiceBus.Timeout.Expire": "2026-06-29 22:11:26:330982 Z",
    "NServiceBus.Timeout.RouteExpiredTimeoutTo": "Sales",
}
BODY = 512
FILL = """
INSERT INTO "Sales_TimeoutData"
SELECT gen_random_uuid(), 'Sales.' || n % 20, gen_random_uuid(), decode(repeat(md5(n::text), $4::int / 16), 'hex'),
       now() AT TIME ZONE 'UTC' + interval '1 day' + random() * $2::int * interval '1 day',
       replace($3, '8a3c1f0e', left(md5(n::text), 8)), '6.6.5.0'
FROM generate_series(1, $1::int) AS n
"""


async def run(bench: Bench) -> None:
    whole = bench.options.imported
    for count in (whole // 10, whole):
        place = await from_postgres(bench, count)
    with tempfile.TemporaryDirectory(prefix="delayer-bench-") as directory:
        file = Path(directory) / "backlog"
        bench.say("export")
        began = time.monotonic()
        _, memory = await watched(place, "export", str(file))
        bench.add("export", whole / (time.monotonic() - began), "/s", count=whole)
        bench.add("memory of an export", memory, "MB", count=whole)
        for name, write, most in (("jsonl", cut, whole // 10), ("delayed-exchange", dump, whole // 5)):
            for count in (most // 10, most):
                bench.say(f"import of {name}")
                part = Path(directory) / name
                await asyncio.to_thread(write, file, part, count)
                await measured(bench, await bench.servers.place(), name, count, name, "run", str(part))


async def from_postgres(bench: Bench, count: int) -> Place:
    """The store that they came into."""
    source = await asyncio.to_thread(bench.servers.postgres.add_database)
    url = bench.servers.postgres.url(source)
    bench.say(f"{count:,} timeouts to import")
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(TABLE)
        await connection.execute(FILL, count, DAYS, json.dumps(HEADERS, indent=2), BODY, timeout=600)
        await connection.execute('VACUUM ANALYZE "Sales_TimeoutData"')
    finally:
        await connection.close()
    place = await bench.servers.place()
    bench.say("import")
    await measured(bench, place, "TimeoutData", count, "nservicebus-sql", "run", "--url", url)
    return place


def cut(export: Path, part: Path, count: int) -> None:
    """The first lines of an export, as a file of their own."""
    with export.open("rb") as lines, part.open("wb") as out:
        out.writelines(line for _, line in zip(range(count), lines, strict=False))
        out.write(b'{"v":1,"messages":%d}\n' % count)


def dump(export: Path, part: Path, count: int) -> None:
    """The same messages as the plugin's tables hold them, in no order."""
    with export.open("rb") as lines, part.open("wb") as out:
        for _, line in zip(range(count), lines, strict=False):
            said: dict[str, Any] = json.loads(line)
            names = (b"/", b"orders.delayed", said["to_key"].encode())
            body = base64.b64decode(said["body_b64"]) if "body_b64" in said else said["body"].encode()
            fields = [*map(base64.b64encode, names), said["properties_b64"].encode(), base64.b64encode(body)]
            out.write(b" ".join([b"%d" % said["due_ms"], *fields]) + b"\n")
        out.write(b"%d\n" % count)


async def measured(bench: Bench, place: Place, what: str, count: int, *arguments: str) -> None:
    """The whole command, the start of the interpreter, the staging and the partitions included."""
    began = time.monotonic()
    vhost = ("--vhost", "/") if arguments[0] == "delayed-exchange" else ()
    said, memory = await watched(place, "import", *arguments, *vhost, "--unverified", "--yes", "--json")
    seconds = time.monotonic() - began
    told: dict[str, Any] = json.loads(said)
    if told["parked"] != count:
        raise RuntimeError(f"expected {count} to be parked, found {told}")
    bench.add(f"import of {what}", count / seconds, "/s", count=count)
    bench.add(f"memory of an import of {what}", memory, "MB", count=count)


async def watched(place: Place, *arguments: str) -> tuple[str, float]:
    """What `delayer` said, and the highest resident memory that it had, in MB."""
    process = await asyncio.create_subprocess_exec(
        str(EXECUTABLE), "--config", str(place.config), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    talking = asyncio.ensure_future(process.communicate())
    peak = 0.0
    while not talking.done():
        peak = max(peak, peak_mb(process.pid))
        await asyncio.wait([talking], timeout=0.1)
    said, complained = await talking
    if process.returncode != 0:
        raise RuntimeError(f"delayer {arguments[0]}: exit {process.returncode}\n{complained.decode()}")
    return said.decode(), peak
