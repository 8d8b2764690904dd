"""Starts ranks early, so that they import their modules while torchrun does. torchrun takes a second to import torch
and starts ranks afterwards; if their number is known, on a single machine, they can start at once.

They read the variables that torchrun sets from standard input, once these are known.
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
"""Our modules that call `launcher.as_rank` before anything else."""


def ranks_and_command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """Number of ranks that this torchrun starts, and the command of each, from its `arguments`. 0 if this becomes known
    only later, or if torchrun sets variables that are needed before the ranks import torch."""
    place = arguments.index("-m") if "-m" in arguments[:-1] else len(arguments)
    wanted = [text.partition("=")[2] for text in arguments[:place] if text.startswith("--nproc-per-node=")]
    known = "--nnodes=1" in arguments[:place] and len(wanted) == 1 and wanted[0].isdecimal()
    ours = place < len(arguments) and arguments[place + 1] in MODULES
    if not (known and ours and "OMP_NUM_THREADS" in environment):
        return 0, ()
    return int(wanted[0]), (sys.executable, "-u", *arguments[place:])


class Ahead:
    """Ranks that one torchrun started before it was ready itself; each is taken once."""

    def __init__(self, ranks: int, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._begun = {rank: self._start(rank, ranks) for rank in range(ranks)}

    def take(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """The process of this rank, which continues with `environment`. None if a new one must be started: it has ended
        or was taken before, or its command is different."""
        process = self._begun.pop(rank, None)
        if process is None:
            return None
        assert process.stdin is not None
        if tuple(command) != self._command or process.poll() is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            return None
        with contextlib.suppress(BrokenPipeError):  # it has just ended, which torchrun will notice
            process.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
            process.stdin.close()
        return process

    def _start(self, rank: int, ranks: int) -> subprocess.Popen[bytes]:
        known = {"LOCAL_RANK": rank, "RANK": rank, "LOCAL_WORLD_SIZE": ranks, "WORLD_SIZE": ranks}
        own = {AHEAD: "1", LAUNCHER: str(os.getpid()), **{name: str(value) for name, value in known.items()}}
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, env={**os.environ, **own}, start_new_session=True, bufsize=0
        )
