"""An imported schedule of Celery beat: a real worker of Celery runs its tasks, as if beat had sent them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import command
from tests.support.place import Place, eventually

SETTINGS = """
from celery.schedules import crontab

timezone = "Europe/Berlin"
task_default_queue = "shop"
beat_schedule = {
    "tick": {
        "task": "shop.note", "schedule": 1.0, "args": (16, "ü"), "kwargs": {"more": [1]}, "options": {"expires": 60},
    },
    "report": {"task": "shop.note", "schedule": crontab(hour=7, minute=0, day_of_week="mon-fri")},
}
"""
APPLICATION = """
import json
import os
from pathlib import Path
from celery import Celery
import settings

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
app.config_from_object(settings)

@app.task(name="shop.note", bind=True)
def note(self, *args, **kwargs):
    with Path("notes").open("a") as notes:
        print(json.dumps([args, kwargs, self.request.id, self.request.correlation_id]), file=notes)
"""
BEAT = """
from celery.beat import PersistentScheduler
from shop import app

PersistentScheduler(app=app, schedule_filename="celerybeat-schedule").close()
"""
"""Writes the file that `celery beat` keeps, without sending a task."""
WORKER = ("-m", "celery", "-A", "shop", "worker", "--pool", "solo", "--without-gossip", "--without-mingle")


@asynccontextmanager
async def python(directory: Path, place: Place, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program in the application's directory; killed at the end if still running."""
    environ = {**os.environ, "SHOP_BROKER": place.broker, "PYTHONPATH": str(directory)}
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=directory, env=environ)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("source", ["celerybeat-schedule", "settings.py"])
async def test_a_worker_runs_the_tasks_of_an_imported_schedule(
    vhost: str, database: str, tmp_path: Path, source: str
) -> None:
    place = await Place("store", vhost, database).declare()
    for name, text in (("settings.py", SETTINGS), ("shop.py", APPLICATION)):
        (tmp_path / name).write_text(text)
    async with python(tmp_path, place, "-c", BEAT) as beat:
        assert await beat.wait() == 0

    def notes() -> list[Any]:
        file = tmp_path / "notes"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    async with place.working(), python(tmp_path, place, *WORKER) as worker:
        imported = ("schedule", "import", "beat", str(tmp_path / source), "--queue", "shop")
        assert "+ report: At 07:00 on Monday through Friday (Europe/Berlin)\n" in await command(
            None, *imported, environ=place.environ
        )
        came = await eventually(notes, lambda came: len(came) >= 3)
        worker.terminate()
        assert await worker.wait() == 0
    assert {json.dumps(one[:2]) for one in came} == {json.dumps([[16, "ü"], {"more": [1]}])}
    assert len({task for *_, task, _ in came}) == len(came)
    assert all(task == correlation for *_, task, correlation in came)
