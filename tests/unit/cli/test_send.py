"""Messages of `delayer send` that cannot be sent are errors of usage, with their line."""

from __future__ import annotations

import io
import json
import sys

import pytest

from delayer.amqp.properties import Properties
from delayer.cli.errors import Misused
from delayer.cli.send import Composed, Composer, Draft, portions_of
from delayer.config.model import Settings


def composed(line: str, *forms: str) -> list[Composed]:
    route = {"from": "in", "delay_from": forms or ["x-delay", "x-deliver-at"]}
    composer = Composer(Settings.model_validate({"route": [route], "intake": {"max_delay": "36500d"}}))
    return [one for portion in portions_of(io.BytesIO(b"{}\n" + line.encode()), composer, Draft()) for one in portion]


@pytest.mark.parametrize("value", ["NaN", "1e999", "-1e999", "Infinity"])
def test_a_number_that_the_broker_rejects_is_refused(value: str) -> None:
    with pytest.raises(Misused, match=r'^line 2: headers: expected a finite number for "a", found'):
        composed(f'{{"headers": {{"a": {value}}}}}')


@pytest.mark.parametrize("name", ["routing_key", "message_id", "key", "key_mode"])
def test_an_argument_that_is_not_utf_8_is_refused(name: str) -> None:
    with pytest.raises(Misused, match="expected UTF-8, found something else"):
        Composer(Settings.model_validate({"route": [{"from": "in"}]})).compose(Draft(**{name: "\udcff"}), 0)


@pytest.mark.parametrize("value", [sys.float_info.max, -sys.float_info.max, 5e-324, -(1 << 63), (1 << 63) - 1, True])
def test_the_ends_of_each_type_are_sent(value: float) -> None:
    _, one = composed(json.dumps({"headers": {"a": value}}))
    header = Properties.parse(one.properties).get(b"a")
    assert header is not None
    assert header.value == value


@pytest.mark.parametrize("at", ["1960-01-01T00:00:00Z", "1969-12-31T23:59:59Z", "9999-12-31T23:59:59.5Z"])
def test_an_instant_that_no_timestamp_holds_is_refused(at: str) -> None:
    with pytest.raises(
        Misused, match=r'^line 2: due: expected an instant from 1970 to 9999, because route "in" reads timestamps$'
    ):
        composed(json.dumps({"due": at}), "timestamp")


@pytest.mark.parametrize("at", ["1969-12-31T23:59:59.5Z", "1970-01-01T00:00:00Z", "1970-01-01T00:00:00.5Z"])
def test_an_instant_from_1970_on_can_be_sent_as_a_timestamp(at: str) -> None:
    _, one = composed(json.dumps({"due": at}), "timestamp")
    assert Properties.parse(one.properties).timestamp == int(at.endswith("00.5Z"))


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00Z", "1960-01-01T00:00:00Z"])
def test_a_header_holds_any_instant(at: str) -> None:
    _, one = composed(json.dumps({"due": at}))
    assert one.told["due_ms"] == 0
    with pytest.raises(Misused, match=r"^line 2: the daemon would refuse it: the delay is too long"):
        composed(json.dumps({"due": "9999-12-31T23:59:59.5Z"}))
