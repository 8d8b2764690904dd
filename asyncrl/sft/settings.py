"""Settings of `asyncrl sft`. The groups `run` and `model` are those of reinforcement learning."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from asyncrl.schema import (
    Config,
    DataConfig,
    EngineConfig,
    LearnerConfig,
    LearnerSettings,
    ModelConfig,
    RolloutConfig,
    RowSettings,
    RunConfig,
    SinkSettings,
    TelemetryConfig,
)


@dataclass(kw_only=True, slots=True)
class SftDataConfig(RowSettings):
    path: Any = MISSING
    """Where the rows are (`messages`, or a prompt and a completion): JSONL or parquet files, a folder of them or one of
    `save_to_disk`, a list or a glob, `hf:NAME[:CONFIG][:SPLIT]`, or a class of yours, `file.py:Name`. See
    docs/data.md."""
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
    """What happens to a row that is too long: `drop` it (counted), cut the beginning or the end of the user's text with
    `truncate_left` or `truncate_right` (dropped if that is not enough), or end the run with an `error` that names the
    row."""


@dataclass(kw_only=True, slots=True)
class SftLearnerConfig(LearnerSettings):
    rows_per_step: int = 32
    """Rows in the batch of a step, over all ranks; each batch is one optimizer step."""
    epochs: float = 1.0
    """Passes over the rows; the last step takes the rows that are left."""
    steps: int = 0
    """Above 0: train steps of the whole run, whatever `epochs` says; a resumed run continues to the same number. 0:
    `epochs` rules."""
    lr: float = 1e-5
    schedule: str = "cosine"
    """Learning rate after the warm-up: `constant`, or `linear` or `cosine` down to zero at the last step."""
    save_every: int = 100
    keep_best: str = ""
    """A metric, such as `eval/heldout/loss`: the checkpoint at which it was best is kept as `ckpt/best`. Empty:
    none."""
    keep_best_by: str = "min"


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
    telemetry: SinkSettings = field(default_factory=SinkSettings)


def learner_config(given: SftConfig) -> Config:
    """The settings as the learner's parts read them: the shared ones, and defaults for the others. The number of steps
    is known once the rows are counted."""
    learner: dict[str, Any] = {each.name: getattr(given.learner, each.name) for each in fields(LearnerSettings)}
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
        learner=LearnerConfig(**learner, steps=1),
        telemetry=TelemetryConfig(**asdict(given.telemetry)),
    )
