"""Every metric of a row of `metrics.jsonl`: its unit, its meaning, which way is better, and where it is made.

A name with `<...>` in it stands for many: `rewards/<name>` for each named component. What is made and is not here fails
a test, and so does what is here and is made nowhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

HIGHER, LOWER, NEITHER = "higher", "lower", ""

OF_EVERY_ROW = ("step", "policy_version", "time", "crc")
"""What a row has beside its metrics: trained steps, the version they made, seconds since the epoch, a checksum."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    """`1` is a plain number, `share` one from 0 to 1."""
    meaning: str
    better: str = NEITHER
    """Which way a run wants it, other things being equal; empty where neither is better."""
    total: bool = False
    """Whether it is counted up since the process that counts it began, and not of one step."""

    @property
    def room(self) -> str:
        return self.name.partition("/")[0]


_RATIO_MOMENTS = (
    ("mean", "1", "mean r", NEITHER),
    ("max", "1", "the largest r", LOWER),
    ("abs_error", "1", "mean of |r - 1|", LOWER),
    ("rms_log_ratio", "nats", "root of the mean of (log r)²", LOWER),
    ("kl_k1", "nats", "mean of -log r, an estimate of the KL", LOWER),
    ("kl_k3", "nats", "mean of r - 1 - log r, an estimate of the KL that is never negative", LOWER),
    ("chi2_token", "1", "mean r² - 1", LOWER),
    ("ess_token", "share", "effective sample size of the tokens, (mean r)² / mean r²", HIGHER),
)
_SEQUENCE_MOMENTS = (
    ("seq_mean", "1", "mean over the sequences of the product of their ratios", NEITHER),
    ("chi2_seq", "1", "mean square of the product of a sequence's ratios, less 1", LOWER),
    ("ess_seq", "share", "effective sample size of the sequences by the product of their ratios", HIGHER),
    ("log_ppl_gap", "nats", "mean over the sequences of -log r per token", LOWER),
)
_EDGES = {
    "E": "learner over behavior policy, π_θ/μ",
    "B": "proximal over behavior policy, π_prox/μ",
    "U": "learner over proximal policy, π_θ/π_prox",
}

_LEARNER = (
    Metric("loss/total", "1", "loss of an optimizer step; of several on one batch their mean"),
    Metric("loss/policy", "1", "its part from the surrogate"),
    Metric("loss/kl", "1", "its part from the KL to the reference policy"),
    Metric("loss/behavior_kl", "1", "its part from the squared log-ratio to the behavior policy"),
    Metric("loss/entropy", "1", "its part from the entropy bonus: less than 0"),
    Metric(
        "loss/zero_gradient_share", "share", "of the loss tokens, those whose log-prob got no gradient at all", LOWER
    ),
    Metric("optim/lr", "1", "learning rate, as the optimizer got it"),
    Metric("optim/grad_norm", "1", "norm of the gradient before it is clipped"),
    Metric(
        "optim/nonfinite_steps", "optimizer steps", "skipped so far, their loss or gradient not finite", LOWER, True
    ),
    Metric(
        "optim/spikes_skipped",
        "optimizer steps",
        "skipped so far for a gradient above the median's multiple",
        LOWER,
        True,
    ),
    Metric("optim/trained_parameters", "parameters", "that an optimizer changes"),
    Metric("policy/entropy", "nats", "mean entropy of the policy over the loss tokens"),
    Metric("policy/clip_fraction", "share", "of the loss tokens, those that the surrogate clips", LOWER),
    Metric("policy/clip_low", "share", "those that it clips at the lower bound", LOWER),
    Metric("policy/clip_high", "share", "those that it clips at the upper bound", LOWER),
    Metric("policy/weight_low", "share", "of the loss tokens, those whose weight is cut at the lower bound", LOWER),
    Metric("policy/weight_low_positive", "share", "those of them with an advantage above 0"),
    Metric("policy/weight_high", "share", "of the loss tokens, those whose weight is cut at the upper bound", LOWER),
    Metric("policy/weight_high_positive", "share", "those of them with an advantage above 0"),
    Metric(
        "policy/rejected_<rule>", "share", "of the loss tokens, those that a rule of `loss.reject` leaves out", LOWER
    ),
    Metric("policy/rejected_<rule>_positive", "share", "those of them with an advantage above 0"),
    Metric("kl/behavior", "nats", "KL of the behavior policy from the learner, k3", LOWER),
    Metric("kl/reference", "nats", "KL of the learner from the reference policy, k3"),
    Metric("kl/in_reward", "nats", "mean gap to the reference policy that the reward is charged for"),
    Metric("kl/of_policy", "nats", "the same, tokens weighted by learner / behavior: what `advantage.kl_target` holds"),
    Metric("kl/coef", "1", "price of that gap, adapted"),
    Metric(
        "centering/covered", "share", "probability of the recorded tokens that a centred loss is centred over", HIGHER
    ),
    Metric("centering/removed", "1", "what centring takes off a token's loss"),
    Metric("router/changed", "share", "of the experts' choices replayed, those the learner's routers would not make"),
    Metric("sat/gated", "share", "of the loss tokens, those whose step the surrogate `sat` contracts"),
    Metric("sat/contraction", "1", "by which factor, in the mean"),
    Metric("own/<name>", "1", "a number that a loss of the user's returned, mean over the loss tokens"),
    Metric("hook/<name>", "1", "a number that `learner.hook` returned, mean over the updates"),
    Metric("advantage/mean", "1", "mean advantage of the loss tokens"),
    Metric("advantage/std", "1", "their standard deviation"),
    Metric("critic/loss", "1", "loss of the critic", LOWER),
    Metric("critic/grad_norm", "1", "norm of its gradient before it is clipped"),
    Metric("critic/lr", "1", "its learning rate"),
    Metric("critic/target_mean", "1", "what it is to predict, mean over the tokens"),
    Metric("critic/target_std", "1", "standard deviation of that"),
    Metric("critic/residual_mean", "1", "mean error of its prediction before the update"),
    Metric("critic/residual_std", "1", "standard deviation of that error", LOWER),
    Metric("critic/explained_variance", "1", "1 - Var(error) / Var(target): 1 is perfect, 0 a constant", HIGHER),
    Metric("reward/mean", "reward", "mean over the episodes of the batch", HIGHER),
    Metric("reward/std", "reward", "their standard deviation"),
    Metric("reward/zero_variance_groups", "share", "of the batch's groups, those whose rewards are all alike", LOWER),
    Metric("reward/turns", "turns", "mean number of them in an episode, where turns have rewards"),
    Metric("reward/turn_mean", "reward", "mean over the turns"),
    Metric("reward/turn_std", "reward", "their standard deviation"),
    Metric("rewards/<name>", "reward", "mean of a named component of the reward"),
    Metric("completion/length_mean", "tokens", "mean number of sampled tokens in a trajectory"),
    Metric("completion/truncated", "share", "of the trajectories, those cut at their longest length", LOWER),
    Metric("completion/support_mean", "tokens", "from so many a token was drawn, under truncated sampling"),
    Metric("staleness/mean", "versions", "mean age of the tokens trained on", LOWER),
    Metric("staleness/max", "versions", "age of the oldest of them", LOWER),
    Metric("staleness/hist_<age>", "share", "of the tokens trained on, those of this age"),
    Metric("staleness/age_<age>/token_share", "share", "likewise, as the loss saw them"),
    Metric("staleness/age_<age>/clip_fraction", "share", "of the tokens of this age, those that are clipped", LOWER),
    *(
        Metric(f"staleness/age_<age>/{name}", unit, f"{meaning}, edge E, over the tokens of this age", better)
        for name, unit, meaning, better in _RATIO_MOMENTS
    ),
    *(
        Metric(f"ratio/{edge}/{name}", unit, f"{meaning}; r is {what}", better)
        for edge, what in _EDGES.items()
        for name, unit, meaning, better in (*_RATIO_MOMENTS, *_SEQUENCE_MOMENTS)
    ),
    Metric("step/groups", "groups", "in the batch"),
    Metric("step/early_groups", "groups", "of it, trained on before it was full (`learner.early_groups`)", HIGHER),
)

_TIME = (
    Metric("time/step", "s", "of one step; the other `time/*` of the row add up to it", LOWER),
    Metric("time/wait_batch", "s", "waited for the next batch: the learner is idle", LOWER),
    Metric("time/early", "s", "packed, scored, trained on the first groups before the others were there"),
    Metric("time/train", "s", "packed, scored, trained"),
    Metric("time/publish", "s", "waited until weights are copied and other ranks have come", LOWER),
    Metric("time/evaluate", "s", "told of evaluations, and at the end waited for them; of `asyncrl sft`, made them"),
    Metric("time/log", "s", "wrote the row of the step before"),
    Metric("time/checkpoint", "s", "stood still for the checkpoint after the step before", LOWER),
    Metric("idle/learner", "share", "of the step, in which the learner waited for a batch", LOWER),
    Metric(
        "idle/learner_s_<reason>", "s", "in which it could have trained and had no batch, for this reason", LOWER, True
    ),
    Metric("autotune/pipeline_depth", "steps", "`replay.pipeline_depth` in force, with `rollout.autotune`"),
    Metric("autotune/max_in_flight", "groups", "`rollout.max_in_flight` in force, with `rollout.autotune`"),
    Metric("autotune/moves", "moves", "that the server made since its start; its log has their reasons", NEITHER, True),
    Metric("idle/replay", "share", "of the time since the step before, in which the replay server waited for messages"),
    Metric("idle/rollout", "share", "of the last seconds, in which workers had nothing to make", LOWER),
    Metric("idle/rollout_s", "s", "that all workers together had nothing to make", LOWER, True),
    Metric(
        "idle/rollout_busy_s",
        "s",
        "that all workers together made something; with `idle/rollout_s`, the time that they are there",
        NEITHER,
        True,
    ),
    Metric("perf/trained_tokens_per_s", "tokens/s", "loss tokens trained on", HIGHER),
    Metric("perf/tokens_per_s", "tokens/s", "of rows, of `asyncrl sft`, prompts with them", HIGHER),
    Metric("perf/generated_tokens_per_s", "tokens/s", "sampled by all engines, over the last seconds", HIGHER),
    Metric("perf/groups_per_s", "groups/s", "trained", HIGHER),
    Metric("perf/tflops_per_rank", "TFLOP/s", "of the model's own arithmetic while it trains", HIGHER),
    Metric("perf/tokens_per_s_per_rank", "tokens/s", "packed tokens per rank, while it trains", HIGHER),
    Metric("perf/mfu", "share", "of what the GPU could compute at most", HIGHER),
    Metric("perf/padding_share", "share", "of the tokens that went through the layers, those that are padding", LOWER),
    Metric("perf/attention_padding_share", "share", "of the tokens that attention held, those that are padding", LOWER),
    Metric("perf/gather_s", "s", "in which FSDP2 gathered weights, mean over the ranks, hidden or not", LOWER),
    Metric(
        "perf/reduce_s",
        "s",
        "in which it reduced gradients to shards, and those over the copies of the model, likewise",
        LOWER,
    ),
    Metric(
        "memory/peak_gb",
        "GB",
        "the most that tensors took of a rank's GPU while it trained, of the fullest rank",
        LOWER,
    ),
    Metric("memory/planned_gb", "GB", "what the plan of memory says of the same micro-batches"),
    Metric(
        "machine/memory_free", "share", "of its memory, of the fullest machine that a process of the run is on", HIGHER
    ),
    Metric(
        "machine/clock_skew_s",
        "s",
        "by which a machine's clock differs at least from that of the replay server's, of the worst one",
        LOWER,
    ),
    Metric("checkpoint/save_s", "s", "the newest checkpoint took until it was whole", LOWER),
    Metric("checkpoint/wait_s", "s", "for which training stood still for it", LOWER),
    Metric("checkpoint/copy_wait_s", "s", "of them, waited for the copy of what is saved", LOWER),
    Metric(
        "checkpoint/<errand>",
        "checkpoints",
        "of which the copy (`copies`) or export (`exports`) is made",
        NEITHER,
        True,
    ),
    Metric("checkpoint/<errand>_failed", "checkpoints", "of which it could not be made", LOWER, True),
)

_REPLAY = (
    Metric("replay/admitted", "groups", "begun", NEITHER, True),
    Metric("replay/in_flight", "groups", "being made"),
    Metric("replay/inserted", "groups", "that wait to be trained"),
    Metric("replay/inserted_age_<age>", "groups", "of them, those begun this many versions ago (64: or more)"),
    Metric("replay/leased", "groups", "in batches that are planned"),
    Metric("replay/trained", "groups", "trained", NEITHER, True),
    Metric("replay/dropped_<reason>", "groups", "dropped for this reason", LOWER, True),
    Metric("replay/filtered_by_<filter>", "groups", "dropped by this filter of `rollout.filters`", NEITHER, True),
    Metric("replay/missing_members", "trajectories", "of groups that were closed without them", LOWER, True),
    Metric("replay/bytes", "bytes", "of payloads in the server's memory"),
    Metric("replay/workers", "workers", "connected"),
    Metric("replay/workers_other_code", "workers", "of them with other code of the user's than the learner's", LOWER),
    Metric("staleness/dropped", "groups", "dropped for their age", LOWER, True),
    Metric("staleness/masked_tokens", "tokens", "left out of a batch for their age", LOWER, True),
    Metric("waste/tokens", "tokens", "sampled and never trained for their age", LOWER, True),
    Metric("waste/tokens_by_position_q<quarter>", "tokens", "those of this quarter of their trajectory", LOWER, True),
    Metric(
        "waste/trained_length_bias",
        "1",
        "mean length of trained over inserted trajectories: below 1, long ones get lost",
    ),
    Metric("goodput/share", "share", "of the tokens whose fate is known, those that were trained on", HIGHER, True),
    Metric(
        "goodput/generated_tokens",
        "tokens",
        "sampled by all engines, evaluations too, as workers tell once a second: the last of a killed one are missing",
        NEITHER,
        True,
    ),
    Metric(
        "goodput/trained_tokens",
        "tokens",
        "of them, those that were in a batch that was trained, each once",
        HIGHER,
        True,
    ),
    Metric("goodput/lost_<fate>", "tokens", "of them, those that were not, by what became of them", LOWER, True),
    Metric(
        "data/zero_variance", "share", "of the last 512 groups that came back, those whose rewards are all alike", LOWER
    ),
    Metric("data/overlong", "prompts", "too long to be used", LOWER, True),
    Metric("data/passed_over", "prompts", "not drawn for what is known of them (`data.curriculum`)", NEITHER, True),
    Metric("data/pass_rate_measured", "share", "of the rows, those whose pass rate is known", HIGHER),
    Metric("data/pass_rate_mean", "share", "their mean pass rate"),
    Metric("data/pass_rate_below", "share", "of them, those below `data.curriculum_window`"),
    Metric("data/pass_rate_above", "share", "of them, those above it"),
    Metric("reward/failed", "completions", "that got no reward", LOWER, True),
    Metric("reward/failed_<reason>", "completions", "that got none for this reason", LOWER, True),
)

_WEIGHTS = (
    Metric("weights/bytes", "bytes", "of a version"),
    Metric("weights/wire_bytes", "bytes", "sent of it"),
    Metric("weights/wire_s", "s", "in which they were sent", LOWER),
    Metric("weights/delta_s", "s", "in which the difference to the version before was made", LOWER),
    Metric("weights/update_s", "s", "from the begin of sending until every engine serves the version", LOWER),
    Metric("weights/gather_s", "s", "in which a version was gathered", LOWER),
    Metric("weights/copy_wait_s", "s", "for which the optimizer waited for that copy", LOWER),
    Metric("weights/wait_previous_s", "s", "for which a publication waited for those before it", LOWER),
    Metric("weights/canary_s", "s", "in which the learner scored the probe of a version", LOWER),
    Metric("weights/learner_stall_s", "s", "for which a publication held up the learner", LOWER),
    Metric("weights/load_s", "s", "the slowest engine took to load a version", LOWER),
    Metric("weights/stall_s", "s", "the slowest engine stood still for it", LOWER),
    Metric("weights/canary_max", "nats", "largest gap of a log-prob of the probe, engine and learner", LOWER),
    Metric("weights/canary_mean", "nats", "mean gap", LOWER),
    Metric("weights/canary_failed", "engines", "that did not pass it", LOWER, True),
    Metric("weights/engines", "engines", "that serve the last version sent"),
    Metric("weights/resends", "versions", "sent once more", LOWER, True),
    Metric("weights/dropped", "engines", "left out of a group that was formed anew", LOWER, True),
    Metric("weights/refused", "engines", "that refused a version", LOWER, True),
    Metric("weights/epoch", "1", "number of the weight group"),
    Metric("weights/sent_version", "version", "the last one sent"),
)

_EVALUATIONS = (
    Metric("eval/<set>/accuracy", "share", "mean over the rows, where `reward.metric=accuracy`", HIGHER),
    Metric("eval/<set>/reward", "reward", "mean over the rows", HIGHER),
    Metric("eval/<set>/count", "rows", "that have a score"),
    Metric("eval/<set>/failed", "rows", "that have none", LOWER),
    Metric("eval/<set>/superseded", "evaluations", "cancelled for this one, not begun before it was due", LOWER),
    Metric("eval/<set>/version_min", "version", "the oldest that was measured"),
    Metric("eval/<set>/version_max", "version", "the newest"),
    Metric(
        "eval/<set>/<figure>@<n>",
        "share",
        "`pass`, `avg`, `best` or `maj` of n samples of each row",
        HIGHER,
    ),
    Metric("eval/<set>/<source>/mean", "reward", "of the rows of one `data_source`, where there are several", HIGHER),
    *(
        Metric(f"eval/<set>/{name}_{end}", unit, f"{which} end of the 95 % interval of {what}", HIGHER)
        for name, unit, what in (
            ("<figure>", "1", "`reward`, `accuracy` or a figure, over the rows that have it: see docs/evaluation.md"),
            ("<source>/mean", "reward", "that mean"),
        )
        for end, which in (("low", "lower"), ("high", "upper"))
    ),
    Metric("eval/<set>/loss", "nats", "per token of the answers, of `asyncrl sft`", LOWER),
    Metric("eval/<set>/perplexity", "1", "its exponential", LOWER),
    Metric("eval/<set>/token_accuracy", "share", "of the answers' tokens, those that are the likeliest", HIGHER),
    Metric("eval/<set>/tokens", "tokens", "of the answers"),
)

_OTHER = (
    Metric("histogram/reward", "episodes", "of the batch, by reward; in `histograms.jsonl`, as all `histogram/*`"),
    Metric("histogram/completion/length", "trajectories", "of the batch, by number of sampled tokens"),
    Metric("histogram/staleness", "tokens", "trained on, by age in versions"),
    Metric(
        "histogram/ratio/age_<age>",
        "tokens",
        "trained on at this age in versions (64: or more), by log of the ratio π_θ/μ in nats, at every update",
    ),
    Metric("data/rows", "rows", "in the batch, of `asyncrl sft`"),
    Metric("data/tokens", "tokens", "in it"),
    Metric("data/loss_tokens", "tokens", "in it that are trained on"),
    Metric("data/overlong_dropped", "rows", "of the batch, left out for their length", LOWER),
    Metric("data/overlong_cut", "rows", "of the batch, cut to their longest length", LOWER),
    Metric("data/epoch", "epochs", "through the rows so far", NEITHER, True),
    Metric("rerun/reward_of_data", "reward", "of a rerun's batch, which the run's own policy made"),
    Metric("rerun/reward_estimate", "reward", "the same for the policy in hand, by importance weights", HIGHER),
    Metric("rerun/ess", "share", "effective sample size of those weights: near 0 the estimate says nothing", HIGHER),
    Metric("rerun/log_ratio", "nats", "mean log(π/μ) per token: how likely the policy in hand finds the data"),
)

_ENGINE = tuple(
    Metric(f"engine/{kind}_{name}", unit, f"{meaning}, of all engines", NEITHER, True)
    for kind, steps, rows in (("decode", "decode steps", "sequences"), ("prefill", "prefills", "prompts"))
    for name, unit, meaning in (
        ("steps", "steps", steps),
        ("rows", rows, f"of these {steps}, added up"),
        ("rows_squared", f"{rows}²", f"their squares: `asyncrl plan --from` fits seconds = fixed + each × {rows}"),
        ("s", "s", f"that these {steps} took"),
        ("rows_s", f"{rows}·s", f"{rows} times seconds of each of these {steps}, added up"),
    )
)

METRICS: tuple[Metric, ...] = (*_LEARNER, *_TIME, *_ENGINE, *_REPLAY, *_WEIGHTS, *_EVALUATIONS, *_OTHER)
"""All of them. Where several patterns fit a name, the one with the fewest placeholders is meant, see `metric_of`."""


@cache
def metric_of(name: str) -> Metric | None:
    """What is registered under this name, or a pattern that fits it."""
    fitting = [metric for metric in METRICS if pattern_of(metric.name).fullmatch(name)]
    return min(fitting, key=lambda metric: (metric.name.count("<"), -len(metric.name)), default=None)


PLAIN = "plain number"


def unit_of(name: str) -> str:
    """As one writes it beside an axis; a user's own metrics have none that is known."""
    known = metric_of(name)
    return known.unit if known is not None and known.unit != "1" else PLAIN


@cache
def pattern_of(name: str) -> re.Pattern[str]:
    """A placeholder stands for some characters other than `/`; `<name>` is a user's, who may write what he likes."""
    text = re.escape(name).replace("<name>", ".+")
    return re.compile(re.sub(r"<[a-z]+>", "[^/]+", text))
