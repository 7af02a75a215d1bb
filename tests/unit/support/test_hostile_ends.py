"""Every hostile message has one end at each broker, and no other one is let pass."""

from __future__ import annotations

import pytest

from tests.faults.hostile import CASES, ROOMY, SILENT, End
from tests.faults.villain import Found, verify
from tests.support.rabbitmq import OfAVersion


class Broker(OfAVersion):
    def __init__(self, *version: int) -> None:
        self._version = version

    @property
    def version(self) -> tuple[int, ...]:
        return self._version


BROKERS = [Broker(3, 10, 8), Broker(4, 0, 5), Broker(4, 3, 6)]
LISTED = {**CASES, **SILENT, **ROOMY}


@pytest.mark.parametrize("broker", BROKERS, ids=lambda broker: f"{broker.version[0]}.{broker.version[1]}")
def test_no_other_end_passes(broker: Broker) -> None:
    for name, listed in LISTED.items():
        case = listed.at(broker)
        for end in End:
            if end is not case.end:
                with pytest.raises(AssertionError, match="expected"):
                    verify(name, case, [Found(end, "")], 1, sorts=broker.sorts_headers, redelivered=False)
        for times in (0, 2):
            with pytest.raises(AssertionError):
                verify(name, case, [Found(case.end, "")] * times, 1, sorts=broker.sorts_headers, redelivered=False)
