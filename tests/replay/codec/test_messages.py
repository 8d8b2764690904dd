"""Records of the wire: each field within its bounds, whatever else the message says."""

from __future__ import annotations

import pytest

from asyncrl.errors import WireError
from asyncrl.replay.client.client import _board
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.messages import MAX_ENTRIES, MAX_NUMBERS, decode_record, encode_record, numbers
from asyncrl.replay.codec.reply import Hello
from asyncrl.replay.protocol import Board


@pytest.mark.parametrize(
    ("served", "fits"), [(-2, False), (-1, True), (wire.MAX_VERSION, True), (wire.MAX_VERSION + 1, False)]
)
def test_a_peer_serves_a_version_that_there_can_be(served: int, fits: bool) -> None:
    said = encode_record(Hello("worker", "w0", "digest", served, ""))
    if fits:
        assert decode_record(Hello, said).served == served
    else:
        with pytest.raises(WireError, match="served"):
            decode_record(Hello, said)


def test_a_board_counts_from_0_and_has_few_entries() -> None:
    entries = {str(number): 0 for number in range(MAX_ENTRIES)}
    assert _board(encode_record(Board(revision=0, values=entries))).values == entries
    for wrong in (Board(revision=-1, values={}), Board(revision=0, values=entries | {"more": 0})):
        with pytest.raises(WireError):
            _board(encode_record(wrong))


def test_maps_of_numbers_are_longer_than_others() -> None:
    assert len(numbers({str(number): 0.0 for number in range(MAX_NUMBERS)}, "metrics")) == MAX_NUMBERS
    with pytest.raises(WireError):
        numbers({str(number): 0.0 for number in range(MAX_NUMBERS + 1)}, "metrics")
