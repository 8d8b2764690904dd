"""Settings of the learner, its critic and its reference model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    path: str = ""
    """Causal language model or token classifier that the critic starts from; empty is `model.path`. A new value head
    starts at 0."""
    lr: float = 1e-5
    """Peak learning rate of the critic; warm-up and schedule are the learner's."""
    warmup_steps: int = 0
    """At the start, steps in which only the critic learns."""
    value_clip: float = 0.0
    """How far the updates of one batch may move a value; beyond that its loss has no gradient. 0: no limit."""


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    path: str = ""
    """Model that the KL is measured against (`loss.kl_coef`, `advantage.kl_coef`); empty is `model.path`. `rollout`: no
    such model is loaded, its log-probs come with the trajectories, from the environment."""

    @property
    def from_rollout(self) -> bool:
        return self.path == "rollout"


@dataclass(kw_only=True, slots=True)
class LearnerSettings:
    """Settings of the ranks, the optimizer and the checkpoints, of whatever is trained."""

    ranks: int = 1
    """Learner processes, each with a GPU where there are any; the model is sharded over them (FSDP2). Under your own
    torchrun, its world size counts."""
    replicas: int = 1
    """Copies of the model among the ranks, each sharded over an equal share of them (HSDP); must divide the number of
    ranks. Useful on several machines: weights are then gathered only within a copy (docs/parallel.md)."""
    sequence_parallel: int = 1
    """Neighbouring ranks that share each micro-batch: each has part of its tokens and, in attention, of its heads
    (Ulysses). For sequences whose activations do not fit one GPU; must divide the ranks, together with `replicas` and
    `tensor_parallel` (docs/parallel.md)."""
    expert_parallel: int = 1
    """Neighbouring ranks that hold different experts of a mixture and exchange the tokens that chose them; must divide
    the ranks of a copy of the model. For Qwen3-MoE, Qwen2-MoE, Mixtral, GLM-4-MoE and DeepSeek-V3
    (docs/parallel.md)."""
    tensor_parallel: int = 1
    """Neighbouring ranks that compute every layer together on the same sequences, each with part of its heads and
    width; must divide the ranks, together with `replicas`. For 17 dense families (docs/parallel.md), where a layer does
    not fit one GPU."""
    device: str = "auto"
    """Where the learner trains; `auto` takes GPUs if there are any."""
    max_tokens_per_microbatch: int = 16384
    """Tokens of one forward and backward pass on a rank; a longer sequence goes alone. Lower it if a GPU runs out of
    memory."""
    reduce_gradients: str = "auto"
    """When the ranks reduce their gradients: with the `last` micro-batch of an optimizer step (each rank holds the
    whole gradient in fp32 until then), or with `each`, which sends more. `auto` is `each` where weights, moments and
    that gradient would take more than half of a rank's memory."""
    offload: str = "none"
    """What is kept in host memory instead of on the GPU: `none`, the `optimizer`'s moments, or `all`, also weights and
    gradients (FSDP2's CPU offload; AdamW then runs on the CPU). Saves GPU memory, costs time (docs/parallel.md)."""
    optimizer: str = "adamw"
    """`adamw`, or `adamw_8bit`, which keeps the moments of matrices in 8 bits: 2.25 bytes per parameter instead of 8
    (docs/parallel.md)."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: str = "constant"
    """Learning rate after the warm-up: `constant`, or `linear` or `cosine` down to `min_lr_ratio` at
    `learner.steps`."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak; 0: none."""
    weight_decay: float = 0.0
    """AdamW's weight decay, on matrices only (not on norms and biases)."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    clip_norm: float = 1.0
    """Largest L2 norm of the whole gradient; a longer one is scaled down to it."""
    max_nonfinite_steps: int = 3
    """The run stops after this many optimizer steps in a row were skipped for a loss or gradient that is not finite."""
    save_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    async_save: bool = True
    """Write checkpoints while training goes on, from a copy in host memory (with AdamW 12 bytes per parameter, over the
    ranks). False: every checkpoint holds its step up."""
    save_timeout_s: float = 3600.0
    """Longest time in seconds for writing a checkpoint; then the run ends
    and can be resumed. The next checkpoint and the end of the run wait for the one under way."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept, besides the best and those of `keep_every`."""
    keep_every: int = 0
    """Keep the checkpoint of every so many steps for good; 0 keeps none."""
    export_every: int = 0
    """Every so many steps, export the checkpoint as a Hugging Face model, `exports/step_50/hf`, beside training; 0:
    none. The last one is exported to `hf/` in any case."""
    copy_to: str = ""
    """URL of any file system that fsspec knows (`s3://bucket/run`, `file:///backup`), to which each checkpoint is
    copied as well; nothing there is deleted, and each run needs its own. A copy that fails three times, or takes longer
    than `save_timeout_s`, is reported and counted, and training goes on."""
    keep_best: str = ""
    """A metric, such as `eval/heldout/accuracy` or `reward/mean`: the checkpoint at which it was best is kept as
    `ckpt/best`. Empty: none."""
    keep_best_by: str = "max"
    """Whether the largest (`max`) or the smallest (`min`) value of `keep_best` is the best."""
    max_restarts: int = 3
    """How often in a row, with no checkpoint saved in between, the ranks are restarted after one of them died."""


@dataclass(kw_only=True, slots=True)
class LearnerConfig(LearnerSettings):
    router_replay: bool = False
    """Train a mixture of experts with the experts that the built-in engine chose when sampling (Rollout Routing Replay,
    arXiv 2510.11370); takes layers * experts per token bytes more per token in the replay. For Qwen3-MoE, Qwen2-MoE,
    Mixtral, GLM-4-MoE and DeepSeek-V3 (docs/losses.md)."""
    groups_per_step: int = 32
    """Groups in the batch of a step, over all ranks."""
    updates_per_batch: int = 1
    """Optimizer steps per batch, each on an equal share of its groups."""
    epochs_per_batch: int = 1
    """Passes over a batch (PPO's epochs), each of `updates_per_batch` optimizer steps. Advantages, values and proximal
    log-probs stay those from before the first."""
    proximal_ema: float = 0.0
    """Above 0: the proximal policy is a moving average of the weights, with this decay per optimizer step. 0: it is the
    policy before the batch's first update."""
    max_attention_per_microbatch: int = 0
    """The same budget in tokens as attention holds them, where a prompt counts once per completion; a group that
    exceeds it is split. 0 is 4 times `max_tokens_per_microbatch`."""
    steps: int = 100
    """Train steps of the whole run; a resumed run continues to the same number."""
    epochs: float = 0.0
    """Above 0: passes over the rows; `asyncrl local` counts the rows and sets `learner.steps` to as many as train them
    so often (dropped groups do not count). 0: `learner.steps` rules."""
    min_lr_ratio: float = 0.0
    """Share of the peak learning rate (the critic's too) at which `linear` and `cosine` end."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_eps: float = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    skip_spikes: float = 0.0
    """Skip an optimizer step whose gradient norm, before clipping, is more than so many times the median of the last 64
    (policy and critic separately); its batch counts as trained. 0: never."""
    hook: str = ""
    """Your function, `file.py:name` or `package.module:name`, called before and after every optimizer step of the
    policy with an `asyncrl.learner.hook.Update`. See docs/custom_losses.md."""
    hook_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `hook`: `learner.hook_args.NAME=VALUE`. A class is instantiated with them."""
    profile: str = ""
    """`FIRST:LAST`: trace these steps with torch's profiler into `profile/` of the run folder, for Perfetto or
    chrome://tracing (on a GPU also a memory snapshot). Profiled steps are slower."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per leased batch."""
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def attention_budget(self) -> int:
        return self.max_attention_per_microbatch or 4 * self.max_tokens_per_microbatch
