"""How often the workers of an engine are asked while they receive: each question waits for the steps in flight."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from asyncrl.engines.vllm.receiver import POLL_S, VllmReceiver

WORKERS = 2


class Executor:
    """Two workers whose side threads take a while; counts the questions."""

    def __init__(self, takes_s: float, *, signals: bool) -> None:
        self._takes_s, self._signals = takes_s, signals
        self.polls, self.done = 0, False

    def __call__(self, method: str, *arguments: Any) -> list[Any]:
        if method == "asyncrl_begin":
            threading.Thread(target=self._work, args=arguments[1]["signal"], daemon=True).start()
            return ["", ""]
        self.polls += method == "asyncrl_poll"
        return [[self.done, ["print"], ""]] * WORKERS

    def _work(self, name: str, number: int) -> None:
        time.sleep(self._takes_s)
        self.done = True
        for _ in range(WORKERS if self._signals else 0):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.sendto(str(number).encode(), f"\0{name}")


@pytest.mark.parametrize("signals", [True, False])
def test_workers_are_asked_four_times_a_second_at_most_and_once_more_when_all_have_signalled(signals: bool) -> None:
    executor = Executor(4 * POLL_S, signals=signals)
    receiver = VllmReceiver(executor, WORKERS)
    receiver._begin("receive", {})
    began = time.monotonic()
    assert receiver._wait(60.0, "receive") == [["print"]] * WORKERS
    assert executor.polls <= (time.monotonic() - began) / POLL_S + 1


def test_a_signal_of_an_earlier_job_does_not_end_the_wait_for_the_next() -> None:
    executor = Executor(0.0, signals=True)
    receiver = VllmReceiver(executor, WORKERS)
    receiver._begin("receive", {})
    time.sleep(0.1)  # its signals lie in the socket
    executor.done, executor._takes_s = False, 2 * POLL_S
    receiver._begin("receive", {})
    began = time.monotonic()
    receiver._wait(60.0, "receive")
    assert time.monotonic() - began >= 1.5 * POLL_S
