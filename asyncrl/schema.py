"""Every setting with its meaning, as typed dataclasses: the schema that Hydra composes into and that is checked whole.

Importing this module loads neither torch nor ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from omegaconf import MISSING

from asyncrl.environments.settings import EnvironmentConfig
from asyncrl.evaluation.settings import EvalConfig
from asyncrl.learner.settings import CriticConfig, LearnerConfig, ReferenceConfig
from asyncrl.losses.settings import LossConfig
from asyncrl.replay.config import ReplayConfig
from asyncrl.rewards.settings import RewardConfig


class RowSettings(Protocol):
    """What says which rows are drawn, in whatever kind of run: as in `DataConfig`."""

    path: Any
    prompt_column: str
    mixture: dict[str, Any]
    where: dict[str, Any]
    order_by: str
    args: dict[str, Any]
    shuffle: bool


class RunSettings(Protocol):
    """What every kind of run has: a folder, a model, rows, and where it begins. `Config` is one."""

    seed: int
    resume: str
    overwrite: bool

    @property
    def run(self) -> RunConfig: ...

    @property
    def model(self) -> ModelConfig: ...

    @property
    def data(self) -> RowSettings: ...


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str = "run"
    """Letters, digits, `.`, `_`, `-`; at most 64."""
    dir: str = "runs/${run.name}"
    """The run folder. A used one is refused unless `resume` or `overwrite` says what to do with it."""
    disk_patience_s: float = 3600.0
    """While the disk of the run folder is full the run waits and says so once a minute, at most so long; then it ends
    and can be resumed."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = MISSING
    """Directory (or hub name) of a Hugging Face causal LM with its tokenizer."""
    renderer: str = "auto"
    """What turns messages into tokens and back: `auto`, `default` (the tokenizer's chat template) or a renderer's name
    (`qwen3`, `llama-3`, ...). `auto` takes the one of the model's family that is proven to write what the template
    writes, and `default` where there is none. See docs/chat.md."""
    chat: dict[str, Any] = field(default_factory=dict)
    """Options of the renderer, or of the chat template: `model.chat.enable_thinking=false`."""
    dtype: str = "auto"
    """Compute dtype of the learner: `float32`, `bfloat16`, or `auto`, bfloat16 on a GPU and else float32. Master
    weights and reductions are always fp32. float32 is exact on a GPU too (no TF32), and refused there where attention
    would build too many scores: bfloat16 builds none."""
    fp32_head: bool = False
    """Logits of a model in bfloat16 are computed in float32, from the same weights, in the learner and in the engines
    alike: rounded to bfloat16 they are the coarsest numbers of all."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    checkpoint_every: int = 1
    """With `activation_checkpointing`: of every so many layers one is computed again, the others keep what they need.
    1 is every layer; 2 takes half of the time and gives half of the memory back. `--dry-run` shows what it takes."""
    checkpoint_keep: str = "nothing"
    """With `activation_checkpointing`: what a layer that is computed again keeps beside its input. `attention` is its
    output, whose arithmetic grows with the square of the length; `matmul` also that of every matrix product."""
    compile: bool = False
    """The learner's decoder layers are compiled by torch.compile before the first step: its start takes up to minutes
    longer. What is computed differs by rounding. See docs/parallel.md."""
    lora_rank: int = 0
    """Above 0: only LoRA adapters of this rank are trained and sent to the engines; the base stays as it is."""
    lora_alpha: int = 32
    """An adapter adds lora_alpha / lora_rank * B A to its layer's weight."""
    lora_targets: list[str] = field(default_factory=list)
    """Names of the linear layers that get adapters (`q_proj`, or longer); empty is all of the blocks."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    path: Any = MISSING
    """Rows with `prompt` (text, or a list of chat messages) and any other columns: a JSONL or parquet file, a folder of
    them or one made by `save_to_disk`, `hf:NAME[:CONFIG][:SPLIT]` of the Hugging Face hub, or a class of your own,
    `file.py:Name`. Several: a list, or a glob. See docs/data.md."""
    prompt_column: str = "prompt"
    """The column that holds the prompt, where it has another name."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """Instead of `path`, several sources by name, each with `path` and, as it likes, `weight` (1), `where`,
    `prompt_column` and `args`: `data.mixture.gsm8k.path=FILE data.mixture.gsm8k.weight=2`."""
    where: dict[str, Any] = field(default_factory=dict)
    """Only rows whose columns have these values, `data.where.level=[3,4,5]`, or lie within bounds,
    `data.where.score.min=0.2 data.where.score.max=0.8`."""
    order_by: str = ""
    """Column of numbers, or texts, by which the rows of an epoch come, smallest first (a curriculum); `shuffle` then
    mixes those that are equal. Empty is no such order."""
    curriculum: str = ""
    """`pass_rate`: rows that every group solves, or none, are drawn less. The replay server measures how often each row
    is solved, and keeps it over resumes. Empty draws each row once an epoch."""
    curriculum_window: list[float] = field(default_factory=lambda: [0.05, 0.95])
    """Pass rates, both included, of the rows that are drawn whenever their turn comes, as are those never measured."""
    curriculum_explore: float = 0.1
    """Share of the other rows that are drawn all the same at their turn: what was hopeless may not be any more."""
    curriculum_passes_at: float = 0.5
    """Least reward of a completion that has passed."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of a class of your own: `data.args.NAME=VALUE`."""
    shuffle: bool = True
    """A new seeded permutation each epoch; false keeps the order of the rows."""
    max_prompt_tokens: int = 512
    """Of a prompt as rendered by the chat template; what becomes of a longer one says `overlong`."""
    overlong: str = "drop"
    """What becomes of a longer prompt when it is drawn: `drop` its group (counted as `over_length`), `truncate_left` or
    `truncate_right` (so many tokens are cut there; only where the environment reads tokens, as `single_turn` does), or
    `error`, which ends the run and names the row."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    name: str = "transformers"
    """`vllm` (CPU or GPU), `transformers` (built in, CPU or GPU; not for every model, see docs/models.md), servers
    that you started: `server` (vLLM), `sglang` (docs/servers.md), or `fake` (deterministic, for tests)."""
    urls: list[str] = field(default_factory=list)
    """With `engine=server` or `sglang`: where they are, `engine.urls=[http://127.0.0.1:8000,http://10.0.0.7:8000]`. On
    this machine or a private network alone: no key guards what loads weights into vLLM."""
    key_env: str = ""
    """With `engine=server` or `sglang`: environment variable with the key that they were started with (`--api-key`)."""
    device: str = "auto"
    """`auto` is a GPU where there is one."""
    dtype: str = "auto"
    """Of the engine's weights: `float32`, `bfloat16`, or `auto`, bfloat16 on a GPU and else float32."""
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
    record_topk: int = 0
    """Record so many of the likeliest tokens, with their log-probs, at each sampled token: 8 bytes each in the replay.
    `loss.centering` needs them. 0 is none."""
    exact: bool = False
    """Engine and learner compute the same log-probs bit for bit at the same version (transformers, on CPUs, in float32,
    with `weights.on_update=recompute`), and the canary allows no difference. Costs time, see docs/exact.md."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Any other engine argument of vLLM, by its own name: `engine.vllm.gpu_memory_utilization=0.8`."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    estimator: str = "group"
    """`group` (against the siblings), `gdpo` (each of `components` against the siblings'), `turns` (what each turn and
    the later ones earned, against all turns of the siblings; `turns_by_number`: against theirs of the same number),
    `reinforce_pp` (whitened returns), or with a critic `gae`, `vtrace` or `retrace`, these two also as `vtrace_turns`
    and `retrace_turns`, whose traces are cut once per turn; or `own`, what `function` returns."""
    function: str = ""
    """With `advantage=own`: yours, `file.py:name` or `package.module:name`. It takes
    `asyncrl.advantages.AdvantageInputs`, a whole step, and returns a number per trajectory or per token. See
    docs/own_learning.md."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments: `advantage.args.NAME=VALUE`. A function is called with them, a class made with them."""
    baseline: str = "mean"
    """`mean` of the group, `loo` (leave one out), `opo` (mean weighted by length), `none`, or `greedy`: the reward of a
    greedy completion of the same prompt, made for that and not trained on."""
    std: str = "none"
    """Divide by the standard deviation (ddof 1) of the `group`, of the `batch`, or `none`. With the estimators per
    token `batch` whitens all loss tokens of a step (mean 0, ddof 0)."""
    gamma: float = 1.0
    """Discount per sampled token; with `turns` and `turns_by_number` per turn."""
    lam: float = 0.95
    """Decay of the trace of `gae`, `vtrace` and `retrace`."""
    lam_alpha: float = 0.0
    """Above 0: the advantages of `gae` and `retrace` use 1 - 1/(lam_alpha * length) for each sequence (VAPO: 0.05), and
    `lam` is that of the critic's targets alone."""
    c_bar: float = 1.0
    """Cap of the ratio in the trace of `vtrace` and `retrace`: above 1, credit travels further back."""
    components: dict[str, float] = field(default_factory=dict)
    """With `gdpo`: named parts of the reward, each with its weight: `advantage.components.correct=1`. With `own`: parts
    that its function needs; the numbers do nothing."""
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
    def credits_turns(self) -> bool:
        """Whether each turn has an advantage of its own, from what it and the later ones earned."""
        return self.estimator in ("turns", "turns_by_number")

    @property
    def within_groups(self) -> bool:
        """Whether those of a group depend on no other group."""
        return self.estimator == "group" and self.std != "batch" and self.kl_coef == 0

    @property
    def needs_siblings(self) -> bool:
        """Whether a trajectory alone in its group could not but have an advantage of 0."""
        return not self.uses_critic and (self.baseline not in ("none", "greedy") or self.std == "group")


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    workers: int = 1
    """Processes with an engine each, of one pool."""
    host: str = "ray"
    """`ray` actors, or `process`: plain child processes, for debugging."""
    group_size: int = 8
    """Completions of a prompt: siblings that are rewarded, stored and trained as one."""
    temperature: float = 1.0
    """The recorded log-probs are those of the distribution that was sampled from."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together; 1 is the whole vocabulary. What each token
    was drawn from is recorded, and the learner's log-probs are renormalised over it (engine=transformers). See
    docs/sampling.md."""
    top_k: int = 0
    """Draw from so many tokens, the likeliest; 0 is all. Recorded and replayed as with `top_p`."""
    min_p: float = 0.0
    """Draw from tokens of at least this share of the likeliest one's probability; 0 is all. Likewise."""
    max_new_tokens: int = 256
    """Longest completion; what is cut there is `truncated` and has its reward all the same."""
    max_in_flight: int = 64
    """Groups being generated at once, over all workers; with `replay.admission=sample`, their members."""
    autotune: bool = False
    """Move `replay.pipeline_depth` (from what it says, within the bound) and `max_in_flight` (up to what it says) while
    the run goes on, so that the learner is busy with tokens as fresh as can be. See docs/planning.md."""
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
    """Per worker and hour; a worker that dies more often fails the run."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    transport: str = "broadcast"
    """`broadcast` (process group of learner and workers: gloo on CPU, nccl on GPU), `files` (safetensors in the run
    folder, which all share), or `pull` (workers fetch them over HTTP or from `weights.url`, from wherever they are)."""
    host: str = "127.0.0.1"
    """Address of the learner's weight store, or of the server of `pull`, as the workers reach it."""
    port: int = 0
    """Its port; 0 is any that is free. With a firewall between learner and workers, one that it lets through."""
    backend: str = "auto"
    """Of the broadcast: `nccl` (GPUs on both sides, none of them shared), `gloo` (anything), `ipc` (learner and engines
    on one machine: engines copy out of the learner's memory, on a GPU that of the GPU, where two copies then lie), or
    `auto`: nccl where learner and engines have GPUs of their own by `placement.mode`, else gloo."""
    interface: str = ""
    """Network interface of this machine that the weights take (`eth1`; gloo: several, by commas). Empty: that of
    `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME`; without them gloo takes the one that leads to `weights.host`."""
    wire_dtype: str = "auto"
    """`float32`, `bfloat16`, or `auto`, bfloat16 where the learner computes in it on a GPU; shards are cast before they
    are gathered."""
    bucket_mb: int = 64
    """Tensors travel in buckets of at most this."""
    senders: str = "rank0"
    """Of the broadcast: `rank0` gathers all weights and sends them, or `all`: each learner rank sends what it holds,
    nothing is gathered, and rank 0 keeps its share alone in memory."""
    copies: str = "two"
    """What the learner holds of its weights beside them: `two` copies of what a rank sends, one being filled while the
    other is on its way, so that training waits for a copy at most; or `none` (of the broadcast): they are cast and sent
    piece by piece, and the optimizer waits until they are sent. For models of which two more do not fit."""
    slices: str = "auto"
    """Of the broadcast to an engine or server of several processes (tensor parallelism): each of them receives and
    stages what vLLM's loaders keep of the weights there (`auto`), or `never`: the whole model."""
    delta: str = "never"
    """Send only what changed since the version before, without loss: `never`, `always`, or `auto`, while that is
    faster (`files` and `pull`: while it saves half of the bytes). For bfloat16 on slow links: a small step changes few
    of its bits, and nearly all of float32's."""
    url: str = ""
    """Of `pull`: URL of any file system that fsspec knows (`s3://bucket/run`), to which the learner writes and from
    which workers read. Empty: the learner serves what lies in the run folder, over HTTP at `weights.host`."""
    fetch_url: str = ""
    """Of `pull`: where workers read what the learner publishes, if it is another URL than that at which it does: a
    proxy with TLS before its server (`https://...`), a cache before the bucket."""
    on_update: str = "keep"
    """Keys of running sequences at an update: `keep` them (cheap), or `recompute` them with the new weights."""
    verify_every: int = 10
    """Versions between two canaries (engine and learner must agree on the log-probs of probe tokens); 0 is only the
    first version of a worker and after every (re)join."""
    timeout_s: float = 60.0
    """Longest wait for any one peer in any one phase of an update."""


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    samples_per_step: int = 4
    """Rows of `samples.jsonl` per step: prompt, completion, reward; and at most so many more of groups that were
    dropped since the step before, or of members that a group is trained without, with the reason. Their texts lose
    their middle beyond 2,048 characters."""
    samples_per_evaluation: int = 8
    """Rows of `eval_samples.jsonl` per evaluation of a set, evenly over it: the first completion of each, and its
    reward. Texts beyond 8,192 characters lose their middle."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`). Project and keys come from its own environment variables."""
    tensorboard: bool = False
    """Also write event files for TensorBoard (extra `tensorboard`)."""
    on_alarm: str = "continue"
    """What an alarm does besides being told (docs/alarms.md): `continue`, or `stop`, which saves a checkpoint and ends
    the run."""
    ignore_alarms: list[str] = field(default_factory=list)
    """Names of alarms that are neither told nor heeded."""
    trace: bool = False
    """Write down what each process does when, in `logs/trace`, at most 64 MB for each: `asyncrl trace RUN` makes one
    picture of it (docs/trace.md)."""


@dataclass(kw_only=True, slots=True)
class RayConfig:
    address: str = ""
    """Of an existing cluster (`auto`, `host:port`); empty starts a local one."""
    environment: list[str] = field(default_factory=list)
    """Further environment variables, by name or by how they begin (`MY_*`), that workers on that cluster get. Those
    that begin with HF_, NCCL_ and VLLM_ always travel."""
    gpus_per_worker: float = 0.0
    """GPUs that Ray reserves for each rollout worker; 0 is what its engine takes: `engine.tensor_parallel` where
    engines run on GPUs, and of a GPU that several share an even part."""


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    """Which GPUs of this machine each process of `asyncrl local` gets (CUDA_VISIBLE_DEVICES)."""

    mode: str = "auto"
    """`dedicated`: the learner's ranks have the first GPUs, the engines those behind them, nobody shares. `colocated`:
    both begin at the first, and share its memory. `auto`: colocated where there is one GPU alone, else dedicated."""
    gpus: int = 0
    """So many of those that are here; 0 is all. `--dry-run` also plans for more than there are."""


@dataclass(kw_only=True, slots=True)
class Config:
    seed: int = 0
    """Of the order of the data, the sampled tokens (not vLLM's) and new adapters."""
    resume: str = "never"
    """`never`, `auto` (from the newest checkpoint if there is one; the steps after it are trained again as they were,
    unless settings of the learner changed) or the path of a checkpoint, from which a branch begins."""
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
