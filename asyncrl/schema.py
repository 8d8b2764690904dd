"""Every setting with its meaning, as typed dataclasses: the schema that Hydra composes into and that is checked whole.

Importing this module loads neither torch nor ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from asyncrl.losses.config import LossConfig
from asyncrl.replay.config import ReplayConfig


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
    lora_rank: int = 0
    """Above 0: only LoRA adapters of this rank are trained and sent to the engines; the base stays as it is."""
    lora_alpha: int = 32
    """An adapter adds lora_alpha / lora_rank * B A to its layer's weight."""
    lora_targets: list[str] = field(default_factory=list)
    """Names of the linear layers that get adapters (`q_proj`, or longer); empty is all of the blocks."""


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
    """Or one of your own, `file.py:Name` or `package.module:Name`: see docs/environments.md."""


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    function: str = MISSING
    """`file.py:name` or `package.module:name`; called with the completion text and the row."""
    timeout_s: float = 10.0
    """Deadline of one call; past it the worker process is killed and the group is dropped with its reason."""
    workers: int = 1
    """Reward processes per rollout worker, or of the one service."""
    model: str = ""
    """With `reward=model`: folder (or hub name) of a classifier with one output. `function` then names what is made
    with this path, and called like a reward function."""
    host: str = "worker"
    """`worker`: each rollout worker has its reward processes; `ray`: all share one service, a Ray actor."""
    gpus: float = 0.0
    """GPUs of that service."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    name: str = "transformers"
    """`vllm` (CPU or GPU), `transformers` (any HF causal LM, CPU or GPU) or `fake` (deterministic, for tests)."""
    device: str = "auto"
    dtype: str = "float32"
    max_sequences: int = 256
    """Sequences decoded together; more wait in the engine."""
    threads: int = 1
    """Intra-op threads of the engine process (CPU)."""
    tensor_parallel: int = 1
    """Processes, hence GPUs, that share one engine's model (vllm)."""
    max_model_len: int = 0
    """Longest prompt and completion together (vllm); 0 is the longest that fits the model and the KV cache."""
    kv_cache_mb: int = 0
    """Memory of the KV cache per process (vllm); 0 is vLLM's own share of a GPU, and 256 MiB on a CPU."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Any other engine argument of vLLM, by its own name: `engine.vllm.gpu_memory_utilization=0.8`."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    estimator: str = "group"
    """`group` (against the siblings), `gdpo` (each of `components` against the siblings'), `reinforce_pp` (whitened
    returns), or with a critic `gae`, `vtrace` or `retrace`, these two also as `vtrace_turns` and `retrace_turns`, whose
    traces are cut once per turn."""
    baseline: str = "mean"
    """`mean` of the group, `loo` (leave one out), `opo` (mean weighted by length), `none`, or `greedy`: the reward of a
    greedy completion of the same prompt, made for that and not trained on."""
    std: str = "none"
    """Divide by the standard deviation (ddof 1) of the `group`, of the `batch`, or `none`. With the estimators per
    token `batch` whitens all loss tokens of a step (mean 0, ddof 0)."""
    gamma: float = 1.0
    """Discount per sampled token."""
    lam: float = 0.95
    """Decay of the trace of `gae`, `vtrace` and `retrace`."""
    lam_alpha: float = 0.0
    """Above 0: the advantages of `gae` and `retrace` use 1 - 1/(lam_alpha * length) for each sequence (VAPO: 0.05), and
    `lam` is that of the critic's targets alone."""
    c_bar: float = 1.0
    """Cap of the ratio in the trace of `vtrace` and `retrace`: above 1, credit travels further back."""
    components: dict[str, float] = field(default_factory=dict)
    """With `gdpo`: named parts of the reward, each with its weight: `advantage.components.correct=1`."""
    kl_coef: float = 0.0
    """Price of log(learner / reference) in the reward, per token."""
    kl_target: float = 0.0
    """Above 0: KL per token that an adaptive controller holds by moving `kl_coef`."""
    kl_horizon: float = 10000.0
    """Sequences over which the controller answers an error of 20 % with a change of 20 %."""

    @property
    def uses_critic(self) -> bool:
        return self.estimator == "gae" or self.uses_ratio

    @property
    def uses_ratio(self) -> bool:
        """Whether the traces are cut by learner/behavior."""
        return self.estimator.startswith(("vtrace", "retrace"))

    @property
    def by_turn(self) -> bool:
        """Whether by that of whole turns."""
        return self.estimator.endswith("_turns")

    @property
    def needs_siblings(self) -> bool:
        """Whether a trajectory alone in its group could not but have an advantage of 0."""
        return not self.uses_critic and (self.baseline not in ("none", "greedy") or self.std == "group")


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
class RolloutConfig:
    workers: int = 1
    host: str = "ray"
    """`ray` actors, or `process`: plain child processes, for debugging."""
    group_size: int = 8
    temperature: float = 1.0
    max_new_tokens: int = 256
    max_in_flight: int = 64
    """Groups being generated at once, over all workers."""
    min_group_size: int = 0
    """Members that failed are made again alone, `max_attempts` times in all. A group that has this many by then is
    trained without the rest; with fewer it is dropped as `incomplete`. 0 asks for all members."""
    max_attempts: int = 3
    """How often a group is tried before it is dropped with its reason."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all the same, and sample a new prompt for each (DAPO's dynamic sampling)."""
    drop_truncated: str = "never"
    """Drop groups of which `any`, or `all`, completions were cut at `max_new_tokens`; `never` keeps them."""
    filters: list[str] = field(default_factory=list)
    """Functions of your own, `file.py:name` or `package.module:name`, that drop finished groups: `f(group)` returns
    true to keep it, false or the reason (text) to drop it. See docs/groups.md."""
    max_worker_restarts: int = 10
    """Per worker; a worker that dies more often fails the run."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    transport: str = "broadcast"
    """`broadcast` (process group of learner and workers: gloo on CPU, nccl on GPU) or `files` (safetensors)."""
    host: str = "127.0.0.1"
    """Address of the learner's weight store, as the workers reach it."""
    wire_dtype: str = "float32"
    """`float32` or `bfloat16`; shards are cast before they are gathered."""
    bucket_mb: int = 64
    delta: str = "never"
    """Send only what changed since the version before, without loss: `never`, `always`, or `auto`, while that is
    faster. For bfloat16 on slow links: a small step changes few of its bits, and nearly all of float32's."""
    on_update: str = "keep"
    """Keys of running sequences at an update: `keep` them (cheap), or `recompute` them with the new weights (vllm)."""
    verify_every: int = 10
    """Versions between two canaries (engine and learner must agree on the log-probs of probe tokens); 0 is only the
    first version of a worker and after every (re)join."""
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
    proximal_ema: float = 0.0
    """Above 0: the proximal policy is a moving average of the weights with this decay per optimizer step."""
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
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    ray: RayConfig = field(default_factory=RayConfig)
