"""Workers that the replay server knows but that never come for weights."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from asyncrl.weights.broadcast import door
from asyncrl.weights.broadcast.door import NAMED, Door
from asyncrl.weights.broadcast.protocol import Peer, beat
from benchmarks.parts.crowd import Meeting


def test_workers_that_never_came_are_reported_once_and_in_one_line_however_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    looks = Door(Meeting(0), store, "10.0.0.6:4000", 5.0)
    live: list[Peer] = [(f"w{number:03}", "1") for number in range(512)]
    beat(store, live[3])
    looks.report_absent(live)
    assert not caplog.messages
    monkeypatch.setattr(door, "TOLD_S", 0.0)
    looks.report_absent(live)
    looks.report_absent(live)
    (told,) = caplog.messages
    assert "to 10.0.0.6:4000, for 0 s: w000, w001, w002, w004" in told
    assert f" and {511 - NAMED} more. weights.host" in told
    looks.report_absent([*live, ("late", "1")])
    assert "for 0 s: late. weights.host must be" in caplog.messages[-1]
