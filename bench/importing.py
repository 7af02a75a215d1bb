"""How fast timeouts of NServiceBus's SQL Persistence come in, staging and removal there included; and an export and its
way back. Source and store are databases of one server here, so both share its cores and its disk."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncpg

from bench.run import Bench
from bench.servers import Place
from tests.rig.daemon import command

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
}
FILL = """
INSERT INTO "Sales_TimeoutData"
SELECT gen_random_uuid(), 'Sales.' || n % 20, gen_random_uuid(), decode(repeat(md5(n::text), 16), 'hex'),
       now() AT TIME ZONE 'UTC' + interval '1 day' + random() * $2::int * interval '1 day',
       replace($3, '8a3c1f0e', left(md5(n::text), 8)), '6.6.5.0'
FROM generate_series(1, $1::int) AS n
"""


async def run(bench: Bench) -> None:
    count = bench.options.imported
    source = await asyncio.to_thread(bench.servers.postgres.add_database)
    url = bench.servers.postgres.url(source)
    bench.say("timeouts to import")
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(TABLE)
        await connection.execute(FILL, count, DAYS, json.dumps(HEADERS, indent=2), timeout=600)
        await connection.execute('VACUUM ANALYZE "Sales_TimeoutData"')
    finally:
        await connection.close()
    place = await bench.servers.place()
    bench.say("import")
    await measured(bench, place, "TimeoutData", count, "nservicebus-sql", "run", "--url", url)
    with tempfile.TemporaryDirectory(prefix="delayer-bench-") as directory:
        file = Path(directory) / "backlog.jsonl"
        bench.say("export")
        began = time.monotonic()
        await place.delayer("export", str(file))
        bench.add("export", count / (time.monotonic() - began), "/s", count=count)
        bench.say("import of the export")
        await measured(bench, await bench.servers.place(), "jsonl", count, "jsonl", "run", str(file))


async def measured(bench: Bench, place: Place, what: str, count: int, *arguments: str) -> None:
    """The whole command, the start of the interpreter, the staging and the partitions included."""
    began = time.monotonic()
    told: dict[str, Any] = json.loads(
        await command(place.config, "import", *arguments, "--unverified", "--yes", "--json")
    )
    seconds = time.monotonic() - began
    if told["parked"] != count:
        raise RuntimeError(f"expected {count} to be parked, found {told}")
    bench.add(f"import of {what}", count / seconds, "/s", count=count)
