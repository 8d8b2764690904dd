"""What does the learner cost compared with transformers alone, padded or packed, on the same batches and as a whole
system?

    python -m benchmarks.learner [--rounds 3] [--quick 25] [--steps 60] [--pairs 3] [--against padded ...]

`batches`: CPU seconds, on one thread, of an optimizer step on a batch of 32 log-normal completions (median 128, at most
512 tokens) of a 20 M-parameter Qwen3 in float32, 4,096 tokens per micro-batch, for prompts of 64 and 1,024 tokens in
groups of 8 and 16. Ours is the whole `train_step` (plan, pack, advantages, loss with diagnostics, AdamW) under FSDP2,
as in a run. `padded_over_ours`: transformers on rows of similar length, over ours; `by_arithmetic`: that ratio if time
were proportional to operations (layers, head, attention), a limit for anybody who computes the same.
`packed_over_ours`: transformers on sequences laid end to end, each with its prompt. `packed_over_unshared`: the same,
where ours gets siblings whose prompts differ. `compiled_over_ours`: CPU seconds of ours with `model.compile=true`,
compiled before the measurement.

`quick`: the same ratios for the quickstart's steps: its model of 149 k parameters, 32 groups of 8, prompts of 7 tokens
and completions of 4 to 10, 1,024 tokens per micro-batch; also `fsdp2_over_ours`, transformers on rows under FSDP2,
whose hooks are part of a loop that is written for several ranks.

`system`: optimizer steps per second of the quickstart (without evaluations) over those of a loop of generate, score and
train in one process with two threads, with the same model, task, batch and lengths. They run one after the other, in
pairs. On a machine with other work the two threads of the loop wait for each other, and the figure says little.

Figures are medians. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from asyncrl.balance import shard_step
from asyncrl.config import load_config
from asyncrl.learner.backends.factory import joined_ranks
from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.model.flops import operations
from asyncrl.learner.optimizer.update import NonFiniteGuard
from asyncrl.learner.parallel.place import Place
from asyncrl.learner.roles import Roles, build_roles
from asyncrl.learner.step.step import train_step
from asyncrl.quickstart.base_model import build_model
from asyncrl.quickstart.byte_tokenizer import VOCAB_SIZE
from asyncrl.quickstart.prepare import prepare
from asyncrl.quickstart.recipes import WarmupRecipe
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config
from asyncrl.types import NO_VERSION, GroupHeader, StepPlan, Trajectory, TrajectoryHeader
from benchmarks.parts.answer import ROOT, answer, parse
from benchmarks.parts.bare_training import Part, bare_step, end_to_end, padded
from benchmarks.parts.quickstart import run_quickstart

SEQUENCES, BUDGET, VOCABULARY = 32, 4096, 4096
QUICK_GROUPS, QUICK_SIZE, QUICK_PROMPT, QUICK_BUDGET = 32, 8, 7, 1024
SHAPES = [(prompt, size) for prompt in (64, 1024) for size in (8, 16)]
AGAINST = ("padded", "packed", "unshared", "compiled")
RATIOS = (("padded", "ours"), ("packed", "ours"), ("packed", "unshared"), ("compiled", "ours"))
WARM = 8
"""First steps of a whole run, left out of its speed."""


def model_of_20m(small: bool) -> PreTrainedModel:
    """Return a model of 20.0 M parameters: hidden 448, 8 layers, 7 heads of 64 on one key-value head."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64 if small else 448, intermediate_size=128 if small else 1216,
        num_hidden_layers=2 if small else 8, num_attention_heads=1 if small else 7, num_key_value_heads=1, head_dim=64,
        max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@dataclass(frozen=True)
class Batch:
    lease: Lease
    prompt: int

    @property
    def members(self) -> list[tuple[Trajectory, float]]:
        """Each trajectory with its advantage."""
        rewards = {
            place: self.lease.plan.groups[place[0]].trajectories[place[1]].reward for place in self.lease.trajectories
        }
        means = [statistics.mean(each.reward for each in group.trajectories) for group in self.lease.plan.groups]
        return [(each, rewards[place] - means[place[0]]) for place, each in self.lease.trajectories.items()]


def log_normal(rng: np.random.Generator) -> int:
    return int(np.clip(rng.lognormal(np.log(128), 0.8), 8, 512))


def batch(
    prompt: int,
    size: int,
    sequences: int,
    *,
    shared: bool,
    vocabulary: int = VOCABULARY,
    drawn: Callable[[np.random.Generator], int] = log_normal,
) -> Batch:
    rng = np.random.default_rng(0)
    groups, trajectories = [], {}
    for g in range(sequences // size):
        asked = rng.integers(0, vocabulary, prompt)
        headers = []
        for t in range(size):
            length = drawn(rng)
            mine = asked if shared else np.append(t, asked[1:])
            mask = np.arange(prompt + length) >= prompt
            made = Trajectory(
                token_ids=np.concatenate([mine, rng.integers(0, vocabulary, length)]).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -8.3, 0.0).astype(np.float32),
                policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                reward=float(rng.integers(0, 2)),
            )
            trajectories[g, t] = made
            headers.append(
                TrajectoryHeader(
                    length=prompt + length, prompt_length=prompt, reward=made.reward, version_tokens=((0, length),)
                )
            )
        groups.append(GroupHeader(group_id=g, prompt_index=g, attempt=0, worker="w", trajectories=tuple(headers)))
    plan = StepPlan(step=0, policy_version=0, groups=tuple(groups), staleness={0: 0}, max_staleness=8, shards=())
    return Batch(Lease(plan=replace(plan, shards=shard_step(plan, 1)), trajectories=trajectories), prompt)


@dataclass(frozen=True)
class Ours:
    config: Config
    roles: Roles
    guard: NonFiniteGuard

    def step(self, given: Batch) -> None:
        train_step(self.config, self.roles, self.guard, given.lease, rank=0)


def begin_ours(
    folder: Path, opened: ExitStack, budget: int = BUDGET, compiled: Sequence[bool] = (False, True)
) -> list[Ours]:
    """Build one learner for each value of `model.compile`."""
    configs = [
        load_config(
            [
                *(f"model.path={folder}", "data.path=none", "reward=exact_match", "learner.lr=1e-6"),
                *(f"learner.max_tokens_per_microbatch={budget}", "learner.max_attention_per_microbatch=65536"),
                f"model.compile={str(setting).lower()}",
            ]
        )
        for setting in compiled
    ]
    place = Place(rank=0, world=1, device=torch.device("cpu"), restarted=False, run_id="benchmark")
    mesh = opened.enter_context(joined_ranks(configs[0], place))
    guard = NonFiniteGuard(folder / "nonfinite", 0, 3)
    return [Ours(each, build_roles(each, place.device, mesh), guard) for each in configs]


def arithmetic_of_rows(ours: Ours, given: Batch) -> float:
    """Return the operations of a forward of the batch padded to rows. Attention counts only pairs within a row."""
    total = 0
    for part in padded(given.members, given.prompt, BUDGET):
        rows, longest = part.inputs["input_ids"].shape
        pairs = rows * longest * (longest + 1) // 2
        total += ours.roles.policy.work.forward(tokens=rows * longest, scored=part.targets.numel(), pairs=pairs)
    return float(total)


def arithmetic_of_packs(ours: Ours, given: Batch) -> float:
    """Return the operations of a forward of the batch as the learner packs it."""
    budget = Budget.of(ours.config.learner)
    (minibatch,) = plan_minibatches(given.lease.plan, rank=0, updates=1, budget=budget)
    packs = [pack(given.lease, members, torch.device("cpu")) for members in minibatch.micro_batches]
    return operations(ours.roles.policy.work, packs, 1)


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def medians(rounds: int, contenders: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median CPU seconds of each contender. The contenders take turns."""
    times = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            times[name].append(cpu_seconds(work))
    return {name: statistics.median(each) for name, each in times.items()}


def compare_batches(rounds: int, against: Sequence[str], small: bool, folder: Path) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    bare = model_of_20m(small)
    bare.save_pretrained(folder)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    found = {}
    with ExitStack() as opened:
        ours, compiled = begin_ours(folder, opened)
        for length, size in SHAPES:
            prompt, count = (length // 16, 16) if small else (length, SEQUENCES)
            given = batch(prompt, size, count, shared=True)
            unshared = batch(prompt, size, count, shared=False)
            contenders = {
                "padded": lambda g=given, p=prompt: bare_step(bare, optimizer, list(padded(g.members, p, BUDGET))),
                "packed": lambda g=given: bare_step(bare, optimizer, list(end_to_end(g.members, BUDGET))),
                "ours": lambda g=given: ours.step(g),
                "compiled": lambda g=given: compiled.step(g),
                "unshared": lambda g=unshared: ours.step(g),
            }
            took = medians(rounds, {name: work for name, work in contenders.items() if name in (*against, "ours")})
            ratios = {f"{a}_over_{b}": round(took[a] / took[b], 2) for a, b in RATIOS if a in took and b in took}
            arithmetic = round(arithmetic_of_rows(ours, given) / arithmetic_of_packs(ours, given), 2)
            row = ratios | {"by_arithmetic": arithmetic, "ours_cpu_s": round(took["ours"], 3)}
            found[f"prompt={prompt} size={size}"] = row
    return found


def compare_quick(rounds: int, small: bool, folder: Path) -> dict[str, float]:
    """Compare the contenders on the quickstart's steps.

    Args:
        small: leave out the compiled learner, since compiling takes longer than all the rest.
    """
    torch.set_num_threads(1)
    bare, given = build_model(WarmupRecipe()).eval(), quick_batch()
    bare.save_pretrained(folder)
    with ExitStack() as opened:
        ours, *compiled = begin_ours(folder, opened, QUICK_BUDGET, (False,) if small else (False, True))
        sharded = copy.deepcopy(bare)
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)

        def step(model: PreTrainedModel, layout: Callable[[], Iterable[Part]]) -> Callable[[], object]:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
            return lambda: bare_step(model, optimizer, list(layout()))

        rows = partial(padded, given.members, given.prompt, QUICK_BUDGET)
        contenders = {
            "padded": step(bare, rows),
            "fsdp2": step(sharded, rows),
            "packed": step(bare, partial(end_to_end, given.members, QUICK_BUDGET)),
            "ours": lambda: ours.step(given),
        }
        if compiled:
            contenders["compiled"] = partial(compiled[0].step, given)
        took = medians(rounds, contenders)
    ratios = {f"{name}_over_ours": round(took[name] / took["ours"], 2) for name in contenders if name != "ours"}
    return ratios | {"ours_cpu_s": round(took["ours"], 4)}


def quick_batch() -> Batch:
    return batch(
        QUICK_PROMPT,
        QUICK_SIZE,
        QUICK_GROUPS * QUICK_SIZE,
        shared=True,
        vocabulary=VOCAB_SIZE,
        drawn=lambda rng: int(rng.integers(4, 11)),
    )


def compare_systems(pairs: int, steps: int, folder: Path) -> dict[str, float]:
    ready = prepare(WarmupRecipe())
    bare, busy, ours, trained = [], [], [], []
    for pair in range(pairs):
        command = [sys.executable, "-m", "benchmarks.parts.bare_loop", ready, str(steps), str(pair)]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        said = json.loads(done.stdout)
        bare.append(statistics.median(said["seconds"][WARM:]))
        busy.append(statistics.median(said["cpu_seconds"][WARM:]))
        settings = ["rollout.host=process", "eval.every=0", f"learner.steps={steps}", f"seed={pair}"]
        rows = run_quickstart(folder / f"run{pair}", settings).rows
        ends = [row["time"] for row in rows[WARM - 1 :]]
        ours.append(statistics.median(np.diff(ends).tolist()))
        trained.append(statistics.median(row["time/train"] for row in rows[WARM:]))
    return {
        "steps_per_s_over_bare": round(statistics.median(b / o for b, o in zip(bare, ours, strict=True)), 2),
        "bare_step_ms": round(1000 * statistics.median(bare), 1),
        "bare_step_cpu_ms": round(1000 * statistics.median(busy), 1),
        "our_step_ms": round(1000 * statistics.median(ours), 1),
        "of_it_train_ms": round(1000 * statistics.median(trained), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each contender on each batch")
    parser.add_argument("--pairs", type=int, default=3, help="of whole runs; 0 leaves them out")
    parser.add_argument("--steps", type=int, default=60, help="of a whole run")
    parser.add_argument("--quick", type=int, default=25, help="rounds of the quickstart's steps; 0 leaves them out")
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=AGAINST, help="the contenders on the batches")
    given = parse(parser, {"rounds": 1, "quick": 1, "pairs": 1, "steps": WARM + 4})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        result: dict[str, object] = {}
        if given.rounds:
            result["batches"] = compare_batches(given.rounds, given.against, given.smoke, folder / "model")
        if given.quick:
            result["quick"] = compare_quick(given.quick, given.smoke, folder / "quick")
        if given.pairs:
            result["system"] = compare_systems(given.pairs, given.steps, folder)
    answer("learner", result, smoke=given.smoke)


if __name__ == "__main__":
    main()
