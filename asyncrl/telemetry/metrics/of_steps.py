"""Metrics of the training in a step: loss, policy, ratios, critic, rewards, lengths, ages."""

from __future__ import annotations

from asyncrl.telemetry.metrics.metric import HIGHER, LOWER, NEITHER, Metric, metrics

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
    *metrics("""
loss/total | 1 | - | loss of an optimizer step, mean over those of the batch
loss/policy | 1 | - | part of the loss that comes from the surrogate
loss/kl | 1 | - | part of the loss that comes from the KL to the reference policy
loss/behavior_kl | 1 | - | part of the loss that comes from `loss.behavior_kl`, the pull towards the data
loss/entropy | 1 | - | part of the loss that comes from the entropy bonus, at most 0
loss/zero_gradient_share | share | lower | share of loss tokens whose log-prob got no gradient (advantage 0, clipped or
    rejected)
optim/lr | 1 | - | learning rate of the policy in this step
optim/grad_norm | 1 | - | L2 norm of the policy's gradient before clipping
optim/nonfinite_steps | optimizer steps | lower, total | optimizer steps skipped because loss or gradient was not finite
optim/spikes_skipped | optimizer steps | lower, total | optimizer steps skipped for a gradient that was too long
    (`learner.skip_spikes`)
optim/trained_parameters | parameters | - | parameters that the optimizer changes: all, or the adapters
policy/entropy | nats | - | mean entropy of the policy at the loss tokens
policy/clip_fraction | share | lower | share of loss tokens that the surrogate clips
policy/clip_low | share | lower | share of loss tokens that the surrogate clips at its lower bound
policy/clip_high | share | lower | share of loss tokens that the surrogate clips at its upper bound
policy/weight_low | share | lower | share of loss tokens whose behavior weight is below `loss.weight_low`
policy/weight_low_positive | share | - | share of loss tokens whose behavior weight is below `loss.weight_low` and whose
    advantage is positive
policy/weight_high | share | lower | share of loss tokens whose behavior weight is above `loss.weight_high`
policy/weight_high_positive | share | - | share of loss tokens whose behavior weight is above `loss.weight_high` and
    whose advantage is positive
policy/rejected_<rule> | share | lower | share of loss tokens that this rule rejects (`loss.reject`, `veto`, `max_age`,
    `opsm_delta`, `m2_tau`)
policy/rejected_<rule>_positive | share | - | share of loss tokens that this rule rejects and whose advantage is
    positive
kl/behavior | nats | lower | KL between the behavior policy and the learner, mean per token (k3): how far the policy is
    from its data
kl/reference | nats | - | KL between the learner and the reference policy, mean per token (k3)
kl/in_reward | nats | - | mean log(learner / reference) that is charged in the reward (`advantage.kl_coef`)
kl/of_policy | nats | - | the same, tokens weighted by learner / behavior: what `advantage.kl_target` holds
kl/coef | 1 | - | coefficient of the KL in the reward, as the controller set it (`advantage.kl_target`)
centering/covered | share | higher | probability of the tokens recorded for score centering; if it falls, raise
    `engine.record_topk`
centering/removed | 1 | - | mean size per token of what score centering takes out of the gradient
router/changed | share | - | share of replayed choices of experts that the learner's own routers would not make
sat/gated | share | - | share of loss tokens whose clip range `loss.sat_quantile` narrows
sat/contraction | 1 | - | mean factor by which clip ranges are narrowed; 1 where none is
custom/<name> | 1 | - | a number that your loss returned, mean over the loss tokens
hook/<name> | 1 | - | a number that your `learner.hook` returned, mean over the updates
advantage/mean | 1 | - | mean advantage of the loss tokens
advantage/std | 1 | - | standard deviation of the advantages of the loss tokens
critic/loss | 1 | lower | loss of the critic
critic/grad_norm | 1 | - | L2 norm of the critic's gradient before clipping
critic/lr | 1 | - | learning rate of the critic in this step
critic/target_mean | 1 | - | mean of what the critic should predict
critic/target_std | 1 | - | standard deviation of what the critic should predict
critic/residual_mean | 1 | - | mean error of the critic's prediction before the update
critic/residual_std | 1 | lower | standard deviation of the critic's error before the update
critic/explained_variance | 1 | higher | 1 - Var(error) / Var(target) of the critic: 1 is perfect, 0 no better than a
    constant
reward/mean | reward | higher | mean reward of the batch's episodes
reward/std | reward | - | standard deviation of the rewards of the batch's episodes
reward/zero_variance_groups | share | lower | share of the batch's groups whose rewards are all equal, so that most
    losses learn nothing from them
reward/turns | turns | - | mean number of turns in an episode, where turns have rewards
reward/turn_mean | reward | - | mean reward of a turn, where turns have rewards
reward/turn_std | reward | - | standard deviation of the rewards of turns
rewards/<name> | reward | - | mean of a named part of the reward, unweighted
completion/length_mean | tokens | - | mean number of sampled tokens in a trajectory
completion/truncated | share | lower | share of trajectories that were cut at their length limit
completion/support_mean | tokens | - | mean number of tokens that a token was drawn from, under truncated sampling
staleness/mean | versions | lower | mean age of the tokens that were trained on
staleness/max | versions | lower | age of the oldest token that was trained on
staleness/hist_<age> | share | - | share of this age (in versions) among the tokens that were trained on
staleness/age_<age>/token_share | share | - | share of this age (64: or more) among the tokens in the loss, over all
    updates of the step
staleness/age_<age>/clip_fraction | share | lower | share of the tokens of this age that the surrogate clips
"""),
    *(
        Metric(f"staleness/age_<age>/{name}", unit, f"{meaning}, over the tokens of this age; {_EDGES['E']}", better)
        for name, unit, meaning, better in _RATIO_MOMENTS
    ),
    *(
        Metric(f"ratio/{edge}/{name}", unit, f"{meaning}; {what}", better)
        for edge, what in _EDGES.items()
        for name, unit, meaning, better in (*_RATIO_MOMENTS, *_SEQUENCE_MOMENTS)
    ),
    *metrics("""
step/groups | groups | - | groups in the batch
"""),
)
