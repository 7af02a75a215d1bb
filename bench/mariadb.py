"""How fast timeouts come in out of a MariaDB of our own, on the cores of the store that they go into."""

from __future__ import annotations

import asyncio
import json

from bench.importing import BODY, DAYS, HEADERS, measured
from bench.run import Bench
from tests.rig.mariadb import MariaDB

TABLE = """
CREATE TABLE {database}.Sales_TimeoutData (Id varchar(38) NOT NULL, Destination nvarchar(200), SagaId varchar(38),
    State longblob, Time datetime, Headers json NOT NULL, PersistenceVersion varchar(23) NOT NULL, PRIMARY KEY (Id),
    INDEX Index_SagaId (SagaId), INDEX Index_Time (Time))
"""
FILL = """
INSERT INTO {database}.Sales_TimeoutData
SELECT concat(left(md5(seq), 8), '-', lpad(seq, 27, '0')), concat('Sales.', seq %% 20), md5(seq),
       unhex(repeat(md5(seq), {body} / 16)),
       utc_timestamp() + interval 1 day + interval floor(rand() * {seconds}) second,
       replace('{headers}', '8a3c1f0e', left(md5(seq), 8)), '6.6.5.0'
FROM {database}.seq_1_to_{count}
"""


async def run(bench: Bench) -> None:
    count = bench.options.imported // 10
    with MariaDB() as server:
        bench.say(f"{count:,} timeouts to import")
        database = await asyncio.to_thread(server.add_database)
        url = server.url(database)
        await asyncio.to_thread(server.execute, TABLE.format(database=database))
        headers = json.dumps(HEADERS, indent=2).replace("\n", "\\n").replace('"', '\\"')
        fill = FILL.format(database=database, body=BODY, seconds=DAYS * 86_400, headers=headers, count=count)
        await asyncio.to_thread(server.execute, fill.replace("%%", "%"))
        bench.say("import")
        await measured(bench, await bench.servers.place(), "TimeoutData", count, "nservicebus-sql", "run", "--url", url)
