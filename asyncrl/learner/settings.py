"""Settings of the learner, its critic and its reference model.

Importing this module loads no torch, so that a config can be checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    path: str = ""
    """Causal LM or token classifier to start from; empty is `model.path`. A new value head starts at 0."""
    lr: float = 1e-5
    """Peak rate; warm-up and schedule are the learner's."""
    warmup_steps: int = 0
    """First steps in which only the critic is trained."""
    value_clip: float = 0.0
    """How far the updates of a batch may move a value before its loss has no further gradient; 0 is no limit."""


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    path: str = ""
    """The policy that the KL is measured against (`loss.kl_coef`, `advantage.kl_coef`); empty is `model.path`. With
    `rollout`, its log-probs come with the trajectories, attached by the environment, and no model is loaded."""

    @property
    def from_rollout(self) -> bool:
        return self.path == "rollout"


@dataclass(kw_only=True, slots=True)
class CheckpointSettings:
    """Settings of checkpoints, of whatever is trained."""

    async_save: bool = True
    """Checkpoints are written in the background, from a copy of weights and moments in host memory (with AdamW 12 bytes
    per parameter, divided over the ranks). If false, every save blocks training."""
    save_timeout_s: float = 3600.0
    """Limit in seconds on writing a checkpoint, in addition to `run.disk_patience_s` on a full disk. Beyond it the run
    ends and can be resumed. The next checkpoint, and the end of the run, wait for the running save."""
    keep_checkpoints: int = 2
    """Number of checkpoints to keep. Older ones are deleted, except the best one and those of `keep_every`."""
    keep_every: int = 0
    """Checkpoints at multiples of this many steps are kept for good; 0 is none."""
    export_every: int = 0
    """Steps between exported models, `exports/step_50/hf`, which other libraries can load; a process beside training
    makes them from checkpoints. 0 is none. The last model is always exported, as `hf/`. See also `asyncrl export`."""
    copy_to: str = ""
    """URL of any file system that fsspec knows (`s3://bucket/run`, `gs://...`, `file:///backup`). Each checkpoint is
    also copied there, by a process beside training. Nothing there is deleted, and no checkpoint of another run is
    replaced: give each run a folder of its own. Write access is tried before the first step. A copy that fails three
    times, or takes longer than `save_timeout_s`, is logged and counted (`checkpoint/copies_failed`), and training
    continues."""
    keep_best: str = ""
    """A metric, `eval/heldout/accuracy` or one of the steps: the checkpoint at which it was best is kept, as
    `ckpt/best`. For an evaluation that is the checkpoint whose weights the evaluation was requested for."""
    keep_best_by: str = "max"
    """`max` or `min`: which value of `keep_best` is better."""


@dataclass(kw_only=True, slots=True)
class LearnerConfig(CheckpointSettings):
    ranks: int = 1
    """FSDP2 ranks that `asyncrl local` starts. Under your own torchrun its world size is used instead."""
    replicas: int = 1
    """Copies of the model, each sharded over an equal share of the ranks (HSDP). Weights are then gathered only within
    a copy, whose ranks are neighbours, and gradient shards are summed over the copies. Must divide the number of ranks;
    see docs/parallel.md."""
    sequence_parallel: int = 1
    """Neighbouring ranks that share every micro-batch, each with part of its tokens and, in attention, with part of its
    heads (Ulysses). Multiplied by `replicas` and `tensor_parallel` it must divide the number of ranks; see
    docs/parallel.md."""
    expert_parallel: int = 1
    """Neighbouring ranks that hold different experts of each layer of a mixture and send each other the tokens routed
    to them, each rank with sequences of its own. Must divide the ranks of a copy of the model. For Qwen3-MoE,
    Qwen2-MoE, Mixtral, GLM-4-MoE and DeepSeek-V3; see docs/parallel.md."""
    tensor_parallel: int = 1
    """Neighbouring ranks that compute every layer together, each with part of its heads and of its inner width, on the
    same sequences. Multiplied by `replicas` it must divide the number of ranks. For Llama, Mistral, Qwen2 and Qwen3;
    see docs/parallel.md."""
    router_replay: bool = False
    """For a mixture of experts: the built-in engine records the experts of every token, and the policy routes the token
    to the same experts in training (Rollout Routing Replay, R3, arXiv 2510.11370). Takes layers * experts per token
    bytes more per token in the replay. For Qwen3-MoE, Qwen2-MoE, Mixtral, GLM-4-MoE and DeepSeek-V3; see
    docs/losses.md."""
    device: str = "auto"
    """`auto` is a GPU if there is one."""
    groups_per_step: int = 32
    """Groups in a batch, over all ranks."""
    updates_per_batch: int = 1
    """Optimizer steps per leased batch, each on its own share of the groups."""
    epochs_per_batch: int = 1
    """Passes over a batch, each of `updates_per_batch` optimizer steps on the same shares (PPO's epochs). Advantages,
    values and proximal log-probs stay those from before the first pass."""
    proximal_ema: float = 0.0
    """Above 0: the proximal policy is a moving average of the weights with this decay per optimizer step."""
    early_groups: int = 0
    """Above 0: forward and backward of each part of this many groups run as soon as these have arrived, while the
    learner waits for the rest of its batch. The gradients are those of the whole batch up to rounding, and bitwise the
    same whenever the groups arrive. The groups of a part share no micro-batch with others: a smaller number starts
    sooner but makes smaller micro-batches. Switched off, with a line in the log at the start, if a batch must be
    complete first. See docs/staleness.md."""
    max_tokens_per_microbatch: int = 16384
    """Token budget of one forward and backward on a rank. A trajectory that is longer gets a micro-batch of its own."""
    max_attention_per_microbatch: int = 0
    """The same budget in tokens as attention holds them, where a shared prompt counts once per completion: 64
    completions of an 8 k prompt are half a million. 0 is 4 times `max_tokens_per_microbatch`. A larger group is
    split."""
    reduce_gradients: str = "auto"
    """When gradients are reduced over the ranks: with the `last` micro-batch of an optimizer step, until which every
    rank holds the whole gradient in fp32, or with `each`, which sends more. `auto` is `each` if weights, moments and
    that gradient would take more than half of a rank's memory."""
    offload: str = "none"
    """What is kept in host memory instead of GPU memory. `optimizer`: AdamW's moments, copied to the GPU and back for
    the step of their parameter. `all`: also weights and gradients, of every model of the learner (FSDP2's CPU offload):
    a layer is copied to the GPU for its computation, and AdamW steps on the CPU. See docs/parallel.md."""
    steps: int = 100
    """Train steps of the run. A resumed run continues to the same number."""
    epochs: float = 0.0
    """Above 0, for `asyncrl local`: passes over the rows; replaces `steps`. The rows are counted, and `steps` is set to
    the number that trains as many groups; a dropped group does not count."""
    optimizer: str = "adamw"
    """`adamw_8bit` keeps AdamW's moments of matrices in 8 bits: 2.25 bytes per parameter instead of 8. See
    docs/parallel.md."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: str = "constant"
    """After the warm-up: `constant`, or `linear` or `cosine` decay to `min_lr_ratio` at `steps`."""
    min_lr_ratio: float = 0.0
    """Fraction of the peak rate, the critic's too, at which `linear` and `cosine` end."""
    warmup_steps: int = 0
    """First steps in which the rate rises linearly."""
    weight_decay: float = 0.0
    """Applied to matrices only, not to norms and biases."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    adam_eps: float = 1e-8
    """Added to the square root of AdamW's second moment."""
    clip_norm: float = 1.0
    """Largest L2 norm of the whole gradient; a larger one is scaled down to it."""
    skip_spikes: float = 0.0
    """Above 0: an optimizer step is skipped if its gradient norm, before clipping, exceeds this many times the median
    of the last 64, separately for policy and critic. The batch counts as trained; `optim/spikes_skipped` counts the
    steps. 0 skips none."""
    max_nonfinite_steps: int = 3
    """Consecutive steps skipped for a non-finite loss or gradient before the run stops."""
    save_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    max_restarts: int = 3
    """How often in a row torchrun restarts the ranks after one of them died; a saved checkpoint resets the count."""
    hook: str = ""
    """Your own code, `file.py:name` or `package.module:name`, called before and after every optimizer step of the
    policy with an `asyncrl.learner.hook.Update`, for what no setting covers. See docs/own_learning.md."""
    hook_args: dict[str, Any] = field(default_factory=dict)
    """Its arguments: `learner.hook_args.NAME=VALUE`. A function is called with them, a class constructed with them."""
    profile: str = ""
    """`FIRST:LAST`: during these train steps every rank writes a trace of torch's profiler (for Perfetto and
    chrome://tracing) into `profile/` of the run folder, on a GPU with a memory snapshot. Profiled steps are slower."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per leased batch."""
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def attention_budget(self) -> int:
        return self.max_attention_per_microbatch or 4 * self.max_tokens_per_microbatch
