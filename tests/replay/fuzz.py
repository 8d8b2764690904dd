"""Send mutated frames to the decoders, and mutated messages to a live server that also has an honest client.

    python -m tests.replay.fuzz --frames 10000000
    python -m tests.replay.fuzz --messages 100000

Each prints one JSON line. Any exception but a `WireError` from a decoder is a crash and ends the run with a traceback,
as does an honest group that the server did not accept.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import zmq

from asyncrl.errors import WireError
from asyncrl.evaluation.orders import EvalAssignment
from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.codec import headers, messages, wire
from asyncrl.replay.codec.columns import columns_of, decode
from asyncrl.replay.codec.group import (
    EncodedGroup,
    check_stored,
    decode_texts,
    encode_group,
    split_frames,
)
from asyncrl.replay.codec.messages import decode_lost, encode_dropped
from asyncrl.replay.codec.reply import decode_replies
from asyncrl.replay.codec.together import SEVERAL, decode_requests
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.net.keys import secure_client
from asyncrl.replay.protocol import Acquired, DroppedSample
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION, Assignment, GroupHeader, StepPlan
from tests.replay.helpers import group, replay_config, running_server, settings

ORDER = Assignment(group_id=3, prompt_index=4, attempt=1, seed=5, policy_version=2)
VOCABULARY = 512
NASTY = (b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xd6\xff\0\0\0\0", b"")
Decoder = Callable[[bytes], object]
TOO_DEEP = wire.unpack(b"\x91" * 1005 + b"\x90")
"""Valid msgpack that is nested too deeply for Python to print."""


def envelope(body: object, verb: str = "insert", run: str = "run", request: int = 7, incarnation: str = "i") -> bytes:
    return wire.encode_envelope(Envelope(run=run, verb=verb, request=request, incarnation=incarnation, body=body))


def insert_body(encoded: EncodedGroup) -> list[object]:
    lost = DroppedSample(group_id=0, prompt="p", dropped="failed_reward", detail="one raised")
    return [headers.encode_group_header(encoded.header), encode_dropped(lost)]


def several(encoded: EncodedGroup, life: str = "i") -> bytes:
    """Return one envelope of two inserts."""
    rows = [[number, "insert", insert_body(encoded), len(encoded.frames)] for number in (7, 8)]
    return envelope([0, rows], SEVERAL, incarnation=life)


class Corpus:
    """Valid frames, each with the decoder that reads it."""

    def __init__(self) -> None:
        encoded = encode_group(group(ORDER, [4, 4, 5, 7], size=3))
        frames = [bytes(frame) for frame in encoded.frames]
        facts = encoded.header.trajectories
        plan = StepPlan(
            step=3, policy_version=7, groups=(encoded.header,), staleness={4: 3, 5: 2, 7: 0}, max_staleness=4,
            shards=(((0, 0), (0, 2)), ((0, 1),)),
        )  # fmt: skip
        evaluation = EvalAssignment(job_id=1, chunk=0, attempt=0, eval_set="h", start=0, stop=4)
        acquired = Acquired(assignments=(ORDER,), evaluations=(evaluation,), waiting_for="x")
        self.cases: tuple[tuple[str, bytes, Decoder], ...] = (
            ("insert", envelope([9, insert_body(encoded)]), lambda raw: self._insert(raw, frames)),
            ("several", several(encoded), lambda raw: self._several(raw, frames)),
            ("header", headers.packed_header(encoded.header), lambda raw: checked(header_of(raw), frames)),
            ("columns", frames[1], lambda raw: decode(facts, columns_of(facts, raw, ()))),
            ("joined", frames[1], lambda raw: checked(encoded.header, [frames[0], raw, frames[2]])),
            ("extras", frames[2], lambda raw: checked(encoded.header, [*frames[:2], raw])),
            ("texts", frames[0], decode_texts),
            ("plan", wire.pack(headers.encode_plan(plan)), lambda raw: headers.decode_plan(wire.unpack(raw))),
            (
                "acquired",
                wire.pack(messages.encode_record(acquired)),
                lambda raw: messages.decode_record(Acquired, wire.unpack(raw)),
            ),
        )

    def _insert(self, raw: bytes, frames: Sequence[bytes]) -> None:
        for asked in decode_requests(wire.decode_envelope(raw), frames)[1]:
            row, lost = wire.sequence(asked.body, "insert", 2)
            decode_lost(lost)
            checked(headers.decode_group_header(row), [*map(bytes, asked.frames)])

    def _several(self, raw: bytes, frames: Sequence[bytes]) -> None:
        self._insert(raw, [*frames, *frames])


def header_of(packed: bytes) -> GroupHeader:
    return headers.decode_group_header(["w", packed])


def checked(header: GroupHeader, frames: Sequence[bytes]) -> None:
    """Check a group as the server does and decode it as the learner does: what the server accepts must not fail at the
    learner."""
    stored, headers = split_frames(header, frames), header.trajectories
    check_stored(header, stored, VOCABULARY)
    try:
        arrived = stored.trajectories(headers)
    except WireError as error:
        raise AssertionError("the learner refuses what the server took in") from error
    for facts, one in zip(headers, arrived, strict=True):
        assert np.isfinite(one.behavior_logprobs[one.loss_mask]).all()
        assert 0 <= one.token_ids.min() <= one.token_ids.max() < VOCABULARY
        assert one.reward == facts.reward and (one.prompt_length == facts.prompt_length or not facts.loss_tokens)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def put(value: Any, path: tuple[Any, ...], item: Any) -> Any:
    """Return a copy of `value` with `item` at `path`."""
    if not path:
        return item
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], item)
    return changed


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with some random changes: bytes changed, cut off, doubled, deleted or inserted, some of them with
    huge lengths."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        kind, at = rng.random(), rng.randrange(len(raw) + 1)
        if kind < 0.55 and raw:
            raw[at % len(raw)] = rng.choice((rng.randrange(256), 0, 0x7F, 0x80, 0xFF))
        elif kind < 0.65:
            raw = raw[:at]
        elif kind < 0.75:
            raw[at:at] = rng.choice(NASTY)
        elif kind < 0.85:
            raw[at:at] = raw[at : at + rng.randrange(1, 32)]
        elif kind < 0.95:
            del raw[at : at + rng.randrange(1, 16)]
        else:
            raw[at : at + 8] = rng.randbytes(8)
    return bytes(raw)


def fuzz_decoders(frames: int, seed: int) -> dict[str, int]:
    """Feed `frames` mutated frames to the decoders. Any exception but a WireError is raised."""
    rng, cases = random.Random(seed), Corpus().cases
    counts: Counter[str] = Counter()
    for number in range(frames):
        name, good, decode = cases[number % len(cases)]
        bad = mutate(rng, good)
        try:
            decode(bad)
            counts[f"{name}_decoded"] += 1
        except WireError:
            counts[f"{name}_refused"] += 1
        except BaseException as error:
            error.add_note(f"seed={seed} frame={number} decoder={name} bytes={bad.hex()}")
            raise
    return dict(counts)


class Hostile:
    """A peer that says hello like a worker and then sends mutated messages. When expelled, it reconnects."""

    def __init__(self, context: zmq.Context, config: ReplayConfig, rng: random.Random) -> None:
        self.rng = rng
        self.lives = 0
        self._context, self._config = context, config
        self._hello()

    def _hello(self) -> None:
        if self.lives:
            self.socket.close()  # the server ignores the old connection from now on
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        secure_client(self.socket, self._config.keys, "worker")
        self.socket.connect(self._config.address)
        self.lives += 1
        life = f"life{self.lives}"
        encoded = encode_group(group(ORDER, [0, 0], size=2))
        self.seeds = [
            [envelope([0, [20, 0.0]], "acquire", incarnation=life)],
            [envelope([0, insert_body(encoded)], incarnation=life), *map(bytes, encoded.frames)],
            [several(encoded, life), *map(bytes, [*encoded.frames, *encoded.frames])],
            [envelope([0, [{"busy_s": 1.0}, [3]]], "heartbeat", incarnation=life)],
            [envelope([0, [0, "f"]], "served", incarnation=life)],
            [envelope([0, [1, 2, "failed_reward", "why", [], None]], "fail", incarnation=life)],
            [envelope([0, [0, 0, 1, 0.0, 1]], "lease", incarnation=life)],
        ]
        hello = ["worker", "hostile", "d", NO_VERSION, ""]
        self.socket.send(envelope(hello, "hello", run="", request=0, incarnation=life))

    def send(self) -> None:
        message = list(self.rng.choice(self.seeds))
        place = self.rng.randrange(len(message))
        message[place] = mutate(self.rng, message[place])
        if self.rng.random() < 0.05:
            message = message[: self.rng.randrange(len(message)) + 1] + [b"x"] * self.rng.randrange(3)
        self.socket.send_multipart(message)
        verb = ""
        while self.socket.poll(0):
            verb = decode_replies(self.socket.recv_multipart(zmq.DONTWAIT))[-1][0].verb
        if verb in ("fenced", "unknown_peer"):
            self._hello()


def fuzz_server(count: int, seed: int, config: ReplayConfig | None = None) -> dict[str, float]:
    """Send `count` hostile messages over sockets while an honest worker and learner go on with their work."""
    config = config or replay_config(wait_timeout_s=30.0)
    rng = random.Random(seed)
    with running_server(config, settings(groups_per_step=4, pipeline_depth=2, max_staleness=1 << 20)):
        learner = LearnerClient(config.address, rank=0, run_digest="d", config=config)
        context = zmq.Context()
        try:
            version = learner.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version
            learner.publish(policy_version=version, parent=NO_VERSION)
            learner.announce({"vocabulary": 1 << 20})
            return asyncio.run(_under_fire(config, learner, Hostile(context, config, rng), count))
        finally:
            learner.close()
            context.destroy(linger=0)


async def _under_fire(config: ReplayConfig, learner: LearnerClient, hostile: Hostile, count: int) -> dict[str, float]:
    client = RolloutClient(config.address, worker="honest", run_digest="d", config=config)
    sent = good = steps = 0
    trained: set[int] = set()
    slowest, started = 0.0, time.monotonic()
    client.rendezvous().served(0, "f")
    while sent < count:
        for _ in range(min(200, count - sent)):
            hostile.send()
            sent += 1
        asked = time.monotonic()
        for order in (await client.acquire(slots=8, wait_s=0.0)).assignments:
            reply = await client.insert(group(order, [0] * 3))
            assert reply.status == "accepted", reply
            good += 1
        slowest = max(slowest, time.monotonic() - asked)
        while good - len(trained) >= 4:
            lease = await asyncio.to_thread(learner.lease, step=steps, rank=0, world=1, wait_s=30.0)
            assert len(lease.trajectories) == 8
            trained |= {header.group_id for header in lease.plan.groups}
            await asyncio.to_thread(learner.trained, step=steps, policy_version=steps + 1)
            learner.commit(step=steps)
            steps += 1
            client.rendezvous().served(steps, "f")
    await client.close()
    seconds = time.monotonic() - started
    return {
        "messages": sent,
        "good_groups": good,
        "trained_groups": len(trained),
        "steps": steps,
        "expelled": hostile.lives - 1,
        "slowest_round_s": round(slowest, 3),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--messages", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    if options.frames:
        counts = fuzz_decoders(options.frames, options.seed)
        print(json.dumps({"frames": options.frames, "seconds": round(time.monotonic() - started, 1), **counts}))
    if options.messages:
        print(json.dumps(fuzz_server(options.messages, options.seed)))


if __name__ == "__main__":
    main()
