"""Every setting of `asyncrl sft`. The groups `run` and `model` are those of a run of reinforcement learning."""

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
)


@dataclass(kw_only=True, slots=True)
class SftDataConfig:
    path: Any = MISSING
    """Rows with a conversation (`messages`), or a prompt and a completion: a JSONL or parquet file, a folder of them
    or one made by `save_to_disk`, `hf:NAME[:CONFIG][:SPLIT]` of the Hugging Face hub, or a class of your own,
    `file.py:Name`. Several: a list, or a glob. See docs/data.md."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """Instead of `path`, several sources by name, each with `path` and, as it likes, `weight` (1), `where`,
    `prompt_column` and `args`."""
    where: dict[str, Any] = field(default_factory=dict)
    """Only rows whose columns have these values, `data.where.level=[3,4,5]`, or lie within bounds,
    `data.where.score.min=0.2`."""
    order_by: str = ""
    """Column of numbers, or texts, by which the rows of an epoch come, smallest first; empty is no such order."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of a class of your own: `data.args.NAME=VALUE`."""
    shuffle: bool = True
    """A new seeded permutation each epoch; false keeps the order of the rows."""
    messages_column: str = "messages"
    """The column that holds whole conversations. A source whose first row has none is read by prompt and completion."""
    prompt_column: str = "prompt"
    """The column of the prompt, text or messages. A column in a column is named with a dot: `extra_info.question`."""
    completion_column: str = ""
    """The column of what the model is to write, text or messages; empty is `completion` or else `response`. Naming it
    says that rows are no conversations in `messages_column`."""
    chat: bool = False
    """A prompt and a completion in text are a user's and an assistant's message, and go through the chat template.
    False takes the texts as they are, with the tokenizer's EOS behind them."""
    learn: str = "every"
    """Which of the assistant's turns carry loss: `every` one, or the `last`. A message with `weight: 0` never does."""
    max_tokens: int = 2048
    """Of a row as it is rendered; what becomes of a longer one says `overlong`."""
    overlong: str = "drop"
    """What becomes of a longer row: `drop` it (counted), `truncate_left` or `truncate_right` (it is cut there, and
    dropped where nothing with loss is left), or `error`, which ends the run and names the row."""


@dataclass(kw_only=True, slots=True)
class SftLearnerConfig(CheckpointSettings):
    ranks: int = 1
    """FSDP2 ranks that `asyncrl sft` starts; under your own torchrun its world size rules."""
    replicas: int = 1
    """Copies of the model that the ranks hold, each cut over an equal share of them (HSDP), see docs/parallel.md."""
    sequence_parallel: int = 1
    """Neighbouring ranks that share every micro-batch, each with some of its tokens and, in attention, with some of its
    heads (Ulysses). With `replicas` and `tensor_parallel` it divides the number of ranks; see docs/parallel.md."""
    expert_parallel: int = 1
    """Neighbouring ranks that have different experts of each layer of a mixture, and send each other the tokens that
    chose them, each with rows of its own. It divides the ranks of a copy of the model. Of Qwen3-MoE, Qwen2-MoE,
    Mixtral, GLM-4-MoE and DeepSeek-V3; see docs/parallel.md."""
    tensor_parallel: int = 1
    """Neighbouring ranks that compute every layer together, each with some of its heads and of its inner width, on the
    same sequences. With `replicas` it divides the number of ranks. Of Llama, Mistral, Qwen2 and Qwen3; see
    docs/parallel.md."""
    device: str = "auto"
    """`auto` is a GPU where there is one."""
    rows_per_step: int = 32
    """Rows in a batch, over all ranks; one optimizer step each."""
    epochs: float = 1.0
    """How often every row comes; the last step takes the rows that are left."""
    steps: int = 0
    """Above 0: train steps of the run, whatever `epochs` says. A resumed run goes on to the same number."""
    max_tokens_per_microbatch: int = 16384
    """Budget of one forward and backward on a rank, in tokens; one longer row goes alone."""
    reduce_gradients: str = "auto"
    """When the ranks' gradients meet: with the `last` micro-batch of a step, with `each` (a rank then never holds more
    than its shard), or `auto`: with each where the whole gradient has no room on a rank."""
    offload: str = "none"
    """What lies in host memory instead of a GPU's: `optimizer` (AdamW's moments) or `all` (weights and gradients, too),
    see docs/parallel.md."""
    optimizer: str = "adamw"
    """`adamw_8bit` keeps AdamW's moments of matrices in 8 bits, see docs/parallel.md."""
    lr: float = 1e-5
    """Peak rate of AdamW."""
    schedule: str = "cosine"
    """After the warm-up: `constant`, `linear` or `cosine`, both to zero at the last step."""
    warmup_steps: int = 0
    """First steps in which the rate rises linearly."""
    weight_decay: float = 0.0
    """On matrices alone, not on norms and biases."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    clip_norm: float = 1.0
    """Largest L2 norm of the whole gradient; a longer one is scaled down to it."""
    max_nonfinite_steps: int = 3
    """Consecutive steps skipped for a non-finite loss or gradient before the run stops."""
    save_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_best: str = ""
    """A metric, `eval/heldout/loss` or one of the steps: the checkpoint at which it was best stays, as `ckpt/best`."""
    keep_best_by: str = "min"
    """`max` or `min`: which value of `keep_best` is better."""
    max_restarts: int = 3
    """How often torchrun restarts the ranks after one of them died, in a row: with no checkpoint saved in between."""


@dataclass(kw_only=True, slots=True)
class SftEvalConfig:
    path: Any = ""
    """Held-out rows as in `data.path`, with the same columns; empty is no evaluation."""
    name: str = "heldout"
    """Name of the set in the metrics `eval/<name>/...`."""
    every: int = 0
    """Steps between evaluations. With `path` the first and the last weights are evaluated too; with 0 they alone."""
    rows: int = 0
    """Rows taken from the start of the file; 0 is all of them."""


@dataclass(kw_only=True, slots=True)
class SftTelemetryConfig:
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`). Project and keys come from its own environment variables."""
    tensorboard: bool = False
    """Also write event files for TensorBoard (extra `tensorboard`)."""
    trace: bool = False
    """Write down what each rank does when, in `logs/trace`, at most 64 MB for each: `asyncrl trace RUN` makes one
    picture of it (docs/trace.md)."""


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """Implements `schema.RunSettings`."""

    seed: int = 0
    """Of the order of the rows and of new adapters."""
    resume: str = "never"
    """`never`, `auto` (from the newest checkpoint if there is one) or the path of a checkpoint, from which a branch
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
"""Settings of the learner that the learner of reinforcement learning has not got."""


def learner_config(given: SftConfig, steps: int = 1) -> Config:
    """What the learner's pieces read: the settings that they share, the defaults elsewhere.

    Args:
        steps: of the whole run, at whose end a schedule ends.
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
        # The longest sequence there is: layers with a window are asked by it whether they can be packed.
        data=DataConfig(path="", max_prompt_tokens=given.data.max_tokens),
        rollout=RolloutConfig(max_new_tokens=0),
        engine=EngineConfig(device="cpu"),  # there are none: every GPU may be a rank's
        learner=LearnerConfig(**learner),
        telemetry=TelemetryConfig(**asdict(given.telemetry)),
    )
