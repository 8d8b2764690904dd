"""Rules for staleness, store and addresses: combinations that would deadlock, lose data or open a port."""

from __future__ import annotations

import math

from asyncrl.checks.addresses import host_of, is_everywhere, is_loopback, tcp
from asyncrl.checks.problem import Problems
from asyncrl.checks.rewards import reward_terms
from asyncrl.schema import Config

BYTES_PER_TOKEN = 13
"""Bytes per token of a stored trajectory: token id 4, loss mask 1, behavior log-prob 4, policy version 4."""

SIBLING_BASELINES = ("mean", "loo", "opo")
"""Baselines with which equal rewards give advantages of 0."""


def depth_within_bound(config: Config) -> Problems:
    depth, bound = config.replay.pipeline_depth, config.replay.max_staleness
    if not 0 <= depth <= max(bound, 0):
        yield (
            f"replay.pipeline_depth must be between 0 and replay.max_staleness={bound}; got {depth}. Groups admitted "
            "further ahead are over-age before they are trained. Set "
            f"replay.pipeline_depth={max(0, min(depth, bound))}, or raise replay.max_staleness"
        )


def filters_leave_something(config: Config) -> Problems:
    part = config.rollout.zero_variance_of
    if not config.rollout.drop_zero_variance:
        if part:
            yield (
                f"rollout.zero_variance_of={part} says what rollout.drop_zero_variance compares, which is false. Set "
                "it to true, or leave zero_variance_of out"
            )
        return
    names = [term.name for term in reward_terms(config.reward) if term.name]
    if part and names and part.partition("/")[0] not in names:
        yield (
            f"rollout.zero_variance_of={part} is no part of the reward, whose functions are {', '.join(names)}. Name "
            "one of them, or one of its parts: NAME/PART"
        )
    given = config.advantage
    if given.estimator not in ("group", "reinforce_pp") or given.baseline not in SIBLING_BASELINES:
        yield (
            "rollout.drop_zero_variance=true drops groups of equal rewards because they teach nothing. With "
            f"advantage.estimator={given.estimator} and advantage.baseline={given.baseline} they do teach something: "
            "rewards are not only compared within the group. Leave it out, or use advantage=grpo, rloo, opo or "
            "reinforce_pp_baseline"
        )
    elif config.rollout.group_size == 1:
        yield (
            "rollout.drop_zero_variance=true drops every group of size one, whose rewards have no spread. Set "
            "rollout.group_size to 2 or more, or leave the filter out"
        )


def small_groups_teach_something(config: Config) -> Problems:
    rollout, advantage = config.rollout, config.advantage
    if rollout.min_group_size > rollout.group_size:
        yield (
            f"rollout.min_group_size must be at most rollout.group_size={rollout.group_size}; got "
            f"{rollout.min_group_size}. 0 requires all members"
        )
    if rollout.min_group_size == 1 < rollout.group_size and advantage.needs_siblings:
        yield (
            "rollout.min_group_size=1 would train groups of one trajectory, whose advantage relative to the group "
            f"(advantage.baseline={advantage.baseline}, advantage.std={advantage.std}) is always 0. Set "
            "rollout.min_group_size=2 or more"
        )


def order_can_be_kept(config: Config) -> Problems:
    replay = config.replay
    if replay.stale_policy == "wait" and (replay.order != "fifo" or replay.max_times_sampled > 1):
        yield (
            "replay.stale_policy=wait trains the most urgent group first, and each group once, so it does not work "
            f"with replay.order={replay.order} and replay.max_times_sampled={replay.max_times_sampled}. Leave those "
            "out, or set replay.stale_policy=mask or drop"
        )
    if replay.window and (replay.stale_policy == "wait" or replay.max_times_sampled > 1):
        yield (
            f"replay.window={replay.window} trains each group once, roughly in the order of admission, so it does not "
            f"work with replay.stale_policy={replay.stale_policy} and "
            f"replay.max_times_sampled={replay.max_times_sampled}. Leave the window out, or use "
            "replay.stale_policy=mask and replay.max_times_sampled=1"
        )
    widest = (replay.max_staleness - replay.pipeline_depth) * config.learner.groups_per_step + 1
    if replay.window > widest >= 1:
        yield (
            "replay.window must be at most (replay.max_staleness - replay.pipeline_depth) * learner.groups_per_step + "
            f"1 = {widest}; got {replay.window}. Otherwise a group that {replay.window - 1} others pass gets over-age. "
            f"Set replay.window={widest}, or raise replay.max_staleness"
        )
    if replay.max_times_sampled > 1 and replay.max_staleness == 0:
        yield (
            f"replay.max_times_sampled={replay.max_times_sampled} does nothing with replay.max_staleness=0, where "
            "every token is over-age after one step. Raise replay.max_staleness"
        )


def samples_need_no_group(config: Config) -> Problems:
    """With `replay.admission=sample`, only the learner has whole groups."""
    if config.replay.admission != "sample":
        return
    replay, rollout = config.replay, config.rollout
    wants_groups = {
        f"replay.window={replay.window}": replay.window > 0,
        f"replay.max_times_sampled={replay.max_times_sampled}": replay.max_times_sampled > 1,
        f"data.curriculum={config.data.curriculum}": bool(config.data.curriculum),
        f"advantage.baseline={config.advantage.baseline}": config.advantage.baseline == "greedy",
        "rollout.drop_zero_variance=true": rollout.drop_zero_variance,
        f"rollout.drop_truncated={rollout.drop_truncated}": rollout.drop_truncated != "never",
        f"rollout.filters={rollout.filters}": bool(rollout.filters),
    }
    found = [setting for setting, asked in wants_groups.items() if asked]
    if found:
        yield (
            "replay.admission=sample assigns, stores and filters the members of a group separately, and whole groups "
            f"are needed for {', '.join(found)}. Leave that out, or use replay.admission=group"
        )


def bytes_per_token(config: Config) -> int:
    return BYTES_PER_TOKEN + (4 if config.reference.from_rollout else 0)


def store_bytes_needed(config: Config) -> int:
    """Return the maximum bytes of tokens in the replay store: the batch in training, one sealed ahead, and the lead."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    sequences = config.learner.groups_per_step * config.rollout.group_size
    return (config.replay.pipeline_depth + 2) * sequences * longest * bytes_per_token(config)


def store_holds_a_batch(config: Config) -> Problems:
    need, each = store_bytes_needed(config), bytes_per_token(config)
    if config.replay.max_bytes < need:
        yield (
            f"replay.max_bytes={config.replay.max_bytes} is too small and would deadlock: workers wait for bytes to be "
            "freed while the learner waits for a batch that does not fit. (replay.pipeline_depth + 2) * "
            "learner.groups_per_step * rollout.group_size * longest sequence * "
            f"{each} bytes = {need}. Set replay.max_bytes={need} or more"
        )


def silence_outlasts_heartbeats(config: Config) -> Problems:
    beat, timeout = config.replay.heartbeat_s, config.replay.heartbeat_timeout_s
    if not 3 * beat <= timeout < math.inf:
        yield (
            f"replay.heartbeat_timeout_s must be at least 3 * replay.heartbeat_s={beat}, or a healthy worker is given "
            f"up after one late heartbeat; got {timeout}. Set replay.heartbeat_timeout_s={3 * beat:g} or more"
        )


def address_is_safe(config: Config) -> Problems:
    address = config.replay.address
    if not (address.startswith("ipc://") and len(address) > len("ipc://")):
        yield from _network_address(config, address)


def serves_weights(config: Config) -> bool:
    """Return whether the learner listens for workers that fetch weights."""
    weights = config.weights
    return weights.transport == "broadcast"


def weights_are_served_on_one_network(config: Config) -> Problems:
    host = config.weights.host
    if serves_weights(config) and is_everywhere(host):
        yield (
            f"weights.host={host!r} would serve the weights on every network this machine is on. Name one "
            "address of the learner: weights.host=10.0.0.6"
        )


def _network_address(config: Config, address: str) -> Problems:
    host = host_of(address)
    if host and not 0 < int(address.rpartition(":")[2]) < 65536:
        yield f"replay.address={address} has no port between 1 and 65535. Example: {tcp(host, 5577)}"
    if not host:
        yield f"replay.address must be tcp://HOST:PORT or ipc://PATH; got {address!r}. Example: tcp://127.0.0.1:5577"
    elif is_everywhere(host):
        yield (
            f"replay.address={address} would listen on every network this machine is on. Name one address of it: "
            "tcp://10.0.0.5:5577"
        )
    elif not is_loopback(host):
        if not config.replay.keys:
            yield (
                f"replay.address={address} can be reached from other machines, so replay.keys is required: "
                "make keys with `asyncrl keys DIR` and set replay.keys=DIR. On one machine use tcp://127.0.0.1:5577"
            )
        invites = serves_weights(config) and not config.weights.fetch_url
        if invites and is_loopback(config.weights.host):
            yield (
                f"weights.host={config.weights.host} is a loopback address, but replay.address={address} lets workers "
                "connect from other machines. Set weights.host to an address of the learner that they can reach"
            )


RULES = (
    depth_within_bound,
    filters_leave_something,
    small_groups_teach_something,
    order_can_be_kept,
    samples_need_no_group,
    store_holds_a_batch,
    silence_outlasts_heartbeats,
    address_is_safe,
    weights_are_served_on_one_network,
)
