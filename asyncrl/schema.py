"""All settings of a run with their meaning, as typed dataclasses: the schema of the config that Hydra composes. Checks
read the whole config.

Importing this module loads neither torch nor ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from omegaconf import MISSING

from asyncrl.settings.advantage import AdvantageConfig
from asyncrl.settings.environment import EnvironmentConfig
from asyncrl.settings.evaluation import EvalConfig
from asyncrl.settings.learner import CriticConfig, LearnerConfig, LearnerSettings, ReferenceConfig
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.replay import ReplayConfig
from asyncrl.settings.reward import RewardConfig
from asyncrl.settings.weights import WeightsConfig


@dataclass(kw_only=True, slots=True)
class RowSettings:
    """Settings that select and order the rows, of whatever is trained."""

    path: Any = MISSING
    """Where the rows are (`prompt` as text or chat messages, and any other columns): JSONL or parquet files, a folder
    of them or one of `save_to_disk`, a list or a glob, `hf:NAME[:CONFIG][:SPLIT]`, or a class of yours, `file.py:Name`.
    See docs/data.md."""
    prompt_column: str = "prompt"
    """Column that holds the prompt."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """Several sources by name instead of `path`, each with its `path` and optionally `weight` (1), `where`,
    `prompt_column` and `args`: `data.mixture.gsm8k.path=FILE data.mixture.gsm8k.weight=2`."""
    where: dict[str, Any] = field(default_factory=dict)
    """Use only rows whose columns have one of these values, `data.where.level=[3,4,5]`, or lie within bounds, both
    included: `data.where.score.min=0.2 data.where.score.max=0.8`."""
    order_by: str = ""
    """Column (numbers or texts) that orders the rows of an epoch, smallest first; `shuffle` then only mixes equal ones.
    Empty: not ordered."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments for a class of yours: `data.args.NAME=VALUE`."""
    shuffle: bool = True
    """Shuffle the rows anew each epoch, by `seed`; false keeps their order."""


@dataclass(kw_only=True, slots=True)
class SinkSettings:
    """Where metrics and spans of a run go besides its own files."""

    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`); its own environment variables give project and key."""
    tensorboard: bool = False
    """Also write event files for TensorBoard (extra `tensorboard`)."""
    trace: bool = False
    """Record what each process does when, in `logs/trace` (at most 64 MB per process). `asyncrl trace RUN` turns it
    into one picture (docs/trace.md)."""


class RunSettings(Protocol):
    """Settings common to all kinds of runs: folder, model, rows, ranks, and where to start. `Config` implements it."""

    seed: int
    resume: str
    overwrite: bool

    @property
    def run(self) -> RunConfig: ...

    @property
    def model(self) -> ModelConfig: ...

    @property
    def data(self) -> RowSettings: ...

    @property
    def learner(self) -> LearnerSettings: ...

    @property
    def telemetry(self) -> SinkSettings: ...


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str = "run"
    """Name of the run, and of its folder unless `run.dir` is set: letters, digits, `.`, `_` and `-`, at most 64."""
    dir: str = "runs/${run.name}"
    """The run folder. One that holds a run is refused unless `resume` or `overwrite` says what to do with it."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = MISSING
    """Folder, or name on the Hugging Face hub, of a causal language model with its tokenizer."""
    renderer: str = "auto"
    """What turns messages into tokens and back: a renderer's name, `default` (the tokenizer's chat template), or
    `auto`: the renderer of the model's family if it is proven to write what the template writes, else `default`. See
    docs/chat.md."""
    chat: dict[str, Any] = field(default_factory=dict)
    """Options for the renderer or the chat template: `model.chat.enable_thinking=false`."""
    dtype: str = "auto"
    """Compute dtype of the learner; `auto` is bfloat16 on a GPU and float32 on a CPU. Master weights and reductions are
    always float32; float32 on a GPU is exact (no TF32), and refused where attention would not fit into memory."""
    fp32_head: bool = False
    """Compute the logits of a bfloat16 model in float32, from the same weights, in the learner and in the engines.
    Rounded to bfloat16, logits are the coarsest numbers of the model."""
    activation_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of keeping them: less memory, more time. Unset (`null`):
    on a GPU yes, on a CPU no."""
    checkpoint_every: int = 1
    """With `activation_checkpointing`: recompute only one of this many layers. 1 recomputes every layer; 2 halves both
    the extra time and the memory saved (`--dry-run` shows how much)."""
    checkpoint_keep: str = "nothing"
    """With `activation_checkpointing`: what a recomputed layer keeps besides its input: `nothing`, the output of
    `attention` (whose cost grows with the square of the length), or `matmul`, also that of every matrix product."""
    compile: bool = False
    """Compile the learner's decoder layers with torch.compile; the start takes up to minutes longer, and results differ
    by rounding. See docs/parallel.md."""
    lora_rank: int = 0
    """Above 0: train and publish only LoRA adapters of this rank, the base model stays as it is. 0 trains the whole
    model."""
    lora_alpha: int = 32
    """Scale of the adapters: each adds lora_alpha / lora_rank * B A to its layer's weight."""
    lora_targets: list[str] = field(default_factory=list)
    """Linear layers that get adapters, by the ends of their names: `[q_proj,v_proj]`. Empty: all linear layers of the
    blocks."""


@dataclass(kw_only=True, slots=True)
class DataConfig(RowSettings):
    curriculum: str = ""
    """`pass_rate` draws rows less often that every group solves, or none, as measured during the run and kept over
    resumes. Empty: every row once per epoch."""
    curriculum_window: list[float] = field(default_factory=lambda: [0.05, 0.95])
    """Lowest and highest pass rate of rows that are always drawn when it is their turn. So are rows that were not
    measured yet."""
    curriculum_explore: float = 0.1
    """Share of the rows outside the window that are drawn at their turn all the same, since the policy may have
    changed."""
    curriculum_passes_at: float = 0.5
    """Lowest reward with which a completion counts as passed."""
    max_prompt_tokens: int = 512
    """Longest prompt in tokens, as the chat template renders it; `overlong` says what happens to a longer one."""
    overlong: str = "drop"
    """What happens when a prompt that is too long is drawn: `drop` its group (counted as `over_length`), cut the
    beginning or the end of the user's text with `truncate_left` or `truncate_right` (`single_turn` only; dropped if
    that is not enough), or end the run with an `error` that names the row."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    name: str = "transformers"
    """What generates: `vllm`, `transformers` (built in; not for every model, see docs/models.md), servers that you
    started (`server` for vLLM, `sglang`; see docs/servers.md), or `fake` for tests."""
    urls: list[str] = field(default_factory=list)
    """Addresses of the servers of `engine=server` or `sglang`:
    `engine.urls=[http://127.0.0.1:8000,http://10.0.0.7:8000]`. Only this machine or a private network, since no key
    protects the loading of weights into vLLM."""
    key_env: str = ""
    """Environment variable with the key that the servers of `engine=server` or `sglang` were started with
    (`--api-key`). Empty: no key."""
    device: str = "auto"
    """Where the engine runs; `auto` takes a GPU if there is one."""
    dtype: str = "auto"
    """Dtype of the engine's weights; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    max_sequences: int = 256
    """Sequences that one engine decodes together; more wait. Raise it to use a GPU better, lower it if memory is
    short."""
    threads: int = 1
    """CPU threads within an operation of the engine process."""
    tensor_parallel: int = 1
    """GPUs (on a CPU: processes) that share one vLLM engine's model, all on one machine."""
    max_model_len: int = 0
    """Longest prompt and completion together, in tokens (vllm). 0: as long as the model and the KV cache allow."""
    kv_cache_mb: int = 0
    """Memory for the KV cache in MiB, per engine process (vllm). 0: vLLM's own share of a GPU, and 256 MiB on a CPU."""
    record_topk: int = 0
    """Record this many of the likeliest tokens and their log-probs at each sampled token, for `loss.centering`; each
    takes 8 bytes in the replay. 0: none."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Any other engine argument of vLLM, by its own name: `engine.vllm.gpu_memory_utilization=0.8`. Those that would
    make log-probs or versions wrong are refused (docs/vllm.md)."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    workers: int = 1
    """Rollout workers of a pool, each a process with its own engine."""
    host: str = "ray"
    """What workers run as: `ray` actors, or plain child processes (`process`), without Ray."""
    group_size: int = 8
    """Completions of each prompt; they are stored and trained together, and compared with one another."""
    temperature: float = 1.0
    """Sampling temperature. Recorded log-probs are those of the distribution that was sampled from, and the learner
    uses the same temperature."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability; 1 is the whole vocabulary. What each
    token was drawn from is recorded, and the learner renormalises over it (engine=transformers, docs/sampling.md)."""
    top_k: int = 0
    """Sample only from this many of the likeliest tokens; 0 is no limit. Recorded and replayed as with `top_p`."""
    min_p: float = 0.0
    """Sample only from tokens with at least this share of the likeliest token's probability; 0 is no limit. Recorded
    and replayed as with `top_p`."""
    max_new_tokens: int = 256
    """Longest completion in tokens. One that is cut there counts as truncated, and is rewarded all the same."""
    max_in_flight: int = 64
    """Groups generated at the same time, over all workers (members, with `replay.admission=sample`). Raise it until
    engines are full; beyond that, groups only wait and age."""
    min_group_size: int = 0
    """Train a group without members that failed in all `max_attempts`, if at least this many are left; with fewer it is
    dropped as `incomplete`. 0: all members are needed."""
    max_attempts: int = 3
    """How often a group (or a failed member) is tried before it is dropped with its reason."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal, and sample another prompt for each (DAPO's dynamic sampling)."""
    zero_variance_of: str = ""
    """The part of the reward that `drop_zero_variance` compares (`right/acc`), as its metric `rewards/<part>` is named.
    Empty: the reward; of several functions all but `overlong`, whose penalty is no accuracy."""
    drop_truncated: str = "never"
    """Drop groups in which `any` or `all` completions were cut at `max_new_tokens`; `never` keeps them."""
    filters: list[str] = field(default_factory=list)
    """Functions of yours that drop finished groups, `file.py:name` or `package.module:name`. `f(group)` returns true to
    keep a group, false or the reason (a text) to drop it; see docs/groups.md."""
    max_worker_restarts: int = 10
    """Restarts of each worker per hour; one that dies more often fails the run."""


@dataclass(kw_only=True, slots=True)
class TelemetryConfig(SinkSettings):
    samples_per_step: int = 4
    """Rows written to `samples.jsonl` per step (prompt, completion, reward), and at most as many of dropped groups and
    missing members, with the reason. Texts over 2,048 characters lose their middle."""
    samples_per_evaluation: int = 8
    """Rows written to `eval_samples.jsonl` per evaluation of a set, the same rows each time. Texts over 8,192
    characters lose their middle."""
    on_alarm: str = "continue"
    """What an alarm does besides being reported (docs/alarms.md): `continue`, or `stop`: save a checkpoint and end the
    run."""
    ignore_alarms: list[str] = field(default_factory=list)
    """Names of alarms that are neither reported nor acted on; `asyncrl alarms` lists them."""


@dataclass(kw_only=True, slots=True)
class RayConfig:
    address: str = ""
    """Address of an existing Ray cluster (`auto`, or `host:port`); empty starts one on this machine."""
    environment: list[str] = field(default_factory=list)
    """Further environment variables for workers on that cluster, by name or by how they begin (`MY_*`). Those that
    begin with HF_, NCCL_ and VLLM_ always travel."""
    gpus_per_worker: float = 0.0
    """GPUs that Ray reserves for each rollout worker. 0: what its engine takes (`engine.tensor_parallel`, or an equal
    part of a shared GPU)."""


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    """Assignment of this machine's GPUs to the processes of `asyncrl local` (CUDA_VISIBLE_DEVICES)."""

    mode: str = "auto"
    """`dedicated`: the learner's ranks take the first GPUs and the engines those after them. `colocated`: both begin at
    the first GPU and share its memory; `auto` does so only where there is a single GPU."""
    gpus: int = 0
    """How many of this machine's GPUs to use; 0 is all. With `--dry-run` it may be more than there are."""


@dataclass(kw_only=True, slots=True)
class Config:
    seed: int = 0
    """Seeds the order of the data, sampling (but not vLLM's) and new adapters."""
    resume: str = "never"
    """`never`, `auto` (from the newest checkpoint, if there is one), or the path of a checkpoint, from which a branch
    begins. With `auto`, steps after the checkpoint are trained again as they were, unless learner settings changed."""
    overwrite: bool = False
    """Delete what an earlier run left in the run folder."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
