"""Runs workers as Ray actors, on a local Ray started here or on an existing cluster (`ray.address`)."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.checks.addresses import socket_folder
from asyncrl.checks.evaluations import served_rewards
from asyncrl.checks.placement import gpus_per_engine, visible_gpus
from asyncrl.config import config_to_dict
from asyncrl.errors import ConfigError
from asyncrl.rollout.assigned import see_own_gpus
from asyncrl.rollout.host import EXIT_FAILED, EXIT_REFUSED, HostLostError, WorkerExit, WorkerSpec, run_worker_here
from asyncrl.rollout.luggage import Luggage, local_paths, pack, unpacked
from asyncrl.rollout.pool.log_tail import last_lines
from asyncrl.rollout.pool.nodes import (
    bury_on,
    gpus_of_nodes,
    lacking_room,
    lines_of,
    refuse_lacking_nodes,
    terminate,
    terminate_on,
)
from asyncrl.rollout.pool.ray_health import RayHealth
from asyncrl.rollout.pool.specs import absolute_paths, worker_environment
from asyncrl.rollout.rewards.service import start_service
from asyncrl.schema import Config
from asyncrl.utils.process_tree import die_with_parent

NAMESPACE = "asyncrl"
OBJECT_STORE_BYTES = 80 << 20
"""Near Ray's minimum: trajectories and weights do not use the object store."""
RAY_SOCKET = len("/ray/session_YYYY-MM-DD_HH-MM-SS_ffffff_PIDOFIT/sockets/plasma_store")
STOP_TIMEOUT_S = 10.0
PLACE_TOLD_S = 30.0
"""Seconds between two messages about a worker that Ray has not placed, or whose process has not started."""


class RolloutWorkerActor:
    """One worker. Every start uses a new actor, and so a new process."""

    def placed(self) -> tuple[str, int]:
        """Return the node that the actor is on, and its pid there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, payload: dict[str, Any], luggage: Luggage) -> tuple[int, list[str]]:
        """Block for the lifetime of the worker; return its exit code and the last lines of its log here."""
        spec = WorkerSpec(**payload)
        os.environ.update(luggage.environment | spec.environment)
        see_own_gpus()
        die_with_parent(os.getppid())  # when a raylet is killed, Ray leaves its actors running
        with unpacked(luggage, spec.config) as settings:
            code = run_worker_here(replace(spec, config=settings))
        try:
            return code, last_lines(spec.log_path)
        except OSError:
            return code, []


@dataclass(slots=True)
class _Started:
    name: str
    actor: Any
    placed: Any
    """Reference that is ready, with the node, once the actor's process runs; None afterwards."""
    started_at: float
    told_at: float
    log_path: str
    node: str = ""
    pid: int = 0


def give_token() -> None:
    """To a Ray of our own, which keeps its token in ~/.ray and does not start where nothing can be written there."""
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    try:
        token = Path.home() / ".ray" / "auth_token"
        there = next(path for path in (token, *token.parents) if path.exists())
        kept = os.access(there, os.R_OK) if there == token else there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except (RuntimeError, OSError):  # a user without a name, or a folder that may not be entered
        kept = False
    if not kept:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


class RayHost:
    """Implements `host.WorkerHost`.

    Args:
        gpus: GPUs of the local Ray; None lets Ray count them.
        gpus_per_worker: returns the GPUs that Ray reserves per worker, given how many it has.
        processes_per_worker: `engine.tensor_parallel`. Above 1 every worker has a reservation of its own, made at its
            first start and kept through its restarts: this many CPUs and its GPUs, all on one machine. Otherwise an
            engine that released its GPUs when it died might not get them all again.
        patience_s: limit in seconds on the time without any running worker.
        luggage: what workers on other nodes receive from this one.
    """

    def __init__(
        self,
        *,
        address: str,
        workers: int,
        gpus: int | None = None,
        gpus_per_worker: Callable[[int], float],
        processes_per_worker: int = 1,
        patience_s: float = 300.0,
        luggage: Luggage | None = None,
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.WARNING}
        if address:
            try:
                ray.init(address=address, **options)
            except ConnectionError as error:
                raise ConfigError(
                    f"ray.address={address}: no Ray cluster answers there ({error}). Start one (`ray start --head`), "
                    "or leave ray.address empty for a local one. A cluster that requires a token needs "
                    "RAY_AUTH_MODE=token here, and the token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
                ) from error
        else:
            # Ray's default, 15, starves the engines when the learner or another process competes for the cores.
            os.environ.setdefault("RAY_worker_niceness", "0")
            os.environ.setdefault("RAY_TMPDIR", socket_folder(RAY_SOCKET))
            give_token()
            # One logical CPU per worker: Ray pre-starts this many processes, so each worker finds one ready.
            options |= {"num_cpus": workers * processes_per_worker, "num_gpus": gpus, "include_dashboard": False}
            try:
                ray.init(address="local", object_store_memory=OBJECT_STORE_BYTES, **options)
            except Exception as error:  # where a part of Ray does not start in 30 s, it raises just this class
                raise ConfigError(
                    f"Ray cannot start here: {error} RAY_TMPDIR={os.environ['RAY_TMPDIR']} is the folder of its files, "
                    "logs and sockets. On a machine that is busy with other work, start again; rollout.host=process "
                    "needs no Ray"
                ) from error
        self._gpus, self._processes = gpus_per_worker(int(ray.cluster_resources().get("GPU", 0))), processes_per_worker
        # No CPUs are reserved: with more workers than cores Ray would otherwise let some wait for ever.
        self._actor_class = ray.remote(num_cpus=0, num_gpus=self._gpus, max_restarts=0, scheduling_strategy="SPREAD")(
            RolloutWorkerActor
        )
        self._places: dict[str, PlacementGroup] = {}
        self._running: dict[Any, _Started] = {}
        self._services: list[Any] = []
        self._health = RayHealth(address)
        self._local, self._lost = not address, False
        self._luggage, self._here = luggage or Luggage(), ray.get_runtime_context().get_node_id()
        self._patience_s, self._some_ran_at = patience_s, time.monotonic()

    def serve_rewards(self, reward: dict[str, Any], environment: dict[str, str], of_set: str = "") -> None:
        """Start a reward service for the workers; see `rewards.service`."""
        self._services.append(start_service(reward, environment, of_set, self._luggage))

    @property
    def gpus_per_worker(self) -> float:
        return self._gpus

    def start(self, spec: WorkerSpec) -> None:
        actor = self._actor_class.options(**self._place(spec.name)).remote()
        placed = actor.placed.remote()
        now = time.monotonic()
        run = actor.run.remote(asdict(spec), self._luggage)
        self._running[run] = _Started(spec.name, actor, placed, now, now, spec.log_path)

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        try:
            self._health.check()
        except HostLostError:
            self._lost = True
            raise
        for line in self._health.news():
            print(line, file=sys.stderr, flush=True)
        if not self._running:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return [self._collect(reference) for reference in done] + self._unplaced()

    def close(self) -> None:
        if self._lost:  # each call below would wait for what is gone
            return
        self._health.close()
        self._end_in_order()
        for started in self._running.values():
            ray.kill(started.actor)
        self._running.clear()
        for service in self._services:
            ray.kill(service)
        for place in self._places.values():
            remove_placement_group(place)
        ray.shutdown()

    def _end_in_order(self) -> None:
        """Stop the workers: one that Ray kills returns no assignments, and its engine leaves sockets and shared memory
        behind."""
        ending: list[Any] = []
        pids: dict[str, list[int]] = {}
        for run, started in self._running.items():
            self._note_place(started)
            if started.node:
                pids.setdefault(started.node, []).append(started.pid)
                ending.append(run)
        for node, found in pids.items():
            if node == self._here:
                terminate(found)
            else:
                terminate_on(node, found)
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=STOP_TIMEOUT_S)

    def _place(self, name: str) -> dict[str, Any]:
        """Options of this worker's actor, in addition to the common ones. Ray may not have made the reservation yet."""
        if self._processes == 1:
            return {}
        resources = {"CPU": float(self._processes)} | ({"GPU": self._gpus} if self._gpus else {})
        if name not in self._places:
            # One bundle, not one per process: an actor has to fit into one, and vLLM's processes are its children.
            self._places[name] = placement_group([resources], strategy="STRICT_PACK", name=name)
        strategy = PlacementGroupSchedulingStrategy(self._places[name], placement_group_bundle_index=0)
        return {"num_cpus": self._processes, "scheduling_strategy": strategy}

    def _collect(self, reference: Any) -> WorkerExit:
        started = self._running.pop(reference)
        self._note_place(started)
        try:
            code, said = ray.get(reference)
            how = f"exit code {code}"
            ray.kill(started.actor)
        except RayError as error:  # the actor's process died: killed, out of memory, node lost
            code, how = EXIT_FAILED, _summary(error)
            said = bury_on(started.node, started.log_path) if started.node not in ("", self._here) else []
        elsewhere = started.node not in ("", self._here)
        return WorkerExit(
            name=started.name,
            code=code,
            how=how,
            said=said[-1].strip() if said else "",
            log=tuple(said) if elsewhere else (),
            elsewhere=elsewhere,
        )

    def _note_place(self, started: _Started) -> None:
        """Record where the worker's process is, if it has started."""
        if started.placed is not None and ray.wait([started.placed], timeout=0)[0]:
            with contextlib.suppress(RayError):
                started.node, started.pid = ray.get(started.placed)
            started.placed = None

    def _unplaced(self) -> list[WorkerExit]:
        """Report workers that wait to be placed; give up when no worker has run for `patience_s`."""
        now = time.monotonic()
        for started in self._running.values():
            self._note_place(started)
        waiting = {ref: started for ref, started in self._running.items() if started.placed is not None}
        if len(waiting) < len(self._running):
            self._some_ran_at = now
        for started in waiting.values():
            if now - started.told_at > PLACE_TOLD_S:
                started.told_at = now
                print(f"worker {started.name}: {self._no_place(now - started.started_at)}", file=sys.stderr, flush=True)
        since = min((started.started_at for started in waiting.values()), default=now)
        if not waiting or now - max(self._some_ran_at, since) < self._patience_s:
            return []
        exits = []
        for reference, started in waiting.items():
            del self._running[reference]
            ray.kill(started.actor)
            how = f"{self._no_place(now - started.started_at)}, and no other worker runs (replay.wait_timeout_s)"
            exits.append(WorkerExit(name=started.name, code=EXIT_REFUSED, how=how))
        return exits

    def _no_place(self, waited_s: float) -> str:
        return (
            f"Ray has found no place for it in {waited_s:.0f} s: it needs {self._gpus:g} GPUs and "
            f"{self._processes if self._processes > 1 else 0} CPUs on one machine (ray.gpus_per_worker, "
            "engine.tensor_parallel); see `ray status`"
        )


def _summary(error: RayError) -> str:
    """The first and last line: Ray's description, and the error itself if Python code raised one."""
    lines = lines_of(error)
    return " ... ".join(dict.fromkeys(line[:200] for line in (lines[:1] + lines[-1:])))


def make_host(config: Config) -> RayHost:
    """Raises ConfigError if there is no such cluster, or one of its nodes lacks what workers need."""
    visible, settings = visible_gpus(), absolute_paths(config_to_dict(config))
    host = RayHost(
        address=config.ray.address,
        workers=config.rollout.workers,
        gpus=None if visible is None else len(visible),
        gpus_per_worker=partial(gpus_per_engine, config),
        processes_per_worker=config.engine.tensor_parallel,
        patience_s=config.replay.wait_timeout_s,
        luggage=pack(config, settings, os.environ) if config.ray.address else None,
    )
    if config.ray.address:
        try:
            refuse_lacking_nodes(local_paths(settings), host.gpus_per_worker)
        except ConfigError:
            host.close()
            raise
        if line := lacking_room(gpus_of_nodes(), config.rollout.workers, host.gpus_per_worker):
            print(line, file=sys.stderr, flush=True)
    if config.reward.host == "ray":
        environment = worker_environment(config)
        for of_set, reward in served_rewards(config).items():
            absolute = absolute_paths(config_to_dict(replace(config, reward=reward)))["reward"]
            host.serve_rewards(absolute, environment, of_set)
    return host
