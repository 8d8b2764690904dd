"""What the checks run on: a device, a random model and batches of a given shape; large on a GPU, tiny on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncrl.balance import shard_step
from asyncrl.learner.parallel.place import Place
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config, DataConfig, LearnerConfig, ModelConfig, RolloutConfig, RunConfig
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION, StepPlan, Trajectory, TrajectoryGroup
from tests.learner.feed import header_of, make_lease

QWEN3 = {
    "tiny": (64, 128, 2, 2, 1, 32, 264),
    "small": (256, 768, 4, 4, 2, 64, 4096),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151936),
}
"""Name -> hidden size, intermediate size, layers, heads, key-value heads, head dimension, vocabulary; the published
ones from 0.6b on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    device: torch.device
    model: str
    """Model of the checks of speed and memory."""
    judged: str
    """Model of the parity check, which plain transformers also computes on the CPU."""
    prompt: int
    completion: int
    groups: int
    size: int
    tokens: int
    """Token budget of a micro-batch."""
    steps: int
    """Number of timed steps."""
    hashed: int
    """Number of bytes whose fingerprint is taken."""

    @property
    def place(self) -> Place:
        return Place(rank=0, world=1, device=self.device, restarted=False, run_id="gpu")

    def config(self, folder: Path, model: str, **settings: Any) -> Config:
        """Return the config of a learner of the model `model`, which is made in `folder`.

        Args:
            settings: settings of `model` (dtype, activation_checkpointing) and of `learner` (all others).
        """
        path = folder / model
        if not path.is_dir():
            make_model(model, self.device).save_pretrained(path)
        of_model = {name: settings.pop(name) for name in ("dtype", "activation_checkpointing") if name in settings}
        learner = {"lr": 1e-4, "max_tokens_per_microbatch": self.tokens, "groups_per_step": self.groups} | settings
        return Config(
            run=RunConfig(dir=str(folder / "run")),
            model=ModelConfig(path=str(path), **of_model),
            learner=LearnerConfig(**learner),
            data=DataConfig(path="none", max_prompt_tokens=self.prompt),
            rollout=RolloutConfig(group_size=self.size, max_new_tokens=self.completion),
            replay=ReplayConfig(wait_timeout_s=60.0),
        )

    def lease(self, *, groups: int = 0, longest: int = 0) -> Lease:
        """Return a step of random tokens: groups of `size` completions, each a quarter of the longest to the longest.

        Args:
            groups: number of groups; 0 is the scale's.
            longest: limit on the tokens of a prompt and of a completion; 0 is the scale's.
        """
        rng, made = np.random.default_rng(0), []
        prompt, completion = (min(longest, each) if longest else each for each in (self.prompt, self.completion))
        vocabulary = min(QWEN3[self.model][-1], QWEN3[self.judged][-1])
        for g in range(groups or self.groups):
            asked = rng.integers(0, vocabulary, prompt)
            members = tuple(trajectory(rng, asked, completion, vocabulary) for _ in range(self.size))
            made.append(TrajectoryGroup(group_id=g, prompt_index=g, attempt=0, worker="w", trajectories=members))
        headers = tuple(header_of(group) for group in made)
        plan = StepPlan(step=0, policy_version=0, groups=headers, staleness={0: 0}, max_staleness=8, shards=())
        return make_lease(replace(plan, shards=shard_step(plan, 1)), made)


def trajectory(rng: np.random.Generator, prompt: np.ndarray, completion: int, vocabulary: int) -> Trajectory:
    length = int(rng.integers(max(1, completion // 4), completion + 1))
    mask = np.arange(len(prompt) + length) >= len(prompt)
    return Trajectory(
        token_ids=np.concatenate([prompt, rng.integers(0, vocabulary, length)]).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        reward=float(rng.integers(0, 2)),
    )


def make_model(shape: str, device: torch.device) -> Any:
    """Return a model with random weights, which are drawn on the device because that is faster."""
    hidden, inner, layers, heads, keys, width, vocabulary = QWEN3[shape]
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, head_dim=width, tie_word_embeddings=True,
        max_position_embeddings=40960,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


TINY = Scale(
    device=torch.device("cpu"), model="tiny", judged="tiny", prompt=24, completion=32, groups=2, size=4, tokens=160,
    steps=1, hashed=1 << 20,
)  # fmt: skip
LARGE = Scale(
    device=torch.device("cuda", 0), model="0.6b", judged="small", prompt=1024, completion=3072, groups=4, size=8,
    tokens=16384, steps=3, hashed=1 << 30,
)  # fmt: skip
