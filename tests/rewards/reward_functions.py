"""Reward functions, well-behaved and not, for the tests of the pool."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
import zlib
from typing import Any


def length(completion, row):
    return float(len(completion))


def by_command(completion, row):
    """Behave as the row says."""
    command = row["do"]
    if command == "hang":
        time.sleep(600)
    elif command == "hang_in_c":
        ctypes.PyDLL(None).sleep(600)  # while holding the interpreter's lock
    elif command == "exit":
        os._exit(3)
    elif command == "sys_exit":
        sys.exit(4)
    elif command == "segfault":
        ctypes.string_at(0)
    elif command == "raise":
        raise KeyError("no such thing")
    elif command == "child_process":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os._exit(5)
    elif command == "print":
        print("noise" * 1000)
        sys.stdout.flush()
        os.write(1, b"\xff\xff\xff\xff raw noise on descriptor 1")
    elif command == "read_stdin":
        sys.stdin.read()
    elif command == "slow":
        time.sleep(0.02)
    elif command == "return":
        return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "no_score": {"a": 1}}[
            row["what"]
        ]
    return {"score": 1.0, "letters": len(completion), "note": "kept out"}


def compute_score(data_source, solution_str, ground_truth, extra_info: Any = None):
    return {"score": float(solution_str == ground_truth), "easy": extra_info["easy"], "from": data_source}


def hangs_for_all(completions, **columns):
    time.sleep(600)


def trl_lengths(prompts, completions, answer, **columns):
    assert len(prompts) == len(answer) == len(completions)
    return [len(c) if isinstance(c, str) else len(c[0]["content"]) for c in completions]


def trl_too_few(completions, **columns):
    return [1.0]


async def asynchronous(completion, row):
    return 2.5


def no_arguments():
    return 1.0


not_a_function = 3


class Judge:
    """A judge as `reward.model` makes it, whose "model" is only a path."""

    def __init__(self, path):
        if path == "broken":
            raise OSError("no weights there")
        self.path = path

    def __call__(self, prompts, completions):
        return [
            float(len(self.path) + len(prompt) + len(text)) for prompt, text in zip(prompts, completions, strict=True)
        ]


def no_judge(path):
    return None


def picky(completion, row):
    if completion == "bad":
        raise ValueError("cannot read it")
    return 1.0


def trl_picky(completions, **columns):
    return [None if completion == "bad" else 1.0 for completion in completions]


def mixed(completion, row):
    """Behave as the completion says, so that the completions of one group can end in different ways."""
    if completion == "exit":
        os._exit(3)
    if completion == "hang":
        time.sleep(600)
    if completion == "raise":
        raise ValueError("cannot read it")
    return float("nan") if completion == "nan" else float(len(completion))


def slowly(completion, row):
    time.sleep(row["seconds"])
    return 1.0


async def waits(completion, row):
    """Wait for as many seconds as the completion says. `deaf` also catches its cancellation; `blocks` awaits nothing;
    `exits` ends its process."""
    if completion == "blocks":
        time.sleep(600)
    if completion == "exits":
        sys.exit(4)
    try:
        await asyncio.sleep(600 if completion in ("hang", "deaf") else float(completion))
    except asyncio.CancelledError:
        if completion != "deaf":
            raise
        time.sleep(600)
    return 1.0


async def will_not_end(completion, row):
    """Return 1, but never for `deaf`, which goes on whenever it is cancelled."""
    while completion == "deaf":
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue
    return 1.0


_together, _most = 0, 0


async def crowd(completion, row, wanted):
    """Wait until `wanted` calls have run concurrently, and return the largest number so far."""
    global _together, _most
    _together += 1
    _most = max(_most, _together)
    try:
        while _most < wanted:  # ends at reward.timeout_s
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # a call beyond the limit would start now
        return float(_most)
    finally:
        _together -= 1


def chaotic(completion, row):
    """End as the hash of the completion's text decides; see `outcome_of`."""
    outcome = outcome_of(completion)
    if outcome == "hang":
        time.sleep(600)
    if outcome == "exit":
        os._exit(3)
    if outcome == "raise":
        raise ValueError("cannot read it")
    return float("nan") if outcome == "nan" else 1.0 + len(completion)


def outcome_of(completion):
    number = zlib.crc32(completion.encode()) % 160
    return "hang" if number == 0 else ("raise", "nan", "exit", "score", "score", "score", "score")[number % 7]
