"""Kill ranks during saves, and flip bits of checkpoints: `python -m tests.chaos.saves --kills 20 --flips 100 --seed 0`.

Two ranks over gloo train, save in the background at each step, and are killed (SIGKILL, both at once) at a random
moment. The next pair resumes from the newest checkpoint. After each kill a single rank loads that checkpoint: it must
exist and be complete, no older than the last step that a rank had reported as durable, and its weights and moments must
be bit for bit those of the same number of steps without a kill. Then one bit of a random byte of a random file of the
newest checkpoint is flipped: each time this must be detected, and the checkpoint before it be used.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.learner.parallel.collectives import choice_of_rank_zero
from asyncrl.learner.roles import Roles
from asyncrl.schema import LearnerConfig
from tests.forked import forked_from
from tests.learner.feed import tiny_model
from tests.waiting import until

RANKS = 2
CPU = torch.device("cpu")
LIFE_S = 120.0
"""Limit in seconds on the waits for the ranks, for example until their first save has begun."""


def roles_of(*, sharded: bool) -> Roles:
    """Return a policy of 300 k parameters and its optimizer."""
    hf = tiny_model(hidden_size=128, intermediate_size=512)
    if sharded:
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in hf.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(hf, mesh=mesh)
    return Roles(policy=PolicyModel(hf), optimizer=make_optimizer(hf.parameters(), LearnerConfig(lr=0.01)))


def step(roles: Roles) -> None:
    """Update each number independently of all others, so that the result does not depend on the sharding."""
    for parameter in roles.policy.parameters():
        parameter.grad = parameter.detach() * 0.5
    roles.optimizer.step()
    roles.optimizer.zero_grad()


def image_of(roles: Roles) -> list[bytes]:
    """Return the bytes of all parameters and optimizer moments, for unsharded roles."""
    moments = [value for state in roles.optimizer.state.values() for value in state.values()]
    return [tensor.detach().numpy().tobytes() for tensor in (*roles.policy.parameters(), *moments)]


def live(rank: int, folder: Path, store: Path) -> None:
    torch.set_num_threads(1)
    where = f"file://{store}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIFE_S))
    roles = roles_of(sharded=True)
    saves = Checkpoints(folder / "ckpt", rank=rank, keep=2, background=True)
    found = choice_of_rank_zero(saves.choose("auto", restarted=False) if rank == 0 else None, CPU)
    first = saves.load(found, roles)[0].step + 1 if found else 0
    for number in range(first, 1_000_000):
        step(roles)
        saves.begin(LearnerState(step=number, policy_version=number + 1, skipped_steps=0), roles, {"step": number})
        for done in saves.saved():
            (folder / f"durable_{rank}").write_text(str(done))
        (folder / f"began_{rank}").touch()


class Reference:
    """The training without kills."""

    def __init__(self) -> None:
        self._roles, self._images = roles_of(sharded=False), list[list[bytes]]()

    def after(self, steps: int) -> list[bytes]:
        while len(self._images) < steps:
            step(self._roles)
            self._images.append(image_of(self._roles))
        return self._images[steps - 1]


def one_life(folder: Path, rng: random.Random, longest_s: float) -> float:
    """Start the ranks, and kill them at a random moment after their first save began.

    Args:
        longest_s: latest such moment, in seconds; 0 kills after three saves.

    Returns:
        Seconds per save, meaningful if three saves were waited for.
    """
    for old in folder.glob("began_*"):
        old.unlink()
    store = folder / f"store_{time.monotonic_ns()}"
    context = forked_from("tests.chaos.saves")
    ranks = [context.Process(target=live, args=(rank, folder, store), daemon=True) for rank in range(RANKS)]
    for each in ranks:
        each.start()

    def wait_for(what: str, happened: Callable[[], bool]) -> None:
        until(
            happened,
            f"the ranks have not {what}, or one ended by itself",
            within_s=LIFE_S,
            holds=lambda: all(each.is_alive() for each in ranks),
        )

    wait_for("begun a save", lambda: len(list(folder.glob("began_*"))) == RANKS)
    began = time.monotonic()
    if longest_s:
        time.sleep(rng.uniform(0, longest_s))
    else:
        wait_for("saved three times", lambda: durable_in(folder) >= 2)
    took = (time.monotonic() - began) / 3
    for each in ranks:
        assert each.pid is not None and each.is_alive(), "a rank ended by itself"
        os.kill(each.pid, signal.SIGKILL)
    for each in ranks:
        each.join(LIFE_S)
    return took


def durable_in(folder: Path) -> int:
    """Return the last step that a rank has reported as durable; -1 if none."""
    return max((int(file.read_text() or -1) for file in folder.glob("durable_*")), default=-1)


def judge(folder: Path, reference: Reference) -> str:
    """Return what is wrong with the newest checkpoint; empty if nothing is."""
    saves = Checkpoints(folder / "ckpt", rank=0, keep=2)
    path = saves.choose("auto", restarted=False)
    durable = durable_in(folder)
    if path is None:
        return f"no checkpoint, and step {durable} was durable" if durable >= 0 else ""
    if list((folder / "ckpt").glob("damaged_*")):
        return "a checkpoint was damaged by a kill"
    roles = roles_of(sharded=False)
    state, snapshot = saves.load(path, roles)
    if state.step < durable or snapshot != {"step": state.step}:
        return f"{path.name} is of step {state.step} with {snapshot}, and step {durable} was durable"
    same = image_of(roles) == reference.after(state.step + 1)
    return "" if same else f"{path.name} differs from {state.step + 1} steps without a death"


def kills(folder: Path, count: int, rng: random.Random) -> tuple[int, list[str]]:
    """Kill `count` times. Return the step of the newest checkpoint at the end, and what was wrong."""
    reference, wrong = Reference(), list[str]()
    save_s = one_life(folder, rng, 0.0)
    for number in range(count):
        one_life(folder, rng, 3 * save_s)
        if said := judge(folder, reference):
            wrong.append(f"kill {number}: {said}")
    newest = Checkpoints(folder / "ckpt", rank=0, keep=2).newest()
    return int(newest.name.removeprefix("step_")) if newest else 0, wrong


def flips(folder: Path, count: int, rng: random.Random) -> list[str]:
    """Flip `count` bits. Return those that were not detected or left no usable checkpoint."""
    unseen: list[str] = []
    kept = folder / "kept"
    shutil.copytree(folder / "ckpt", kept, symlinks=True)
    for _ in range(count):
        shutil.rmtree(folder / "ckpt")
        shutil.copytree(kept, folder / "ckpt", symlinks=True)
        saves = Checkpoints(folder / "ckpt", rank=0, keep=2)
        newest = folder / "ckpt" / (folder / "ckpt" / "latest").readlink()
        file = rng.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
        content, place, bit = bytearray(file.read_bytes()), rng.randrange(file.stat().st_size), rng.randrange(8)
        content[place] ^= 1 << bit
        file.write_bytes(content)
        taken = saves.newest()
        if taken is None or taken == newest:
            unseen.append(f"bit {bit} of byte {place} of {file.name}")
    return unseen


def run(count: int, flipped: int, seed: int, folder: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    steps, wrong = kills(folder, count, rng)
    unseen = flips(folder, flipped, rng)
    return {"kills": count, "trained_steps": steps, "wrong": wrong, "flips": flipped, "unseen": unseen}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.ERROR)  # each detected flip logs an error; the findings are in the JSON line
    with tempfile.TemporaryDirectory() as folder:
        found = run(given.kills, given.flips, given.seed, Path(folder))
    print(json.dumps(found))
    return 1 if found["wrong"] or found["unseen"] else 0


if __name__ == "__main__":
    # Run the imported module, not this `__main__` copy, which every forked rank would import again.
    sys.exit(importlib.import_module("tests.chaos.saves").main())
