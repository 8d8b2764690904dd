"""Checks that a trajectory has what the learner's settings require: named reward components, reference log-probs.

Checked on the worker, where the attempt can still fail. At the learner, a missing part could only end the run, or count
as a 0 that changes its siblings' baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from asyncrl.environments.base import Episodes
from asyncrl.errors import EpisodeError, RewardError
from asyncrl.recorded import reference_fault, routing_fault, support_fault, topk_fault
from asyncrl.schema import AdvantageConfig
from asyncrl.types import GREEDY_REWARD, SamplingParams, Trajectory, turns_in


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """What every trajectory must have in addition to its reward."""

    required: tuple[str, ...] = ()
    """Reward components required of the reward function."""
    compared: str = ""
    """The part that `rollout.drop_zero_variance` compares, by name; empty for none."""
    greedy: SamplingParams | None = None
    """Sampling of the one completion per attempt whose reward is the baseline (ReMax); None for no such baseline."""
    reference: bool = False
    """Whether the environment attaches the reference's log-probs (`reference.path=rollout`)."""
    turns: bool = False
    """Whether rewards per turn are needed; if none are given the last turn has the whole reward."""
    support: bool = False
    """Whether sampling is truncated: the engine then records the set that each token was sampled from."""

    topk: bool = False
    """Whether the engine records the most likely tokens of each step (`engine.record_topk`)."""
    routing: bool = False
    """Whether the engine records the experts of each token (`learner.router_replay`)."""

    @classmethod
    def of(
        cls, config: AdvantageConfig, sampling: SamplingParams, *, reference: bool = False, compared: str = ""
    ) -> RewardParts:
        """Args: compared: `rollout.zero_variance_of`, which every reward must have; empty for none."""
        greedy = replace(sampling, temperature=0.0) if config.baseline == "greedy" else None
        return cls(
            required=tuple(config.components),
            compared=compared,
            greedy=greedy,
            reference=reference,
            turns=config.credits_turns,
            support=sampling.truncated,
            topk=sampling.record_topk > 0,
            routing=sampling.record_routing,
        )

    def _asked(self) -> list[tuple[Callable[[Trajectory], str], str]]:
        """For each requirement, a function that returns what is wrong with a trajectory, and who must provide it."""
        known = (
            (
                self.reference,
                reference_fault,
                "reference.path=rollout needs it from every environment. Set reference.path=MODEL for a reference "
                "that the learner loads",
            ),
            (
                self.support,
                support_fault,
                "With rollout.top_p, top_k or min_p every trajectory needs it. Transcript adds it; an environment "
                "that makes trajectories by itself joins Completion.recorded of the turns",
            ),
            (
                self.topk,
                topk_fault,
                "With engine.record_topk every trajectory needs them. Transcript adds them; an environment that makes "
                "trajectories by itself joins Completion.recorded of the turns",
            ),
            (
                self.routing,
                routing_fault,
                "With learner.router_replay=true every trajectory needs them. Transcript adds them if each turn is "
                "generated from all that the trajectory has so far",
            ),
        )
        return [(fault_of, why) for is_asked, fault_of, why in known if is_asked]

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Check that the trajectories have what the learner needs.

        Raises:
            RewardError: the reward function omitted a component, or returned one with the name of the baseline.
            EpisodeError: the environment did not attach the reference's log-probs, or the engine's records.
        """
        asked = self._asked()
        for place, trajectory in enumerate(trajectories):
            for fault_of, why in asked:
                if fault := fault_of(trajectory):
                    raise EpisodeError(f"trajectory {place}: {fault}. {why}")
            lacking = [name for name in self.required if name not in trajectory.rewards]
            setting = "advantage.components"
            if not lacking and self.compared and self.compared not in trajectory.rewards:
                lacking, setting = [self.compared], "rollout.zero_variance_of"
            if lacking:
                raise RewardError(
                    f"the reward function did not return {', '.join(lacking)}, which {setting} names (it returned: "
                    f"score, {', '.join(trajectory.rewards)}). Return every component each time",
                    "no_number",
                )
            if self.greedy is not None and GREEDY_REWARD in trajectory.rewards:
                raise RewardError(
                    f"the reward function returned {GREEDY_REWARD!r}, a name reserved for the baseline. Rename it"
                )

    def complete(self, trajectories: Sequence[Trajectory], greedy: Episodes | None) -> tuple[Trajectory, ...]:
        """Add rewards of turns, and the greedy completion's reward, to trajectories that `check` has passed."""
        if self.turns:
            trajectories = [_with_turns(trajectory) for trajectory in trajectories]
        if greedy is None:
            return tuple(trajectories)
        baseline = {GREEDY_REWARD: greedy.trajectories[0].reward}
        return tuple(replace(trajectory, rewards=trajectory.rewards | baseline) for trajectory in trajectories)


def _with_turns(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, turn_rewards=trajectory.turn_rewards or (0.0,) * turns_in(trajectory.loss_mask))
