"""torchrun with an additional rendezvous backend and with messages from its ranks.

`python -m asyncrl.learner.torchrun --rdzv-backend=bound ...` behaves as torchrun, except that `--max-restarts` counts
from the last checkpoint, and that a rank has succeeded only if it says so. It is not a plugin of torch, because every
torchrun of the environment would load a plugin.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from asyncrl import collector
from asyncrl.learner.processes.ahead import Ahead, ranks_and_command

if __name__ == "__main__":
    collector.rest()
    begun = Ahead(*ranks_and_command(sys.argv[1:], os.environ))

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, handlers
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    c10d_rendezvous_backend,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api
from torch.distributed.run import main as torchrun

from asyncrl.checks.addresses import is_own, own_address
from asyncrl.learner.processes.launcher import ADVANCED, ENDED, LAUNCHER
from asyncrl.learner.processes.rendezvous import BACKEND, BoundRendezvous, RoundOverError, make_rendezvous


def take_first(begun: Ahead) -> None:
    """Make torchrun adopt the ranks that `begun` has started already, each at its first start."""

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[Any, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            # A rank whose output goes to a file of its own has to be started with that file.
            command = args if self._stdout is None and self._stderr is None else ()
            return begun.take(self.local_rank_id, command, env) or super()._popen(args, env)

    handlers.SubprocessHandler = Handler


class HearingAgent(LocalElasticAgent):
    """Agent that receives messages of its ranks (`launcher.tell`). The count of restarts starts again after each
    checkpoint: torchrun's limit is for the whole run, and a run of weeks sees more failures than that. Exit code 0 of
    ranks that have not reported the end of their work counts as a failure."""

    heard: ClassVar[set[int]] = set()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            with suppress(RoundOverError):  # a node died between meeting and ranks, and is back
                super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]  as below
                break
        name_start(worker_group.spec.rdzv_handler)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]  torch's decorator hides them
        if result.state == WorkerState.SUCCEEDED and ENDED not in self.heard:
            result = RunResult(state=WorkerState.FAILED, failures=unfinished(worker_group))
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and ADVANCED in self.heard:
            self.heard.discard(ADVANCED)
            self._remaining_restarts = worker_group.spec.max_restarts
        return result

    def _exit_barrier(self) -> None:
        super()._exit_barrier()
        rendezvous = self._worker_group.spec.rdzv_handler
        # torch's host leaves as soon as it has read that all have arrived; the others then fail on its closed store.
        if isinstance(rendezvous, BoundRendezvous):
            rendezvous.leave()


def name_start(rendezvous: RendezvousHandler) -> None:
    """Add to the run's id, in torch's own rendezvous, a word for this start of its store, as `BoundRendezvous` does: a
    new start with the RUN_ID of an earlier one would look like its restart, which continues without a resume."""
    if isinstance(rendezvous, DynamicRendezvousHandler) and "get_run_id" not in vars(rendezvous):
        word = f"{rendezvous.get_run_id()}-{uuid.uuid4().hex[:12]}"
        named = rendezvous._store.compare_set("asyncrl/run", "", word).decode()
        rendezvous.get_run_id = lambda: named


def unfinished(group: WorkerGroup) -> dict[int, ProcessFailure]:
    """Failures of ranks that ended with exit code 0 without having reported the end of their work."""
    return {
        each.global_rank: ProcessFailure(local_rank=each.local_rank, pid=each.id, exitcode=0, error_file="")
        for each in group.workers
    }


def hear_ranks() -> None:
    for number in (ADVANCED, ENDED):
        signal.signal(number, lambda number, _: HearingAgent.heard.add(number))
    api.LocalElasticAgent = HearingAgent


def by_address(arguments: Sequence[str]) -> list[str]:
    """`arguments` with `--local-addr` added for torch's own rendezvous: the address under which this machine reaches
    the endpoint. torch resolves the host name, which often gives loopback; then no machine hosts the endpoint, or the
    others do not find rank 0."""
    ours = arguments[: arguments.index("-m")] if "-m" in arguments else arguments
    given = {name: value for name, _, value in (text.partition("=") for text in ours)}
    host = given.get("--rdzv-endpoint", "").rpartition(":")[0].strip("[]")
    if given.get("--rdzv-backend") != "c10d" or not host or "--local-addr" in given:
        return list(arguments)
    with suppress(OSError):  # torchrun itself reports what is wrong with this endpoint
        return [f"--local-addr={own_address(host)}", *arguments]
    return list(arguments)


def host_by_address() -> None:
    by_name = c10d_rendezvous_backend._matches_machine_hostname
    c10d_rendezvous_backend._matches_machine_hostname = lambda host: is_own(host) or by_name(host)


def ending_of(failure: ProcessFailure) -> str:
    if failure.exitcode == 0:
        return "exit code 0 before its work was done: does code of yours (a hook, a loss) call os._exit?"
    return failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"


def without_log_dir(arguments: list[str]) -> list[str]:
    """Otherwise torchrun leaves an empty folder behind at every start; the ranks' output is in our logs."""
    ours = arguments[: arguments.index("-m")] if "-m" in arguments else arguments
    return arguments if any(text.startswith("--log-dir") for text in ours) else ["--log-dir=/dev/null", *arguments]


def main(begun: Ahead) -> None:
    take_first(begun)
    hear_ranks()
    host_by_address()
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        torchrun(without_log_dir(by_address(sys.argv[1:])))
    # The ranks' own messages would scroll out of sight behind torchrun's tracebacks.
    except SignalException as error:
        sys.exit(f"torchrun: ended by {error.sigval.name}")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"torchrun: rank {rank} (pid {failure.pid}) ended first, with {ending_of(failure)}")


if __name__ == "__main__":
    collector.wake()
    main(begun)
