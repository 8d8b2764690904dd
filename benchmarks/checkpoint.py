"""How long do steps stand still for a checkpoint, written in the background and written synchronously?

    python -m benchmarks.checkpoint [--parameters 60000000] [--ranks 2] [--rounds 5] [--tokens 512]

FSDP2 ranks over gloo train a Qwen2 of `--parameters` parameters (fp32, AdamW), and save it with everything a checkpoint
of a run has: tensors of all ranks, hashes, syncs, commit. A round measures, one after another: a step alone; a save
that the steps wait for (`sync_s`); and a background save, during as many steps as it takes. `stall` is how long the
loop stands still for the background save: the call that begins it and the optimizer's wait for the copy. `beside` is
its whole cost: the time of the steps during the save minus that of as many steps alone, over `sync_s` (with few cores
the writing takes them from the steps). Ratios are medians over rounds of what was measured in one round. Prints one
JSON line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.learner.roles import Roles
from asyncrl.schema import LearnerConfig
from benchmarks.parts.answer import answer, parse

SMOKE = {"parameters": 200_000, "rounds": 1, "tokens": 16}
SNAPSHOT = {"groups": b"\0" * (1 << 20)}
"""Snapshot of the replay in each checkpoint: one megabyte."""


def model_of(parameters: int) -> PreTrainedModel:
    """Return a model with 8 layers, a small vocabulary and about `parameters` parameters."""
    width = max(64, round((parameters / (8 * 12)) ** 0.5 / 64) * 64)
    settings = Qwen2Config(
        vocab_size=1024, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=8,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)


class Learner:
    """One rank of the learner."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
        hf = model_of(given.parameters)
        for layer in hf.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(hf, mesh=mesh)
        self.policy = PolicyModel(hf)
        self.roles = Roles(policy=self.policy, optimizer=make_optimizer(hf.parameters(), LearnerConfig()))
        self.saves = {
            background: Checkpoints(folder / str(background), rank=rank, keep=1, background=background)
            for background in (False, True)
        }
        self.ids = torch.randint(1024, (1, given.tokens), generator=torch.Generator().manual_seed(rank))
        self.steps, self.saved = 0, list[int]()

    def step(self) -> float:
        """Train one step. Returns its seconds."""
        started = time.perf_counter()
        self.policy.hf(input_ids=self.ids, labels=self.ids).loss.backward()
        self.roles.optimizer.step()
        self.roles.optimizer.zero_grad()
        return time.perf_counter() - started

    def begin(self, *, background: bool) -> float:
        """Begin a save. Returns the seconds until steps may follow."""
        dist.barrier()
        self.steps += 1
        state = LearnerState(step=self.steps, policy_version=self.steps, skipped_steps=0)
        started = time.perf_counter()
        self.saves[background].begin(state, self.roles, SNAPSHOT)
        return time.perf_counter() - started

    def going_on(self) -> bool:
        """Return whether the save in the background still goes on on any rank. The ranks step together."""
        self.saved += self.saves[True].saved()
        flag = torch.tensor(float(self.saved[-1:] != [self.steps]))
        dist.all_reduce(flag)
        return bool(flag)

    def round(self) -> dict[str, float]:
        alone = statistics.median(self.step() for _ in range(3))
        sync = self.begin(background=False)
        stall, beside = self.begin(background=True), []
        while not beside or self.going_on():
            beside.append(self.step())
        timings = self.saves[True].timings()
        stall += timings.get("checkpoint/copy_wait_s", 0.0)
        return {
            "step_s": alone,
            "sync_s": sync,
            "stall_s": stall,
            "save_beside_s": timings["checkpoint/save_s"],
            "steps_beside": len(beside),
            "stall_per_sync": stall / sync,
            "beside_per_sync": (sum(beside) + stall - alone * len(beside)) / sync,
        }


def rank_main(rank: int, given: argparse.Namespace, folder: str, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=given.ranks)
    learner = Learner(given, Path(folder))
    learner.round()  # warm-up: allocates the memory for the copies
    for _ in range(given.rounds):
        measured = learner.round()
        if rank == 0:
            told.put(measured)
    told.put({"parameters": sum(each.numel() for each in learner.policy.parameters())})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=60_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--folder", default="", help="on the disk to measure; empty is the one of temporary files")
    given = parse(parser, SMOKE)
    told = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(dir=given.folder or None) as folder:
        spawn(rank_main, args=(given, folder, told), nprocs=given.ranks)
    rows = [told.get() for _ in range(given.rounds + given.ranks)]
    rounds = [row for row in rows if "sync_s" in row]
    medians = {name: round(statistics.median(row[name] for row in rounds), 4) for name in rounds[0]}
    count = next(row["parameters"] for row in rows if "parameters" in row)
    answer("checkpoint", {"parameters": count, "ranks": given.ranks, **medians}, smoke=given.smoke)


if __name__ == "__main__":
    main()
