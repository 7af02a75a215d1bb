"""How far a run is in each table, as it is noted in the store. Pure."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import datetime

from delayer.legacy.layout import Place


def write(places: Mapping[str, Place]) -> str:
    """By the names of the tables; ids may be uuids, which JSON has none of."""
    said = {
        name: [place.time.isoformat(), {"uuid": str(place.id)} if isinstance(place.id, uuid.UUID) else place.id]
        for name, place in places.items()
    }
    return json.dumps(said, sort_keys=True)


def read(text: str | None) -> dict[str, Place]:
    """The other way round; None: nothing is done yet."""
    if text is None:
        return {}
    return {
        name: Place(datetime.fromisoformat(due), uuid.UUID(id_["uuid"]) if isinstance(id_, dict) else id_)
        for name, (due, id_) in json.loads(text).items()
    }
