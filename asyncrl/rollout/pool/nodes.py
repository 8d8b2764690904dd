"""Queries the nodes of an existing Ray cluster: before the run whether each has what a worker needs, later for the last
log lines of a worker there; and stops the workers there. What killed workers left on a node, such as the keys that they
were sent, is removed on these occasions.

waits for:    an answer of every node on which a worker may be placed
unblocked by: the answers, or LOOK_S
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.errors import ConfigError
from asyncrl.rollout.luggage import there
from asyncrl.rollout.pool.log_tail import last_lines
from asyncrl.storage.held import clear_away

LOOK_S = 120.0
"""Limit in seconds. The node has to start the first process of the run."""
TAIL_S = 10.0


def lacking(paths: list[str]) -> list[str]:
    """The paths at which nothing exists, on the node that runs this."""
    clear_away()
    return [path for path in paths if not there(path)]


def refuse_lacking_nodes(paths: Mapping[str, str], gpus: float) -> None:
    """Refuse a cluster with nodes that lack what workers need.

    Args:
        paths: paths that workers need, with the setting that names each.
        gpus: GPUs per worker; nodes with fewer get no worker.

    Raises:
        ConfigError: with a sentence for every node that lacks a path or does not answer.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0.0) >= gpus]
    asked = {_on(node["NodeID"], lacking).remote(list(paths)): node for node in nodes}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_S) if asked else ([], [])
    said = [line for answer, node in asked.items() for line in _problems(answer, answer in done, _name(node), paths)]
    if said:
        raise ConfigError(
            f"a node of the Ray cluster lacks what workers need there: {'; '.join(said)}. Put it at the same path "
            "on every node, or on a file system that they share, or take the node out of the cluster"
        )


def lacking_room(gpus: Sequence[float], workers: int, each: float) -> str:
    """Return a line if a cluster has too few GPUs for all workers; empty if it has enough. It is no refusal: machines
    may join, and others may use these.

    Args:
        gpus: GPUs of each machine.
        each: GPUs per worker, on one machine.
    """
    if not each:
        return ""
    room = sum(int(here) * int(1 / each + 1e-9) if each < 1 else int(here / each) for here in gpus)
    if room >= workers:
        return ""
    most = int(max(gpus, default=0.0))
    widths = [width for width in range(1, int(each)) if each % width == 0 and width <= most]
    way = "engine.device=cpu, with ray.gpus_per_worker=0, needs none"
    if room:
        way = f"rollout.workers={room} fits now"
    elif widths:
        way = f"workers of {widths[-1]} would fit now"
    have = ", ".join(f"{here:g}" for here in sorted(gpus, reverse=True))
    return (
        f"the Ray cluster has room for {room} of rollout.workers={workers}: each needs {each:g} GPU(s) on one machine "
        f"(engine.tensor_parallel, ray.gpus_per_worker), and its machines have {have}. The others wait for machines "
        f"that join; {way}"
    )


def gpus_of_nodes() -> list[float]:
    return [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]


def _problems(answer: Any, answered: bool, node: str, paths: Mapping[str, str]) -> list[str]:
    if not answered:
        ray.cancel(answer, force=True)
        return [f"{node} gave no answer in {LOOK_S:g} s"]
    try:
        return [f"{node} has nothing at {path} ({paths[path]})" for path in ray.get(answer)]
    except RayError as error:  # asyncrl is missing there, or is for another Python
        lines = lines_of(error)
        return [f"on {node} asyncrl cannot be run: {lines[-1] if lines else error!r:.300}"]


def lines_of(error: RayError) -> list[str]:
    """The lines that are not blank. The last one is the error itself, if Python code raised one."""
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def bury(log_path: str) -> list[str]:
    """Remove what a killed worker left on the node that runs this. Returns the last lines of its log."""
    clear_away()
    return last_lines(log_path)


def bury_on(node: str, log_path: str) -> list[str]:
    """See `bury`. No lines if the node is gone or does not answer within TAIL_S."""
    try:
        return ray.get(_on(node, bury).remote(log_path), timeout=TAIL_S)
    except RayError:
        return []


def terminate_on(node: str, pids: list[int]) -> None:
    """Send SIGTERM to these processes of a node, without waiting for it."""
    _on(node, terminate).remote(pids)


def terminate(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _on(node: str, function: Any) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=strategy)


def _name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeManagerAddress']} ({node['NodeManagerHostname']}, {node['NodeID'][:8]})"
