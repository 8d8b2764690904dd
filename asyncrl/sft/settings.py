"""Settings of `asyncrl sft`. The groups `run` and `model` are those of reinforcement learning."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from asyncrl.learner.settings import CheckpointSettings
from asyncrl.schema import (
    Config,
    DataConfig,
    EngineConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TelemetryConfig,
    WeightsConfig,
)


@dataclass(kw_only=True, slots=True)
class SftDataConfig:
    path: Any = MISSING
    """Where the rows are (`messages`, or a prompt and a completion): JSONL or parquet files, a folder of them or one of
    `save_to_disk`, a list or a glob, `hf:NAME[:CONFIG][:SPLIT]`, or a class of yours, `file.py:Name`. See
    docs/data.md."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """Several sources by name instead of `path`, each with its `path` and optionally `weight` (1), `where`,
    `prompt_column` and `args`."""
    where: dict[str, Any] = field(default_factory=dict)
    """Use only rows whose columns have one of these values, `data.where.level=[3,4,5]`, or lie within bounds, both
    included: `data.where.score.min=0.2`."""
    order_by: str = ""
    """Column (numbers or texts) that orders the rows of an epoch, smallest first; `shuffle` then only mixes equal ones.
    Empty: not ordered."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments for a class of yours: `data.args.NAME=VALUE`."""
    shuffle: bool = True
    """Shuffle the rows anew each epoch, by `seed`; false keeps their order."""
    messages_column: str = "messages"
    """Column that holds whole conversations. A source whose first row has none is read by prompt and completion."""
    prompt_column: str = "prompt"
    """Column that holds the prompt (text or messages); a dot reaches into a column: `extra_info.question`."""
    completion_column: str = ""
    """Column that holds what the model should write (text or messages). Empty: `completion`, else `response`; a name
    means that rows are not conversations of `messages_column`."""
    chat: bool = False
    """Treat a prompt and a completion that are texts as messages of a user and an assistant, through the chat template.
    False: take the texts as they are, with the tokenizer's end token after them."""
    learn: str = "every"
    """Which turns of the assistant carry loss: `every` one, or the `last`. A message with `weight: 0` never does."""
    max_tokens: int = 2048
    """Longest row in tokens, as it is rendered; `overlong` says what happens to a longer one."""
    overlong: str = "drop"
    """What happens to a row that is too long: `drop` it (counted), cut it with `truncate_left` or `truncate_right`
    (dropped if nothing with loss is left), or end the run with an `error` that names the row."""


@dataclass(kw_only=True, slots=True)
class SftLearnerConfig(CheckpointSettings):
    ranks: int = 1
    """Learner processes that `asyncrl sft` starts, each with a GPU where there are any; the model is sharded over them
    (FSDP2). Under your own torchrun, its world size counts."""
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
    width; must divide the ranks, together with `replicas`. For Llama, Mistral, Qwen2 and Qwen3, where a layer does not
    fit one GPU (docs/parallel.md)."""
    device: str = "auto"
    """Where the learner trains; `auto` takes GPUs if there are any."""
    rows_per_step: int = 32
    """Rows in the batch of a step, over all ranks; each batch is one optimizer step."""
    epochs: float = 1.0
    """Passes over the rows; the last step takes the rows that are left."""
    steps: int = 0
    """Above 0: train steps of the whole run, whatever `epochs` says; a resumed run continues to the same number. 0:
    `epochs` rules."""
    max_tokens_per_microbatch: int = 16384
    """Tokens of one forward and backward pass on a rank; a longer row goes alone. Lower it if a GPU runs out of
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
    lr: float = 1e-5
    """Peak learning rate of AdamW."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: `constant`, or `linear` or `cosine` down to zero at the last step."""
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
    save_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_best: str = ""
    """A metric, such as `eval/heldout/loss`: the checkpoint at which it was best is kept as `ckpt/best`. Empty:
    none."""
    keep_best_by: str = "min"
    """Whether the largest (`max`) or the smallest (`min`) value of `keep_best` is the best."""
    max_restarts: int = 3
    """How often in a row, with no checkpoint saved in between, the ranks are restarted after one of them died."""


@dataclass(kw_only=True, slots=True)
class SftEvalConfig:
    path: Any = ""
    """Held-out rows, given as in `data.path` and with the same columns; empty: no evaluation."""
    name: str = "heldout"
    """Name of the set in the metrics `eval/<name>/...`."""
    every: int = 0
    """Steps between evaluations. With `eval.path` the first and the last weights are evaluated too; with 0 only
    they."""
    rows: int = 0
    """Rows taken from the start of the file; 0 is all of them."""


@dataclass(kw_only=True, slots=True)
class SftTelemetryConfig:
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`); its own environment variables give project and key."""
    tensorboard: bool = False
    """Also write event files for TensorBoard (extra `tensorboard`)."""
    trace: bool = False
    """Record what each rank does when, in `logs/trace` (at most 64 MB per process). `asyncrl trace RUN` turns it into
    one picture (docs/trace.md)."""


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """Implements `schema.RunSettings`."""

    seed: int = 0
    """Seeds the order of the rows and new adapters."""
    resume: str = "never"
    """`never`, `auto` (from the newest checkpoint, if there is one), or the path of a checkpoint, from which a branch
    begins."""
    overwrite: bool = False
    """Delete what an earlier run left in the run folder."""
    run: RunConfig = field(default_factory=lambda: RunConfig(name="sft"))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    learner: SftLearnerConfig = field(default_factory=SftLearnerConfig)
    eval: SftEvalConfig = field(default_factory=SftEvalConfig)
    telemetry: SftTelemetryConfig = field(default_factory=SftTelemetryConfig)


OURS_ALONE = ("rows_per_step", "epochs")
"""Settings of this learner that the one of reinforcement learning does not have."""


def learner_config(given: SftConfig, steps: int = 1) -> Config:
    """The settings as the learner's parts read them: the shared ones, and defaults for the others.

    Args:
        steps: number of steps of the whole run, at which the schedule ends.
    """
    shared: dict[str, Any] = {each.name: getattr(given.learner, each.name) for each in fields(given.learner)}
    learner: dict[str, Any] = {key: value for key, value in shared.items() if key not in OURS_ALONE}
    learner["steps"] = steps
    return Config(
        seed=given.seed,
        resume=given.resume,
        overwrite=given.overwrite,
        run=given.run,
        model=given.model,
        # The longest possible sequence, which decides whether layers with sliding windows can be packed.
        data=DataConfig(path="", max_prompt_tokens=given.data.max_tokens),
        rollout=RolloutConfig(group_size=1, max_new_tokens=0),  # no sequence shares its prompt with another
        engine=EngineConfig(device="cpu"),  # there are no engines, so every GPU can be used by a rank
        learner=LearnerConfig(**learner),
        weights=WeightsConfig(copies="none"),  # none are sent
        telemetry=TelemetryConfig(**asdict(given.telemetry)),
    )
