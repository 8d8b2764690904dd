"""Every setting, as typed dataclasses, and `load_config()`, the one door from Hydra to them.

Past `load_config()` there is no `DictConfig`: a process gets a `Config` that was checked as a whole
(`asyncrl.checks`) before anything was started. Importing this module loads neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.checks.whole import check_config
from asyncrl.errors import ConfigError
from asyncrl.hints import explain_refused_value, refuse_unknown_keys
from asyncrl.losses.config import LossConfig


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str = "run"
    """Letters, digits, `.`, `_`, `-`; at most 64."""
    dir: str = "runs/${run.name}"
    """The run folder. A used one is refused unless `resume` or `overwrite` says what to do with it."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = MISSING
    """Directory (or hub name) of a Hugging Face causal LM with its tokenizer."""
    dtype: str = "float32"
    """Compute dtype of the learner: `float32` or `bfloat16`. Master weights and reductions are always fp32."""
    activation_checkpointing: bool = False


@dataclass(kw_only=True, slots=True)
class DataConfig:
    path: str = MISSING
    """JSONL file; each row has `prompt` (text, or a list of chat messages) and any other columns."""
    shuffle: bool = True
    """A new seeded permutation each epoch; false keeps file order."""
    max_prompt_tokens: int = 512
    """A longer prompt is an error naming its row, never a silent truncation."""


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    name: str = "single_turn"


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    function: str = MISSING
    """`file.py:name` or `package.module:name`; called with the completion text and the row."""
    timeout_s: float = 10.0
    """Deadline of one call; past it the worker process is killed and the group is dropped with its reason."""
    workers: int = 1
    """Reward processes per rollout worker."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    name: str = "transformers"
    """`transformers` (any HF causal LM, CPU or GPU) or `fake` (deterministic, for tests)."""
    device: str = "auto"
    dtype: str = "float32"
    max_sequences: int = 256
    """Sequences decoded together; more wait in the engine."""
    threads: int = 1
    """Intra-op threads of the engine process (CPU)."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    baseline: str = "mean"
    """`mean` of the group, `loo` (leave one out) or `none`."""
    std: str = "none"
    """Divide by the standard deviation (ddof 1) of the `group`, of the `batch`, or `none`."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    workers: int = 1
    host: str = "ray"
    """`ray` actors, or `process`: plain child processes, for debugging."""
    group_size: int = 8
    temperature: float = 1.0
    max_new_tokens: int = 256
    max_in_flight: int = 64
    """Groups being generated at once, over all workers."""
    max_attempts: int = 3
    """How often a group is tried before it is dropped with its reason."""
    max_worker_restarts: int = 10
    """Per worker; a worker that dies more often fails the run."""


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    address: str = "tcp://127.0.0.1:5577"
    """Where the replay server binds and everyone connects. Loopback only, unless `keys` is set."""
    keys: str = ""
    """Directory made by `asyncrl keys`: turns on CURVE encryption and the allow-list. Required off loopback."""
    max_staleness: int = 4
    """Hard bound: no token older than this, in policy versions, ever contributes to a gradient."""
    pipeline_depth: int = 2
    """How many batches ahead of the learner admission lets rollouts run; at most `max_staleness`."""
    stale_policy: str = "mask"
    """`mask` over-age tokens, `drop` the whole group, or `wait` so that none gets over-age."""
    readmit_dropped: bool = False
    """Put the prompt of a group dropped as stale back in the stream."""
    max_bytes: int = 1 << 30
    """Memory for stored groups; the byte credits of all producers together never exceed it."""
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    """Silence after which a worker is taken for dead and its assignments go to others."""
    wait_timeout_s: float = 300.0
    """Longest wait without progress (learner for a batch, worker for the server) before a typed error."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    transport: str = "broadcast"
    """`broadcast` (process group of learner and workers: gloo on CPU, nccl on GPU) or `files` (safetensors)."""
    host: str = "127.0.0.1"
    """Address of the learner's weight store, as the workers reach it."""
    wire_dtype: str = "float32"
    """`float32` or `bfloat16`; shards are cast before they are gathered."""
    bucket_mb: int = 64
    timeout_s: float = 60.0
    """Longest wait for any one peer in any one phase of an update."""


@dataclass(kw_only=True, slots=True)
class LearnerConfig:
    ranks: int = 1
    """FSDP2 ranks that `asyncrl local` starts; under your own torchrun its world size rules."""
    device: str = "auto"
    groups_per_step: int = 32
    updates_per_batch: int = 1
    """Optimizer steps per leased batch, each on its own share of the groups."""
    max_tokens_per_microbatch: int = 16384
    steps: int = 100
    lr: float = 1e-6
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine`, both to zero at `steps`."""
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta2: float = 0.95
    clip_norm: float = 1.0
    max_nonfinite_steps: int = 3
    """Consecutive steps skipped for a non-finite loss or gradient before the run stops."""
    save_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    max_restarts: int = 3
    """How often torchrun restarts the ranks after one of them died."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    every: int = 0
    """Steps between evaluations on the workers' engines, greedy; 0 is never."""
    path: str = ""
    """JSONL file in the format of `data.path`."""
    name: str = "heldout"
    """Name of the set in the metric `eval/<name>/accuracy`."""
    rows: int = 256
    """Rows taken from the start of the file."""
    chunk: int = 64
    """Rows per evaluation assignment; each is pinned to one policy version."""


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    samples_per_step: int = 4
    """Rows of `samples.jsonl` per step: prompt, completion, reward."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`). Project and keys come from its own environment variables."""
    tensorboard: bool = False


@dataclass(kw_only=True, slots=True)
class RayConfig:
    address: str = ""
    """Of an existing cluster (`auto`, `host:port`); empty starts a local one."""
    gpus_per_worker: float = 0.0


@dataclass(kw_only=True, slots=True)
class Config:
    seed: int = 0
    resume: str = "never"
    """`never`, `auto` (from the newest checkpoint if there is one) or the path of a checkpoint."""
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
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    ray: RayConfig = field(default_factory=RayConfig)


def config_dir() -> Path:
    """The shipped `configs/`: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def config_keys(kind: type = Config, prefix: str = "") -> list[str]:
    """Every setting as the dotted key a user types, in the order of the dataclasses."""
    types = get_type_hints(kind)
    keys: list[str] = []
    for item in fields(kind):
        inner = types[item.name]
        if isinstance(inner, type) and is_dataclass(inner):
            keys += config_keys(inner, f"{prefix}{item.name}.")
        else:
            keys.append(f"{prefix}{item.name}")
    return keys


def config_groups() -> list[str]:
    """Folders of `configs/`: what a user picks with `group=name`."""
    return sorted(folder.name for folder in config_dir().iterdir() if folder.is_dir())


def load_config(overrides: Sequence[str] = ()) -> Config:
    """Compose `configs/config.yaml` with `overrides` (`key=value`, `group=name`) and check the result whole.

    Raises:
        ConfigError: an unknown key or group, a value of the wrong type, a missing required key, or a
            refused setting; the message says the rule, the value and the way out.
    """
    refuse_unknown_keys(overrides, known=config_keys(), groups=config_groups())
    ConfigStore.instance().store(name="schema", node=Config)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            node = compose(config_name="config", overrides=list(overrides))
        missing = sorted(OmegaConf.missing_keys(node))
        if missing:
            given = " ".join(f"{key}=..." for key in missing)
            raise ConfigError(f"required settings are missing: {', '.join(missing)}. Give them: {given}")
        OmegaConf.resolve(node)
        config = cast(Config, OmegaConf.to_object(node))
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra wraps OmegaConf's reason and says only "Error merging"; OmegaConf's own cause lacks the key.
        reason = str((isinstance(error, HydraException) and error.__cause__) or error)
        raise ConfigError(explain_refused_value(reason, overrides)) from error
    check_config(config)
    return config


def shared_settings(config: Config) -> dict[str, Any]:
    """The settings every process of a run must agree on. Paths count by their last part: each machine has its own."""
    return {
        "seed": config.seed,
        "model": Path(config.model.path).name,
        "data": [Path(config.data.path).name, config.data.shuffle, config.data.max_prompt_tokens],
        "environment": config.environment.name,
        "reward": [Path(config.reward.function).name, config.reward.timeout_s],
        "rollout": [config.rollout.group_size, config.rollout.temperature, config.rollout.max_new_tokens],
        "replay": {key: value for key, value in asdict(config.replay).items() if key not in ("address", "keys")},
        "weights": [config.weights.transport, config.weights.wire_dtype],
        "learner": config.learner.groups_per_step,
        "eval": [Path(config.eval.path).name, config.eval.name, config.eval.rows],
    }


def run_digest(config: Config) -> str:
    """16 hex digits over `shared_settings`: the replay server refuses a peer that comes with another one."""
    text = json.dumps(shared_settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict, as written to `config.yaml` in the run folder."""
    return asdict(config)


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `config_to_dict`, for processes that get their config from the one that started them.

    Raises:
        ConfigError: a key or a type that is not in the schema.
    """
    try:
        node = OmegaConf.merge(OmegaConf.structured(Config), values)
        return cast(Config, OmegaConf.to_object(node))
    except OmegaConfBaseException as error:
        raise ConfigError(f"a config received from another process does not fit this version: {error}") from error


def to_yaml(settings: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(settings))
