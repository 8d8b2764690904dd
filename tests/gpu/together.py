"""Checks of processes that share one GPU: their placement, weights passed in its memory while a process dies, and a
learner that trains beside an engine that samples. Without a GPU the same runs over shared memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.placement import VISIBLE, impossible_placement, placement_of, visible_gpus
from asyncrl.cli.processes.commands import local_commands, with_gpus
from asyncrl.learner.assembly import assemble
from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.publishing.canary import ProvingPublisher, canary_of
from asyncrl.learner.train import train
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config, PlacementConfig, RunConfig
from asyncrl.settings.replay import ReplayConfig
from asyncrl.weights.canary import compare
from asyncrl.weights.factory import make_publisher
from tests.gpu.beside import INCARNATION, NAMES, engine_beside
from tests.gpu.scale import Scale
from tests.learner.fed_replay import FedReplay, KeptRows
from tests.weights.board import BoardManager
from tests.weights.chaos import SHORT, context_of, run

Found = dict[str, Any]
WITHIN_S = 240.0
"""Limit in seconds for any process to start, load a model, or load a version."""
STEPS, KILLED_AT = 5, 3
FAKED = ("GPU-0a",)
"""Name of a GPU used if there is none: it is passed on as a real one, and torch counts 0 GPUs."""


def placement(scale: Scale, folder: Path, backend: FSDP2) -> Found:
    """Check that learner and pool, as `asyncrl local` starts them, see the GPUs given to them and can hold their shares
    of the memory at the same time. A single GPU is given to both, and `dedicated` placement is refused."""
    visible = FAKED if scale.device.type == "cpu" else visible_gpus() or ()
    assert scale.device.type == "cpu" or len(visible) == torch.cuda.device_count(), visible
    config = scale.config(folder, "tiny")
    commands = with_gpus(local_commands(config, (), "gpu"), config, visible)
    placed = placement_of(config, len(visible))
    memory = {"learner": placed.learner[0].memory, "rollout": placed.engine_memory}
    given = {command.role: command.enforced[VISIBLE] for command in commands if command.gpus is not None}
    assert given.keys() == memory.keys(), given
    with ExitStack() as opened:
        started = {role: opened.enter_context(looking(given[role], memory[role])) for role in given}
        seen = {role: json.loads(_line(process)) for role, process in started.items()}
    for role, names in given.items():
        here = len(names.split(",")) if scale.device.type == "cuda" else 0
        assert seen[role]["visible"] == names and seen[role]["gpus"] == here, (role, seen[role])
        assert scale.device.type == "cpu" or 0.8 < seen[role]["held"] / memory[role] <= 1, (role, seen[role])
    alone = len(visible) == 1
    assert (given["learner"] == given["rollout"]) == alone == placed.shared, given
    wanted = replace(config, placement=PlacementConfig(mode="dedicated"))
    assert any("nearest setting that fits" in why for why in impossible_placement(wanted, len(visible))) == alone
    return {"mode": placed.mode, "given": given, "seen": seen}


@contextmanager
def looking(gpus: str, share: float) -> Iterator[subprocess.Popen[str]]:
    """Run a process that prints what it sees of `gpus`, and holds `share` of the first one's memory until the end."""
    arguments = [sys.executable, "-m", "tests.gpu.look", str(share)]
    process = subprocess.Popen(
        arguments, env=os.environ | {VISIBLE: gpus}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(WITHIN_S) == 0
    finally:
        process.kill()
        process.wait(WITHIN_S)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"a process that looked at its GPU ended: {process.wait(WITHIN_S)}"
    return line


def ipc(scale: Scale, folder: Path, backend: FSDP2) -> Found:
    """Kill a worker, then the learner, during an update that passes in the device's memory. The others must go on, and
    none may ever hold two versions."""
    rows: list[dict[str, Any]] = []
    run(tuple(each for each in SHORT if each.ipc), rows.append, WITHIN_S, str(scale.device))
    recovered = {row["injection"]: row["recovered_s"] for row in rows if "injection" in row}
    assert {name.partition(":")[0] for name in recovered} == {"kill@worker", "kill@learner"}, recovered
    return {"recovered_s": recovered} | rows[-1]


def together(scale: Scale, folder: Path, backend: FSDP2) -> Found:
    """Train the whole learner on the device where an engine samples.

    Every version is passed through the device's memory and verified by the canary. The engine is killed while it
    samples and replaced. At the end the log-probs of its samples must match those of the learner.
    """
    config = beside_each_other(scale, folder)
    with BoardManager() as manager, ExitStack() as opened:
        board = manager.Board()  # pyright: ignore[reportAttributeAccessIssue]
        engines = opened.enter_context(Engines.started(config, board, scale.device))
        rows, replay = KeptRows(), Fed(scale, engines)
        parts = assemble(
            config,
            scale.place,
            opened,
            backend=backend,
            replay=replay,
            run_dir=Path(config.run.dir),
            resume="never",
            publisher=lambda roles: ProvingPublisher(
                make_publisher(config, board, Path(config.run.dir), 0, scale.device), config, roles.policy, scale.device
            ),
            log=lambda _: rows,
        )
        last = train(config, parts)
        engines.wait(lambda: engines.sampled(last), f"something is sampled by version {last}")
        policy = parts.roles.policy
        apart = differences(config, policy, engines.sampled(last)[-1], scale.device)
        served = board.served()
    assert {worker for worker, *_ in served} == set(NAMES), served
    assert len({version for _, version, *_ in served}) == len({(version, proof) for _, version, proof, _ in served})
    sampled = [note for note in engines.notes if note["worker"] == NAMES[-1]]
    return {
        "model": scale.model,
        "versions": len({version for _, version, *_ in served}),
        "update_s": statistics.median(row["weights/update_s"] for row in rows.rows[1:]),
        "engine_stall_s": max(row["weights/stall_s"] for row in rows.rows),
        "learner_stall_s": statistics.median(row["weights/learner_stall_s"] for row in rows.rows),
        "trained_tokens_per_s": statistics.median(row["perf/trained_tokens_per_s"] for row in rows.rows),
        "sampled_tokens_per_s": statistics.median(note["tokens"] / note["seconds"] for note in sampled),
        "logprob_apart": apart,
    }


def beside_each_other(scale: Scale, folder: Path) -> Config:
    """Return the config of a learner and an engine of the scale's model on one device."""
    config = scale.config(folder, scale.model, steps=STEPS, save_every=0, export_every=0)
    config = with_dtypes(config, learner=scale.device.type, engine=scale.device.type)
    return replace(
        config,
        weights=replace(config.weights, backend="ipc", verify_every=1),
        engine=replace(config.engine, max_sequences=scale.size),
        replay=ReplayConfig(wait_timeout_s=2 * WITHIN_S),
        run=RunConfig(dir=str(folder / "together")),
    )


class Fed(FedReplay):
    """Leases the scale's batch at each step, once an engine serves the version before. At step `KILLED_AT` it kills the
    engine."""

    def __init__(self, scale: Scale, engines: Engines) -> None:
        super().__init__()
        self._lease, self._engines = scale.lease(), engines

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        wanted = max(step - 1, 0)
        self._engines.wait(lambda: self._engines.newest() >= wanted, f"version {wanted} is served")
        if step == KILLED_AT:
            self._engines.kill()
        return replace(self._lease, plan=replace(self._lease.plan, step=step))


class Engines:
    """One engine at a time, in a process of its own; after a kill the next one."""

    def __init__(self, config: Config, board: Any, device: torch.device) -> None:
        self.notes: list[dict[str, Any]] = []
        """The notes of what was sampled; see `beside.sample`."""
        self._config, self._board = config, board
        self._context, self._left = context_of(str(device), "tests.gpu.beside"), list(NAMES)

    @classmethod
    @contextmanager
    def started(cls, config: Config, board: Any, device: torch.device) -> Iterator[Engines]:
        engines = cls(config, board, device)
        engines._start()
        try:
            yield engines
        finally:
            engines._process.kill()
            engines._process.join(WITHIN_S)

    def _start(self) -> None:
        self._name = self._left.pop(0)
        self._process = self._context.Process(target=engine_beside, args=(self._board, self._config, self._name))
        self._process.start()

    def kill(self) -> None:
        """Kill the engine while it samples and the learner makes the next version. Start another."""
        self.wait(lambda: self.sampled(), f"{self._name} samples")
        self._process.kill()
        self._process.join(WITHIN_S)
        self._board.leave(self._name, INCARNATION)
        self._start()

    def newest(self) -> int:
        """Return the newest version that an engine has served; -1 if none."""
        return max((version for _, version, *_ in self._board.served()), default=-1)

    def sampled(self, version: int = -1) -> list[dict[str, Any]]:
        """Return the current engine's notes of completions sampled entirely by `version`; by any, if it is negative."""
        self.notes = self._board.notes("sampled")
        own = [note for note in self.notes if note["worker"] == self._name]
        return [note for note in own if version < 0 or set(note["versions"]) == {version}]

    def wait(self, what: Callable[[], object], why: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not what():
            assert self._process.is_alive(), f"{self._name} ended by itself ({self._process.exitcode}) before {why}"
            assert time.monotonic() < deadline, f"not within {WITHIN_S:g} s: {why}"
            time.sleep(0.05)


def differences(config: Config, policy: PolicyModel, note: dict[str, Any], device: torch.device) -> float:
    """Return the mean |difference| between the log-probs with which a completion was sampled and the learner's.

    Raises:
        AssertionError: it is more than the canary allows for these dtypes.
    """
    prompt, ids, logprobs = note["prompt"], note["ids"], note["logprobs"]
    whole = np.array([*prompt, *ids], np.int32)
    canary = canary_of(policy, [whole], device, config.model.dtype, config.weights.wire_dtype)
    canary = replace(canary, sequences=(whole[len(prompt) - 1 :],), logprobs=(canary.logprobs[0][len(prompt) - 1 :],))
    allowed = canary.tolerance(config.engine.dtype)
    found = compare(canary, [np.array(logprobs, np.float32)], allowed.max)
    assert allowed.admits(found), (found, allowed)
    return found.mean


CHECKS: dict[str, Callable[[Scale, Path, FSDP2], Found]] = {"placement": placement, "ipc": ipc, "together": together}
