from __future__ import annotations

import doctest

from asyncrl.replay.core.durable import ledger


def test_the_life_of_a_slot_is_as_the_ledger_tells_it() -> None:
    played = doctest.testmod(ledger)
    assert played.attempted > 20 and played.failed == 0
