"""Ranks that import what they need while their torchrun does. It needs a second to import torch and starts them after
that; where it is told how many they are to be, on one machine, they can begin at once.

What they are to be told they read from standard input, as it becomes known: the variables that torchrun sets.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from asyncrl.learner.processes.launcher import AHEAD, LAUNCHER

MODULES = ("asyncrl.learner", "asyncrl.sft")
"""Of ours those that are `launcher.as_rank` and nothing before."""


def ranks_and_command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """How many ranks this torchrun starts and the command of each, from its `arguments`; none where that shows later,
    or where it sets what has to stand before they import torch."""
    place = arguments.index("-m") if "-m" in arguments[:-1] else len(arguments)
    wanted = [text.partition("=")[2] for text in arguments[:place] if text.startswith("--nproc-per-node=")]
    known = "--nnodes=1" in arguments[:place] and len(wanted) == 1 and wanted[0].isdecimal()
    ours = place < len(arguments) and arguments[place + 1] in MODULES
    if not (known and ours and "OMP_NUM_THREADS" in environment):
        return 0, ()
    return int(wanted[0]), (sys.executable, "-u", *arguments[place:])


class Ahead:
    """The ranks that one torchrun has started before it was ready; each is taken once."""

    def __init__(self, ranks: int, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._begun = {rank: self._start(rank, ranks) for rank in range(ranks)}

    def take(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """The process of this rank, which goes on with `environment`; None where it is to be started anew: it has ended
        or was taken before, or its command is another one."""
        process = self._begun.pop(rank, None)
        if process is None:
            return None
        assert process.stdin is not None
        if tuple(command) != self._command or process.poll() is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            return None
        with contextlib.suppress(BrokenPipeError):  # it has ended just now, as torchrun will see
            process.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
            process.stdin.close()
        return process

    def _start(self, rank: int, ranks: int) -> subprocess.Popen[bytes]:
        known = {"LOCAL_RANK": rank, "RANK": rank, "LOCAL_WORLD_SIZE": ranks, "WORLD_SIZE": ranks}
        own = {AHEAD: "1", LAUNCHER: str(os.getpid()), **{name: str(value) for name, value in known.items()}}
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, env={**os.environ, **own}, start_new_session=True, bufsize=0
        )
