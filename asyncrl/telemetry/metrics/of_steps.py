"""Metrics of the training in a step: loss, policy, ratios, critic, rewards, lengths, ages."""

from __future__ import annotations

from asyncrl.telemetry.metrics.metric import HIGHER, LOWER, NEITHER, Metric

_RATIO_MOMENTS = (
    ("mean", "1", "mean r", NEITHER),
    ("max", "1", "largest r", LOWER),
    ("abs_error", "1", "mean of |r - 1|", LOWER),
    ("rms_log_ratio", "nats", "root mean square of log r", LOWER),
    ("kl_k1", "nats", "mean of -log r, an estimate of the KL", LOWER),
    ("kl_k3", "nats", "mean of r - 1 - log r, an estimate of the KL that is never negative", LOWER),
    ("chi2_token", "1", "mean of r², less 1", LOWER),
    ("ess_token", "share", "effective sample size of the tokens, (mean r)² / mean r²", HIGHER),
)
_SEQUENCE_MOMENTS = (
    ("seq_mean", "1", "mean over the sequences of the product of their tokens' r", NEITHER),
    ("chi2_seq", "1", "mean square of the product of a sequence's r, less 1", LOWER),
    ("ess_seq", "share", "effective sample size of the sequences, by the product of their tokens' r", HIGHER),
    ("log_ppl_gap", "nats", "mean over the sequences of -log r per token", LOWER),
)
_EDGES = {
    "E": "r = learner / behavior policy, π_θ/μ",
    "B": "r = proximal / behavior policy, π_prox/μ",
    "U": "r = learner / proximal policy, π_θ/π_prox",
}

OF_STEPS = (
    Metric("loss/total", "1", "loss of an optimizer step, mean over those of the batch"),
    Metric("loss/policy", "1", "part of the loss that comes from the surrogate"),
    Metric("loss/kl", "1", "part of the loss that comes from the KL to the reference policy"),
    Metric("loss/behavior_kl", "1", "part of the loss that comes from `loss.behavior_kl`, the pull towards the data"),
    Metric("loss/entropy", "1", "part of the loss that comes from the entropy bonus, at most 0"),
    Metric(
        "loss/zero_gradient_share",
        "share",
        "share of loss tokens whose log-prob got no gradient (advantage 0, clipped or rejected)",
        LOWER,
    ),
    Metric("optim/lr", "1", "learning rate of the policy in this step"),
    Metric("optim/grad_norm", "1", "L2 norm of the policy's gradient before clipping"),
    Metric(
        "optim/nonfinite_steps",
        "optimizer steps",
        "optimizer steps skipped because loss or gradient was not finite",
        LOWER,
        True,
    ),
    Metric(
        "optim/spikes_skipped",
        "optimizer steps",
        "optimizer steps skipped for a gradient that was too long (`learner.skip_spikes`)",
        LOWER,
        True,
    ),
    Metric("optim/trained_parameters", "parameters", "parameters that the optimizer changes: all, or the adapters"),
    Metric("policy/entropy", "nats", "mean entropy of the policy at the loss tokens"),
    Metric("policy/clip_fraction", "share", "share of loss tokens that the surrogate clips", LOWER),
    Metric("policy/clip_low", "share", "share of loss tokens that the surrogate clips at its lower bound", LOWER),
    Metric("policy/clip_high", "share", "share of loss tokens that the surrogate clips at its upper bound", LOWER),
    Metric(
        "policy/weight_low", "share", "share of loss tokens whose behavior weight is below `loss.weight_low`", LOWER
    ),
    Metric(
        "policy/weight_low_positive",
        "share",
        "share of loss tokens whose behavior weight is below `loss.weight_low` and whose advantage is positive",
    ),
    Metric(
        "policy/weight_high", "share", "share of loss tokens whose behavior weight is above `loss.weight_high`", LOWER
    ),
    Metric(
        "policy/weight_high_positive",
        "share",
        "share of loss tokens whose behavior weight is above `loss.weight_high` and whose advantage is positive",
    ),
    Metric(
        "policy/rejected_<rule>",
        "share",
        "share of loss tokens that this rule rejects (`loss.reject`, `veto`, `max_age`, `opsm_delta`, `m2_tau`)",
        LOWER,
    ),
    Metric(
        "policy/rejected_<rule>_positive",
        "share",
        "share of loss tokens that this rule rejects and whose advantage is positive",
    ),
    Metric(
        "kl/behavior",
        "nats",
        "KL between the behavior policy and the learner, mean per token (k3): how far the policy is from its data",
        LOWER,
    ),
    Metric("kl/reference", "nats", "KL between the learner and the reference policy, mean per token (k3)"),
    Metric("kl/in_reward", "nats", "mean log(learner / reference) that is charged in the reward (`advantage.kl_coef`)"),
    Metric("kl/of_policy", "nats", "the same, tokens weighted by learner / behavior: what `advantage.kl_target` holds"),
    Metric("kl/coef", "1", "coefficient of the KL in the reward, as the controller set it (`advantage.kl_target`)"),
    Metric(
        "centering/covered",
        "share",
        "probability of the tokens recorded for score centering; if it falls, raise `engine.record_topk`",
        HIGHER,
    ),
    Metric("centering/removed", "1", "mean size per token of what score centering takes out of the gradient"),
    Metric(
        "router/changed",
        "share",
        "share of replayed choices of experts that the learner's own routers would not make",
    ),
    Metric("sat/gated", "share", "share of loss tokens whose clip range `loss.sat_quantile` narrows"),
    Metric("sat/contraction", "1", "mean factor by which clip ranges are narrowed; 1 where none is"),
    Metric("own/<name>", "1", "a number that your loss returned, mean over the loss tokens"),
    Metric("hook/<name>", "1", "a number that your `learner.hook` returned, mean over the updates"),
    Metric("advantage/mean", "1", "mean advantage of the loss tokens"),
    Metric("advantage/std", "1", "standard deviation of the advantages of the loss tokens"),
    Metric("critic/loss", "1", "loss of the critic", LOWER),
    Metric("critic/grad_norm", "1", "L2 norm of the critic's gradient before clipping"),
    Metric("critic/lr", "1", "learning rate of the critic in this step"),
    Metric("critic/target_mean", "1", "mean of what the critic should predict"),
    Metric("critic/target_std", "1", "standard deviation of what the critic should predict"),
    Metric("critic/residual_mean", "1", "mean error of the critic's prediction before the update"),
    Metric("critic/residual_std", "1", "standard deviation of the critic's error before the update", LOWER),
    Metric(
        "critic/explained_variance",
        "1",
        "1 - Var(error) / Var(target) of the critic: 1 is perfect, 0 no better than a constant",
        HIGHER,
    ),
    Metric("reward/mean", "reward", "mean reward of the batch's episodes", HIGHER),
    Metric("reward/std", "reward", "standard deviation of the rewards of the batch's episodes"),
    Metric(
        "reward/zero_variance_groups",
        "share",
        "share of the batch's groups whose rewards are all equal, so that most losses learn nothing from them",
        LOWER,
    ),
    Metric("reward/turns", "turns", "mean number of turns in an episode, where turns have rewards"),
    Metric("reward/turn_mean", "reward", "mean reward of a turn, where turns have rewards"),
    Metric("reward/turn_std", "reward", "standard deviation of the rewards of turns"),
    Metric("rewards/<name>", "reward", "mean of a named part of the reward, unweighted"),
    Metric("completion/length_mean", "tokens", "mean number of sampled tokens in a trajectory"),
    Metric("completion/truncated", "share", "share of trajectories that were cut at their length limit", LOWER),
    Metric(
        "completion/support_mean",
        "tokens",
        "mean number of tokens that a token was drawn from, under truncated sampling",
    ),
    Metric("staleness/mean", "versions", "mean age of the tokens that were trained on", LOWER),
    Metric("staleness/max", "versions", "age of the oldest token that was trained on", LOWER),
    Metric("staleness/hist_<age>", "share", "share of this age (in versions) among the tokens that were trained on"),
    Metric(
        "staleness/age_<age>/token_share",
        "share",
        "share of this age (64: or more) among the tokens in the loss, over all updates of the step",
    ),
    Metric(
        "staleness/age_<age>/clip_fraction", "share", "share of the tokens of this age that the surrogate clips", LOWER
    ),
    *(
        Metric(f"staleness/age_<age>/{name}", unit, f"{meaning}, over the tokens of this age; {_EDGES['E']}", better)
        for name, unit, meaning, better in _RATIO_MOMENTS
    ),
    *(
        Metric(f"ratio/{edge}/{name}", unit, f"{meaning}; {what}", better)
        for edge, what in _EDGES.items()
        for name, unit, meaning, better in (*_RATIO_MOMENTS, *_SEQUENCE_MOMENTS)
    ),
    Metric("step/groups", "groups", "groups in the batch"),
    Metric(
        "step/early_groups",
        "groups",
        "groups of the batch that were trained on before it was full (`learner.early_groups`)",
        HIGHER,
    ),
)
