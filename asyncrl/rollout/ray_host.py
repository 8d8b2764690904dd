"""Workers as Ray actors, on a local Ray started here or on an existing cluster (`ray.address`)."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.config import config_to_dict
from asyncrl.errors import ConfigError
from asyncrl.rollout.host import EXIT_FAILED, WorkerExit, WorkerSpec, late_import
from asyncrl.rollout.pool import absolute_paths, worker_environment
from asyncrl.rollout.reward_service import start_service
from asyncrl.schema import Config

NAMESPACE = "asyncrl"
OBJECT_STORE_BYTES = 80 << 20
"""Near Ray's minimum: trajectories and weights never go through it."""
PLACE_TIMEOUT_S = 300.0
"""For Ray to find a node and start the actor's process."""


class RolloutWorkerActor:
    """One worker; a fresh actor, hence a fresh process, for every start."""

    def placed(self) -> int:
        return os.getpid()

    def run(self, payload: dict[str, Any]) -> int:
        """Blocks for the life of the worker; returns its exit code."""
        spec = WorkerSpec(**payload)
        os.environ.update(spec.environment)
        return late_import("process").run_worker_process(spec)


@dataclass(slots=True)
class _Started:
    name: str
    actor: Any
    placed: Any
    """Reference that is ready once the actor's process runs; None after it was."""
    started_at: float


class RayHost:
    """Implements `host.WorkerHost`.

    Args:
        gpus_per_worker: GPUs that Ray keeps for each.
        processes_per_worker: `engine.tensor_parallel`. Above 1 every worker has a place of its own, reserved at its
            first start and kept through its restarts: so many CPUs and its GPUs, all on one machine. An engine that
            gave its GPUs back when it died might not get as many again.
    """

    def __init__(self, *, address: str, workers: int, gpus_per_worker: float, processes_per_worker: int = 1) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.WARNING}
        if address:
            try:
                ray.init(address=address, **options)
            except ConnectionError as error:
                raise ConfigError(
                    f"ray.address={address}: no Ray cluster answers there ({error}). Start one: `ray start --head`, "
                    "or leave ray.address empty for a local one"
                ) from error
        else:
            # One logical CPU per worker: Ray pre-starts that many processes, and each worker finds one waiting.
            ray.init(
                address="local",
                num_cpus=workers * processes_per_worker,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **options,
            )
        # No CPUs are reserved: with more workers than cores Ray would otherwise leave some waiting for ever.
        self._actor_class = ray.remote(
            num_cpus=0, num_gpus=gpus_per_worker, max_restarts=0, scheduling_strategy="SPREAD"
        )(RolloutWorkerActor)
        self._gpus, self._processes = gpus_per_worker, processes_per_worker
        self._places: dict[str, PlacementGroup] = {}
        self._running: dict[Any, _Started] = {}
        self._service: Any = None

    def serve_rewards(self, reward: dict[str, Any], environment: dict[str, str]) -> None:
        """Start the reward service that the workers will look for; see `reward_service`."""
        self._service = start_service(reward, environment)

    def start(self, spec: WorkerSpec) -> None:
        actor = self._actor_class.options(**self._place(spec.name)).remote()
        placed = actor.placed.remote()
        self._running[actor.run.remote(asdict(spec))] = _Started(spec.name, actor, placed, time.monotonic())

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        if not self._running:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return [self._collect(reference) for reference in done] + self._unplaced()

    def close(self) -> None:
        for started in self._running.values():
            ray.kill(started.actor)
        self._running.clear()
        if self._service is not None:
            ray.kill(self._service)
        for place in self._places.values():
            remove_placement_group(place)
        ray.shutdown()

    def _place(self, name: str) -> dict[str, Any]:
        """Options of this worker's actor, on top of those all have. Its place may still be waited for by Ray."""
        if self._processes == 1:
            return {}
        resources = {"CPU": float(self._processes)} | ({"GPU": self._gpus} if self._gpus else {})
        if name not in self._places:
            # One bundle, not one per process: an actor has to fit into a single one, and vLLM's processes are its
            # children, on its machine.
            self._places[name] = placement_group([resources], strategy="STRICT_PACK", name=name)
        strategy = PlacementGroupSchedulingStrategy(self._places[name], placement_group_bundle_index=0)
        return {"num_cpus": self._processes, "scheduling_strategy": strategy}

    def _collect(self, reference: Any) -> WorkerExit:
        started = self._running.pop(reference)
        try:
            code = int(ray.get(reference))
        except RayError as error:  # the actor's process died: killed, out of memory, node lost
            return WorkerExit(name=started.name, code=EXIT_FAILED, how=_summary(error))
        ray.kill(started.actor)
        return WorkerExit(name=started.name, code=code, how=f"exit code {code}")

    def _unplaced(self) -> list[WorkerExit]:
        exits = []
        for reference, started in list(self._running.items()):
            if started.placed is None:
                continue
            if ray.wait([started.placed], timeout=0)[0]:
                started.placed = None
            elif time.monotonic() - started.started_at > PLACE_TIMEOUT_S:
                del self._running[reference]
                ray.kill(started.actor)
                how = (
                    f"Ray found no place for it in {PLACE_TIMEOUT_S:.0f} s: it asks for {self._gpus:g} GPUs and "
                    f"{self._processes if self._processes > 1 else 0} CPUs on one machine (ray.gpus_per_worker, "
                    "engine.tensor_parallel); see `ray status`"
                )
                exits.append(WorkerExit(name=started.name, code=EXIT_FAILED, how=how))
        return exits


def _summary(error: RayError) -> str:
    """First and last line: what Ray says happened, and the error itself where Python code raised one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys(line[:200] for line in (lines[:1] + lines[-1:])))


def make_host(config: Config) -> RayHost:
    host = RayHost(
        address=config.ray.address,
        workers=config.rollout.workers,
        gpus_per_worker=config.ray.gpus_per_worker,
        processes_per_worker=config.engine.tensor_parallel,
    )
    if config.reward.host == "ray":
        host.serve_rewards(absolute_paths(config_to_dict(config))["reward"], worker_environment(config))
    return host
