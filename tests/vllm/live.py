"""A vLLM engine that receives from a real publisher, both in the test's process. vLLM has processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from asyncrl.engines.base import Several
from asyncrl.engines.factory import make_engine
from asyncrl.schema import Config
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.factory import make_subscriber
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.waiting import until
from tests.weights.board import BoardManager, WorkerRendezvous

Result = TypeVar("Result")
SERVE_S = 120.0
ATTEMPTS = 6


class TooLateError(Exception):
    """Something that the test needed to be running had ended already, because the machine was busy."""


def in_time(scenario: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Return the result of `scenario`, which is run again if it raises TooLateError.

    Raises:
        TooLateError: it came too late every time.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(TooLateError):
            return asyncio.run(scenario())
    return asyncio.run(scenario())


async def when_tokens_flow(engine: Any, count: int = 1, wait_s: float = 300.0) -> None:
    """Return once `engine` has generated `count` more tokens."""
    before = engine.stats()["generated_tokens"]
    async with asyncio.timeout(wait_s):
        while engine.stats()["generated_tokens"] < before + count:
            await asyncio.sleep(0.002)


BUCKET = 1 << 16


def make_publisher(board: Any, timeout_s: float = 60.0) -> WeightPublisher:
    sender = BroadcastSender(board, Link(host="127.0.0.1", timeout_s=timeout_s), poll_members_s=0.2)
    return WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=BUCKET, wait_s=120.0)


class Live:
    """An engine, the board that it watches, and its subscriber."""

    def __init__(self, engine: Any, board: Any, subscriber: Any) -> None:
        self.engine, self.board, self.subscriber = engine, board, subscriber

    @contextmanager
    def publishing(self) -> Iterator[WeightPublisher]:
        publisher = make_publisher(self.board)
        try:
            yield publisher
        finally:
            publisher.close()

    def wait_served(self, policy_version: int, wait_s: float = SERVE_S) -> None:
        subscriber, why = self.subscriber, f"version {policy_version} was never served"
        until(
            lambda: subscriber.policy_version == policy_version,
            why,
            within_s=wait_s,
            holds=lambda: subscriber.check() is None,
        )

    def update(self, policy_version: int, model: torch.nn.Module) -> None:
        """Publish the weights of `model` and wait until they are served."""
        with self.publishing() as publisher:
            publisher.publish(policy_version, model.named_parameters())
            self.wait_served(policy_version)


@contextmanager
def live_engine(config: Config, proven: bool = False) -> Iterator[Live]:
    """Yield an engine with its board and subscriber.

    Args:
        proven: verify each version with the canaries that are published.
    """
    engine: Any = make_engine(config)
    with BoardManager() as manager:
        board = manager.Board()  # pyright: ignore
        board.join("w", "1")
        subscriber = make_subscriber(
            config, WorkerRendezvous(board, "w"), "w", "1", engine.load_weights, engine.receiver(),
            score=engine.score if proven else None,
            everywhere=engine.score_everywhere if isinstance(engine, Several) else None,
        )  # fmt: skip
        try:
            yield Live(engine, board, subscriber)
        finally:
            subscriber.close()
            asyncio.run(engine.close())  # pyright: ignore[reportAttributeAccessIssue]
