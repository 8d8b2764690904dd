"""Tools as a user writes them. Not a test: `environment.args.functions` names it."""

from __future__ import annotations

import os
import signal
import time
from typing import Literal


def add(a: int, b: int = 1, kind: Literal["sum", "list"] = "sum") -> int | list[int]:
    """Add two numbers,
    or list them.

    Args:
        a: The first.
        b (int): The second, which
            may be left out.
    """
    return a + b if kind == "sum" else [a, b]


async def later(text: str) -> str:
    """Say it back, a little later."""
    return f"{text}!"


def fail(how: str) -> str:
    """Go wrong."""
    print("a tool may print")
    if how == "loop":
        while True:
            time.sleep(1)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(3)
    if how == "leave a child":
        os.system("sleep 600 &")
        return str(os.getpid())
    if how == "long":
        return "x" * 10_000
    if how == "half a letter":
        raise OSError("half of \ud83d")
    raise OSError("no such luck")


class Counter:
    """One per episode."""

    def __init__(self) -> None:
        self.count = 0

    def step(self, by: int) -> int:
        """Count on."""
        self.count += by
        return self.count

    def _hidden(self) -> None: ...


def untyped(a, b: int) -> int:
    """Add."""
    return a + b


def silent(a: int) -> int:
    return a


def starred(*numbers: int) -> int:
    """Add."""
    return sum(numbers)


def strange(a: os.stat_result) -> int:
    """Add."""
    return 0
