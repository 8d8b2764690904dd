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
    """First steps in which only the critic learns."""
    value_clip: float = 0.0
    """How far the updates of a batch may move a value before its loss stops following; 0 is no bound."""


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    path: str = ""
    """Policy the KL is measured against (`loss.kl_coef`, `advantage.kl_coef`); empty is `model.path`. `rollout`: its
    log-probs come with the trajectories, attached by the environment, and the learner loads no such model."""

    @property
    def from_rollout(self) -> bool:
        return self.path == "rollout"


@dataclass(kw_only=True, slots=True)
class CheckpointSettings:
    """Of the checkpoints of whatever is trained."""

    async_save: bool = True
    """Checkpoints are written beside the steps, from a copy of weights and moments in host memory (with AdamW 12 bytes
    per parameter, over the ranks). Without it every step waits for its checkpoint."""
    save_timeout_s: float = 3600.0
    """Longest that a checkpoint may take to be written, beside `run.disk_patience_s` on a full disk; then the run ends
    and can be resumed. The next checkpoint, and the end of the run, wait for the one under way."""
    keep_checkpoints: int = 2
    """Older ones are deleted, but for the best and those of `keep_every`."""
    keep_every: int = 0
    """Checkpoints of each so many steps stay for good; 0 is none."""
    export_every: int = 0
    """Steps between models that load elsewhere, `exports/step_50/hf`, made of checkpoints by a process beside training;
    0 is none. The last one is `hf/` in any case. See also `asyncrl export`."""
    copy_to: str = ""
    """URL of any file system that fsspec knows (`s3://bucket/run`, `gs://...`, `file:///backup`): each checkpoint is
    copied there too, by a process beside training. Nothing there is deleted, nor a checkpoint of another run replaced:
    give each run a folder of its own. That it can be written is tried before the first step. A copy that fails three
    times, or takes longer than `save_timeout_s`, is said and counted (`checkpoint/copies_failed`), and training goes
    on."""
    keep_best: str = ""
    """A metric, `eval/heldout/accuracy` or one of the steps: the checkpoint at which it was best stays, as `ckpt/best`.
    Of an evaluation it is the one whose weights the evaluation was asked for."""
    keep_best_by: str = "max"
    """`max` or `min`: which value of `keep_best` is better."""


@dataclass(kw_only=True, slots=True)
class LearnerConfig(CheckpointSettings):
    ranks: int = 1
    """FSDP2 ranks that `asyncrl local` starts; under your own torchrun its world size rules."""
    replicas: int = 1
    """Copies of the model that the ranks hold, each cut over an equal share of them (HSDP): weights are then gathered
    within a copy's ranks alone, neighbours by rank, and a gradient's shards are added up over the copies. Divides the
    number of ranks; see docs/parallel.md."""
    sequence_parallel: int = 1
    """Neighbouring ranks that share every micro-batch, each with some of its tokens and, in attention, with some of its
    heads (Ulysses). With `replicas` and `tensor_parallel` it divides the number of ranks; see docs/parallel.md."""
    expert_parallel: int = 1
    """Neighbouring ranks that have different experts of each layer of a mixture, and send each other the tokens that
    chose them, each with sequences of its own. It divides the ranks of a copy of the model. Of Qwen3-MoE, Qwen2-MoE,
    Mixtral, GLM-4-MoE and DeepSeek-V3; see docs/parallel.md."""
    tensor_parallel: int = 1
    """Neighbouring ranks that compute every layer together, each with some of its heads and of its inner width, on the
    same sequences. With `replicas` it divides the number of ranks. Of Llama, Mistral, Qwen2 and Qwen3; see
    docs/parallel.md."""
    router_replay: bool = False
    """Of a mixture of experts: the built-in engine records the experts of every token, and the policy sends it to the
    same ones when it is trained (Rollout Routing Replay, R3, arXiv 2510.11370): layers * experts per token bytes more
    per token in the replay. Of Qwen3-MoE, Qwen2-MoE, Mixtral, GLM-4-MoE and DeepSeek-V3; see docs/losses.md."""
    device: str = "auto"
    """`auto` is a GPU where there is one."""
    groups_per_step: int = 32
    """Groups in a batch, over all ranks."""
    updates_per_batch: int = 1
    """Optimizer steps per leased batch, each on its own share of the groups."""
    epochs_per_batch: int = 1
    """Passes over a batch, each of `updates_per_batch` optimizer steps on the same shares (PPO's epochs). Advantages,
    values and proximal log-probs stay those of before the first."""
    proximal_ema: float = 0.0
    """Above 0: the proximal policy is a moving average of the weights with this decay per optimizer step."""
    early_groups: int = 0
    """Above 0: forward and backward of every so many groups run as soon as those are there, while the learner waits for
    the rest of its batch. The gradients are those of the whole batch but for rounding, and the same bits whenever each
    group came. These groups share micro-batches with no others: fewer begin sooner, and make smaller ones. Off, with a
    line at the start, where all of a batch has to be there first. See docs/staleness.md."""
    max_tokens_per_microbatch: int = 16384
    """Budget of one forward and backward on a rank, in tokens; one longer trajectory goes alone."""
    max_attention_per_microbatch: int = 0
    """Budget of the same in tokens that attention holds, where a shared prompt counts for each completion: 64 of an 8 k
    prompt are half a million. 0 is 4 times `max_tokens_per_microbatch`; a group that is more is cut."""
    reduce_gradients: str = "auto"
    """Over the ranks: with the `last` micro-batch of an optimizer step, until which every rank holds the whole gradient
    in fp32, or with `each`, which sends more. `auto` is `each` where weights, moments and that gradient would take
    more than half of the memory of a rank."""
    offload: str = "none"
    """What lies in host memory instead of a GPU's: `optimizer`, AdamW's moments, which go to the GPU for the step of
    their parameter and back; or `all`, also weights and gradients, of every model of the learner (FSDP2's CPU offload):
    a layer is copied to the GPU when it computes, and AdamW steps on the CPU. See docs/parallel.md."""
    steps: int = 100
    """Train steps of the run; a resumed one goes on to the same number."""
    epochs: float = 0.0
    """Above 0, for `asyncrl local`: passes over the rows, whatever `steps` says. It counts the rows and sets `steps` to
    as many as train so many groups; a group that is dropped is not one of them."""
    optimizer: str = "adamw"
    """`adamw_8bit` keeps AdamW's moments of matrices in 8 bits: 2.25 bytes of a parameter instead of 8. See
    docs/parallel.md."""
    lr: float = 1e-6
    """Peak rate of AdamW."""
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine`, both to `min_lr_ratio` at `steps`."""
    min_lr_ratio: float = 0.0
    """Share of the peak rate, the critic's too, at which `linear` and `cosine` end."""
    warmup_steps: int = 0
    """First steps in which the rate rises linearly."""
    weight_decay: float = 0.0
    """On matrices alone, not on norms and biases."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    clip_norm: float = 1.0
    """Largest L2 norm of the whole gradient; a longer one is scaled down to it."""
    skip_spikes: float = 0.0
    """Above 0: an optimizer step whose gradient is longer, before the clipping, than so many times the median of the
    last 64 is skipped, policy and critic each by their own. Its batch counts as trained; `optim/spikes_skipped` counts.
    0 skips none."""
    max_nonfinite_steps: int = 3
    """Consecutive steps skipped for a non-finite loss or gradient before the run stops."""
    save_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    max_restarts: int = 3
    """How often torchrun restarts the ranks after one of them died, in a row: with no checkpoint saved in between."""
    hook: str = ""
    """Yours, `file.py:name` or `package.module:name`, called before and after every optimizer step of the policy with
    an `asyncrl.learner.hook.Update`, for what no setting covers. See docs/own_learning.md."""
    hook_args: dict[str, Any] = field(default_factory=dict)
    """Its arguments: `learner.hook_args.NAME=VALUE`. A function is called with them, a class made with them."""
    profile: str = ""
    """`FIRST:LAST`: of these train steps every rank writes a trace of torch's profiler (Perfetto and chrome://tracing
    show it) into `profile/` of the run folder, on a GPU with a snapshot of its memory. Profiled steps are slower."""

    @property
    def optimizer_steps(self) -> int:
        """Per leased batch."""
        return self.updates_per_batch * self.epochs_per_batch

    @property
    def attention_budget(self) -> int:
        return self.max_attention_per_microbatch or 4 * self.max_tokens_per_microbatch
