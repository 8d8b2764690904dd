"""Settings of the advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    estimator: str = "group"
    """How advantages are computed: `group` (against the siblings), `gdpo` (each of `components` against the siblings'),
    `turns` or `turns_by_number` (each turn against all turns, or those of the same number), `reinforce_pp` (whitened
    returns), `own` (`function`); with a critic `gae`, `vtrace`, `retrace`, or `vtrace_turns` and `retrace_turns`, which
    cut traces once per turn."""
    function: str = ""
    """With `advantage=custom`: your function, `file.py:name` or `package.module:name`. It takes
    `asyncrl.advantages.AdvantageInputs` (a whole step) and returns a number per trajectory or token; see
    docs/custom_losses.md."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `function`: `advantage.args.NAME=VALUE`. A class is instantiated with them."""
    baseline: str = "mean"
    """What is subtracted from a reward: the `mean` of its group, `loo` (mean of the other members), `opo` (mean
    weighted by length), `greedy` (reward of an extra greedy completion, which is not trained on), or `none`."""
    std: str = "none"
    """Divide advantages by the standard deviation of the `group` or of the `batch`, or by `none`. Estimators per token
    take `batch` to whiten all loss tokens of a step (mean 0)."""
    gamma: float = 1.0
    """Discount per sampled token; with `turns` and `turns_by_number` per turn. 1: none."""
    lam: float = 0.95
    """Decay of the trace of `gae`, `vtrace` and `retrace`: 1 follows the returns, 0 the critic."""
    lam_alpha: float = 0.0
    """Above 0: `gae` and `retrace` use a lambda of 1 - 1/(lam_alpha * length) for each sequence (VAPO: 0.05), and `lam`
    only for the critic's targets. 0: `lam` for both."""
    c_bar: float = 1.0
    """Cap of the ratio in the traces of `vtrace` and `retrace`. Above 1, credit travels further back."""
    components: dict[str, float] = field(default_factory=dict)
    """With `gdpo`: named parts of the reward, each with its weight: `advantage.components.correct=1`. With `own`: the
    parts that its function needs; their numbers do nothing."""
    kl_coef: float = 0.0
    """Coefficient of log(learner / reference), which is subtracted from the reward of each token. 0: no KL in the
    reward."""
    kl_target: float = 0.0
    """Above 0: `kl_coef` is adjusted during the run to hold this KL, in nats per token. 0: `kl_coef` stays as it is."""
    kl_horizon: float = 10000.0
    """With `kl_target`: sequences over which a KL that is 20 % off changes `kl_coef` by 20 %. Smaller adjusts
    faster."""

    @property
    def uses_critic(self) -> bool:
        return self.estimator == "gae" or self.uses_ratio

    @property
    def uses_ratio(self) -> bool:
        """Whether the ratio learner/behavior cuts the traces."""
        return self.estimator.startswith(("vtrace", "retrace"))

    @property
    def by_turn(self) -> bool:
        """Whether traces are cut once per turn, by the ratio of the whole turn."""
        return self.estimator.endswith("_turns")

    @property
    def credits_turns(self) -> bool:
        """Whether each turn has an advantage of its own, from its own reward and those of later turns."""
        return self.estimator in ("turns", "turns_by_number")

    @property
    def needs_siblings(self) -> bool:
        """Whether a trajectory that is alone in its group always has an advantage of 0."""
        return not self.uses_critic and (self.baseline not in ("none", "greedy") or self.std == "group")
