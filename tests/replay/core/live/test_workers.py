"""Which workers are live, and what is counted of them as they come, change and leave."""

from __future__ import annotations

from collections import Counter
from random import Random

from asyncrl.replay.core.live.workers import OTHER_CODE, Workers


def test_of_those_with_other_code_the_live_ones_are_counted() -> None:
    workers = Workers(timeout_s=1.0)
    for name, other in (("a", 1.0), ("b", 0.0), ("c", 1.0)):
        workers.hello(name, name, 0, 0.0)
        workers.report(workers.live[name], {OTHER_CODE: other}, 0.0, counted_before=False)
    assert workers.with_other_code() == 2
    workers.remove("a")
    assert workers.with_other_code() == 1


def test_what_the_live_ones_can_take_is_counted_whatever_they_do() -> None:
    random, workers = Random(0), Workers(timeout_s=1.0)
    for turn in range(2000):
        name = f"w{random.randrange(6)}"
        before = workers.revision, dict(workers.claims)
        known = workers.live.get(name)
        match random.choice(("hello", "hello again", "remove", "note", "note")):
            case "hello":
                workers.hello(name, f"{name}-{turn}", random.randrange(3), 0.0)
            case "hello again" if known:
                workers.hello(name, known.incarnation, random.randrange(3), 0.0)
            case "remove" if known:
                workers.remove(name)
            case "note" if known:
                served, capacity = random.choice((None, 1, 2)), random.choice((None, 4, 8))
                workers.note(known, served=served, capacity=capacity)
        live = workers.live.values()
        assert dict(workers.claims) == Counter((each.served, each.capacity) for each in live)
        assert workers.revision > before[0] or workers.claims == before[1]
