"""What does one change cost the replay server while every rank waits for its batch and every worker for work?

    python -m benchmarks.waiting [--workers 1000] [--ranks 64] [--chunks 1000] [--changes 100]

Runs in one process, without sockets. The requests wait at the real core and handlers; groups are inserted one after
another, and after each the waiting requests are settled. Microseconds of processor time per change, median and 99th
percentile:

    ranks        all workers and all ranks wait, and the batch is not complete
    evaluation   the same while chunks of an evaluation wait for workers that serve its version, and none does
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from asyncrl.replay.codec.group import encode_group
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Later, Session
from asyncrl.replay.server.waiting import WaitingRequests
from asyncrl.types import NO_VERSION, Assignment
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.measuring import GROUP_SIZE, Size, make_group, make_trajectories

WAIT_S = 3600.0


class Nobody:
    """Takes answers and drops them. An error answer fails the benchmark."""

    def answer(self, *_: object) -> None: ...

    def error(self, session: object, request: object, error: object) -> None:
        raise AssertionError(f"{request}: {error}")


class Crowd:
    def __init__(self, workers: int, ranks: int, changes: int) -> None:
        settings = AdmissionSettings(
            groups_per_step=4 * workers,
            group_size=GROUP_SIZE,
            max_staleness=4,
            pipeline_depth=2,
            max_in_flight=changes + 10,
        )
        self.core = ReplayCore(settings, time.monotonic, seed=0)
        self.handlers = Handlers(self.core)
        self.waiting = WaitingRequests(lambda: self.core.state.applied, Nobody(), time.monotonic)
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="learner")
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.workers = [Session("worker", f"w{number}", f"w{number}", b"", 0.0) for number in range(workers)]
        for session in self.workers:
            self.core.hello(session.name, session.incarnation, 0)
        self.orders = self._fill(changes)
        for session in self.workers:
            self._ask(session, "acquire", [4, WAIT_S])
        for rank in range(ranks):
            session = Session("learner", f"rank {rank}", f"r{rank}", b"", 0.0)
            self._ask(session, "lease", [0, rank, ranks, WAIT_S, 0])
        self.template = encode_group(make_group(make_trajectories(Size(16)))).header

    def change(self) -> float:
        """Insert one group. Returns the processor seconds of settling until no waiting request can go on."""
        session, order = self.orders.pop()
        header = replace(self.template, group_id=order.group_id, prompt_index=order.prompt_index, worker=session.name)
        self.core.insert(session.name, session.incarnation, header, None)
        started = time.process_time()
        self.waiting.settle()
        return time.process_time() - started

    def _fill(self, wanted: int) -> list[tuple[Session, Assignment]]:
        """Acquire orders until no more are given, so that whoever asks next waits."""
        orders: list[tuple[Session, Assignment]] = []
        while len(orders) < wanted + 10:
            for session in self.workers:
                given = self.core.acquire(session.name, session.incarnation, 1).assignments
                orders += [(session, order) for order in given]
        return orders

    def _ask(self, session: Session, verb: str, body: list[object]) -> None:
        reply = self.handlers.handle(session, verb, body, ())
        assert isinstance(reply, Later), reply
        self.waiting.add(session, 1, verb, reply)


def in_us(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"median": round(statistics.median(times) * 1e6), "p99": round(ordered[int(0.99 * len(times))] * 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=100)
    options = parse(parser, {"workers": 10, "ranks": 2, "chunks": 10, "changes": 3})
    crowd = Crowd(options.workers, options.ranks, 2 * options.changes)
    ranks = in_us([crowd.change() for _ in range(options.changes)])
    crowd.core.evaluate(step=0, policy_version=1, eval_set="heldout", rows=options.chunks, chunk=1)
    crowd.waiting.settle()
    evaluation = in_us([crowd.change() for _ in range(options.changes)])
    row = {"workers": options.workers, "ranks": options.ranks, "chunks": options.chunks}
    answer("waiting", row | {"ranks_us": ranks, "evaluation_us": evaluation}, smoke=options.smoke)


if __name__ == "__main__":
    main()
