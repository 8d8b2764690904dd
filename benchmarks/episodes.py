"""Can one rollout worker carry a thousand conversations at once?

    python -m benchmarks.episodes [--episodes 1000] [--rate 14000] [--seconds 60]

Generates groups of 8 episodes of three turns all the time, up to `episodes` episodes at once. The engine costs nothing
and gives at most `rate` tokens per second in total; since siblings wait for the longest reply, 10,000 remain of 14,000.
Measured over the last two thirds of the time:

    lag_ms_p50, lag_ms_p99   how much later than asked for the event loop returns to a task that sleeps 5 ms
    chat_percent             processor time of rendering, parsing and decoding, in percent of one core; replies have 64
                             tokens on average, and the cost of a turn hardly depends on how many
    processor_percent        processor time of the whole process, in percent of one core
    mb_grown                 resident memory at the end minus that after the first third
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.guard import GuardedEnvironment
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.groups.episode import EpisodeRunner, GroupShape
from asyncrl.rollout.worker.tokenizer import make_decode, make_encode
from asyncrl.types import Assignment, Prompt, SamplingParams
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.chat import END, TEXTS, chat, tokenizer
from benchmarks.parts.paced_engine import PacedEngine

GROUP = 8
REPLY_TOKENS = 64
PAUSE_S = 0.005
QUESTION = [
    {"role": "system", "content": "Answer in short."},
    {"role": "user", "content": "Why is a batch packed? " * 8},
]


class ThreeTurns(ChatEnvironment):
    """A question, followed by two hints of some length."""

    async def episode(self, chat: Any, row: dict[str, Any]) -> float:
        for _ in range(2):
            await chat.reply()
            chat.user("That is not all. Think of the padding, and of the tokens that siblings share. " * 3)
        return float(len((await chat.reply()).content) % 2)


class Timed:
    """Adds up the processor time of the functions that it wraps. They run on one thread and wait for nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        return timed


async def score(texts: list[str], row: dict[str, Any], **_: Any) -> list[RewardScore]:
    return [RewardScore(value=float(len(text) % 2)) for text in texts]


def rss_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def made_runner(engine: PacedEngine, spent: Timed) -> EpisodeRunner:
    talk = chat()
    for name in ("render", "extend", "parse", "spell"):
        setattr(talk, name, spent.wrap(getattr(talk, name)))
    return EpisodeRunner(
        engine=engine,  # pyright: ignore[reportArgumentType]
        environment=GuardedEnvironment("benchmark", ThreeTurns(), len(tokenizer())),
        decode=spent.wrap(make_decode(tokenizer())),
        encode=spent.wrap(make_encode(tokenizer())),
        score=score,
        chat=talk,
    )


class Load:
    """Generates groups one after another in each of its tasks, until `over` is set or the task is cancelled."""

    def __init__(self, runner: EpisodeRunner) -> None:
        self._runner, self._numbers, self.over, self.finished = runner, iter(range(1 << 40)), False, 0

    async def one_after_the_other(self) -> None:
        shape = GroupShape(size=GROUP, fewest=GROUP, tries=1)
        talk = chat()
        sampling = SamplingParams(temperature=1.0, max_new_tokens=256, stop_token_ids=talk.stop_token_ids)
        while not self.over:
            number = next(self._numbers)
            ids = np.asarray(talk.render(QUESTION), np.int32)
            prompt = Prompt(index=number, epoch=0, row=0, token_ids=ids, text="", columns={"prompt": QUESTION})
            order = Assignment(group_id=number, prompt_index=number, attempt=0, seed=number, policy_version=0)
            await self._runner.run_group(order, prompt, shape=shape, sampling=sampling, worker="w")
            self.finished += GROUP


async def lags(over: Callable[[], bool]) -> list[float]:
    found: list[float] = []
    while not over():
        started = time.perf_counter()
        await asyncio.sleep(PAUSE_S)
        found.append((time.perf_counter() - started - PAUSE_S) * 1e3)
    return found


async def measure(episodes: int, rate: float, seconds: float) -> dict[str, float]:
    ids: Sequence[int] = tokenizer().encode((TEXTS / "data.md").read_text(), add_special_tokens=False)
    end = tokenizer().encode(END, add_special_tokens=False)[0]
    engine, spent = PacedEngine(ids, end, tokens=REPLY_TOKENS, token_s=episodes / rate), Timed()
    load = Load(made_runner(engine, spent))
    tasks = [asyncio.create_task(load.one_after_the_other()) for _ in range(max(1, episodes // GROUP))]
    await asyncio.sleep(seconds / 3)
    before = (engine.generated, spent.seconds, time.process_time(), rss_mb(), load.finished, time.perf_counter())
    found = await lags(lambda: time.perf_counter() - before[-1] > seconds * 2 / 3)
    wall = time.perf_counter() - before[-1]
    after = (engine.generated, spent.seconds, time.process_time(), rss_mb(), load.finished)
    for task in tasks:
        task.cancel()
    failed = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Exception)]
    if failed:
        raise failed[0]
    tokens, in_chat, processor, grown, finished = (now - then for now, then in zip(after, before, strict=False))
    return {
        "lag_ms_p50": round(float(np.percentile(found, 50)), 2),
        "lag_ms_p99": round(float(np.percentile(found, 99)), 2),
        "tokens_per_s": round(tokens / wall),
        "episodes_per_s": round(finished / wall, 1),
        "chat_percent": round(100 * in_chat / wall, 2),
        "chat_percent_at_10k_tokens_per_s": round(100 * in_chat / max(1, tokens) * 1e4, 2),
        "processor_percent": round(100 * processor / wall, 1),
        "mb_grown": round(grown, 1),
    }


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=14_000.0, help="tokens per second at most, of all together")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parse(parser, {"episodes": 16, "rate": 16_000.0, "seconds": 1.0})
    row = asyncio.run(measure(options.episodes, options.rate, options.seconds))
    answer("episodes", {"episodes": options.episodes, **row}, smoke=options.smoke)


if __name__ == "__main__":
    main()
