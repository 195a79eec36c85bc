"""Messages between parent and child."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgqueue.runtime import wire
from pgqueue.runtime.wire import Decoder, frame

MESSAGES = [
    ["run", [[1, 2, "é\u2028", None, 0.5]]],
    ["stop"],
    ["done", [[1, 0.1, "succeeded", "x" * 70_000, None, None]]],
]


@settings(deadline=None)
@given(st.lists(st.integers(1, 60_000), max_size=20))
def test_a_stream_cut_anywhere_gives_the_same_messages(cuts: list[int]) -> None:
    stream = b"".join(map(frame, MESSAGES))
    decoder, got, at = Decoder(), [], 0
    for cut in cuts:
        got += decoder.feed(stream[at : at + cut])
        at += cut
    got += decoder.feed(stream[at:])

    assert got == MESSAGES


def test_half_a_message_waits_for_its_other_half() -> None:
    decoder, one = Decoder(), frame(["stop"])

    assert decoder.feed(one[:3]) == []
    assert decoder.feed(one[3:-1]) == []
    assert decoder.feed(one[-1:]) == [["stop"]]


@pytest.fixture(params=[wire.orjson, None], ids=["orjson", "json"])
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "orjson", request.param)


@pytest.mark.usefixtures("_implementation")
def test_numbers_of_any_size_arrive_as_they_were_sent() -> None:
    message = [
        "hello",
        {"bits": 2**64, "below": -(2**63) - 1, "most": sys.maxsize, "half": 0.5, "text": "é"},
    ]

    assert Decoder().feed(frame(message)) == [message]


@pytest.mark.usefixtures("_implementation")
def test_what_the_other_side_could_not_read_is_refused_here() -> None:
    with pytest.raises((TypeError, ValueError)):
        frame(["done", "half a pair \ud800"])
    with pytest.raises((TypeError, ValueError)):
        frame(["done", "half a pair \ud800", 2**64])
