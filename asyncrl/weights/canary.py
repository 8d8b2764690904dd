"""The canary: learner and engine score the same few tokens, and must agree before a version counts as served.

    learner at v: log-probs of the probes --with v--> engine, after loading v: its log-probs --compare--> served

Fingerprints prove what arrived; only the canary proves that the engine loaded it correctly (it finds a tied head that
was not re-tied, experts packed from old weights, a tensor that the loader skipped).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightsError

Score = Callable[[Sequence[NDArray[np.int32]]], list[NDArray[np.float32]]]
"""`engines.base.Engine.score`."""
MAX_PROBES, MAX_TOKENS = 64, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest absolute difference of a log-prob that counts as rounding: maximum and mean over all probe tokens."""

    max: float
    mean: float
    share: float = 1.0
    """Fraction of the probe tokens that must be within `max`."""

    def admits(self, found: Difference) -> bool:
        """Whether `found`, returned by `compare` with `max` as its bound, is rounding."""
        return found.within >= self.share and found.mean <= self.mean


EXACT = Tolerance(max=0.0, mean=0.0)
"""Tolerance with `engine.exact`: the log-probs must be bitwise equal."""
FULL = Tolerance(max=2e-3, mean=2e-4)
HALF = Tolerance(max=0.75, mean=0.1)
ROUTED = Tolerance(max=0.75, mean=0.15, share=0.95)
"""Measured against a float32 learner on tiny Qwen2, Qwen3 and Llama models, random and trained, 4 probes of 24 tokens:

    wire       engine     max              mean               with one tensor wrong (rows shuffled, a vector halved)
    float32    float32    1e-6             1e-7 to 2e-7       max 0.02 (a small bias) to 10, mean 4e-3 to 1.7
    bfloat16   float32    0.018 to 0.058   5e-3 to 1.1e-2     the same
    bfloat16   bfloat16   0.029 to 0.15    6e-3 to 2e-2       the same

The bounds leave room for deeper models. In float32 a tensor that is one small step old is found. In bfloat16 a wrong
matrix or norm is found, and a slightly old one is not: where that matters, verify in float32.

If all logits are small, HALF would admit differences that rounding cannot explain: see `SPACINGS`.

ROUTED is HALF for a mixture of experts: where a router is nearly undecided, rounding selects another expert, and that
token's log-prob changes although no weight is wrong. It is the outer bound, see `ROUTED_NOISES`. 58 random Qwen3-MoE, 2
to 8 layers, 4 to 64 experts, bfloat16 against float32: one to four of the tokens in a hundred took other experts; max
1.44, mean 0.098, at least 97.8 % of the tokens within 0.75. With two experts of one layer exchanged: mean 0.2 to 1 for
4 or 8 experts; of 64 experts that is not found, and in float32 it always is (max above 0.1)."""


SPACING = 2.0**-7
"""Relative spacing of bfloat16 at 1."""
NOISES, ROUTED_NOISES, HEAD_SPACINGS = 3.0, 8.0, 0.5
SPACINGS = 2.0
"""Largest mean difference that counts as rounding in bfloat16: NOISES times the measured effect of rounding on this
very model (`Canary.noise`) plus HEAD_SPACINGS times bfloat16's spacing at the largest |logit|; SPACINGS such spacings
if the learner did not measure the noise. HALF's mean is the outer bound. Random Qwen3, Qwen2 and Llama, bfloat16
against a learner in float32 and one in bfloat16 with another attention, 16 probes of 24 tokens, in such spacings:

    layers, width, initial deviation    honest          bound          the last two exchanged
    2 and 6, 64, 0.02 to 0.1            0.05 to 0.37    0.6 to 0.95    5.6 to 33
    24, 64, 0.02 to 0.1                 0.18 to 0.54    0.95 to 1.4    1.2 to 2.4: all 36 found
    24, 128, 0.02 to 0.1                0.23 to 1.1     1.1 to 1.9     1.5 to 2.2: all 36 found
    48, 64, 0.02 to 0.1                 0.25 to 0.66    1.3 to 1.7     0.8 to 1.2: 0 of 36, see `serves`

With the middle two of 24 exchanged: 2.5 to 4.9. The bound fails for chaotic models: initialised with 0.2, models of 24
layers differ from themselves by up to 2.0, and the outer bound, 1.6 to 1.9 there, refuses 2 of 12.

For a mixture of experts the factor is ROUTED_NOISES, and ROUTED's mean the outer bound: a disturbed router selects
other experts too. 173 random Qwen3-MoE, 2, 8 and 24 layers, width 64, 4 to 64 experts, deviation 0.02 to 0.2, random
probes and text, learner in float32 and bfloat16: the bound refuses none of the 157 correct ones that ROUTED alone
admits. With 24 layers it finds the middle two layers exchanged in 36 of 36 (ROUTED alone: 4), two experts of the first
layer in 15 (0), of the last in none."""


def tolerance(
    *dtypes: str, routed: bool = False, largest_logit: float = math.inf, noise: float = math.inf
) -> Tolerance:
    """Tolerance from the dtypes of learner, wire and engine, whether tokens are routed to experts, and what the learner
    measured at the probes: the largest |logit| and its `Canary.noise`."""
    if set(dtypes) == {"float32"}:
        return FULL
    if routed and noise == math.inf:
        return ROUTED
    outer, noises, spacing = ROUTED if routed else HALF, ROUTED_NOISES if routed else NOISES, SPACING * largest_logit
    mean = SPACINGS * spacing if noise == math.inf else noises * noise + HEAD_SPACINGS * spacing
    return replace(outer, mean=min(outer.mean, max(FULL.mean, mean)))


NEARER, CLOSER = 5.7, 0.5
"""When an engine counts as serving a rival, see `serves`.

With right weights, at most once in a million proofs, if rounding is as often up as down at each token, independently of
other tokens: the sum of numbers x_i with random signs exceeds z times the root of the sum of x_i^2 with a probability
of at most exp(-z^2 / 2), 9e-8 for each of up to 9 rivals. That right log-probs and a rival's differ only lowers it.
Tokens are not quite independent (such sums for right engines, which should have a deviation of 1, had 1.2, and one was
5.0), so CLOSER is asked, too: a right engine would have to round in the direction of the rival, with a correlation of
0.7 over the tokens. It was 0.01 +- 0.06, and 0.22 at most, for 1,665 pairs of a right engine and exchanged layers.
`python -m benchmarks.canary` shows what is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Log-probs of the probes with weights that the engine may have instead of the right ones.

    Errors that change log-probs by less than rounding does are found so: how large the rounding is differs from model
    to model, but which way such an error changes each token's log-prob is known, and rounding is as often against it.
    """

    name: str
    logprobs: tuple[NDArray[np.float32], ...]
    """[T - 1] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Probe tokens, and the learner's log-probs of them at this version."""

    sequences: tuple[NDArray[np.int32], ...]
    """[T] each."""
    logprobs: tuple[NDArray[np.float32], ...]
    """[T - 1] each: log-probs of tokens 1.., at temperature 1."""
    learner_dtype: str
    wire_dtype: str
    routed: bool = False
    """Whether the model is a mixture of experts, see `ROUTED`."""
    largest_logit: float = math.inf
    """Largest |logit| at the positions that predict the probe tokens; infinite if the learner does not report it."""
    noise: float = math.inf
    """Mean |difference| in the learner's own log-probs caused by an error of at most half of bfloat16's spacing in all
    outputs of its layers; infinite if the learner did not measure it."""
    rivals: tuple[Rival, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """msgpack-able; read back by `from_wire`."""
        return {
            "sequences": [ids.astype("<i4").tobytes() for ids in self.sequences],
            "logprobs": [values.astype("<f4").tobytes() for values in self.logprobs],
            "dtypes": [self.learner_dtype, self.wire_dtype],
            "routed": self.routed,
            "largest_logit": self.largest_logit,
            "noise": self.noise,
            "rivals": [[each.name, [part.astype("<f4").tobytes() for part in each.logprobs]] for each in self.rivals],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Canary:
        """Raises WeightsError if the arrays do not fit each other, or exceed the limits of a canary."""
        try:
            learner_dtype, wire_dtype = map(str, wire["dtypes"])
            found = cls(
                sequences=tuple(np.frombuffer(data, "<i4").astype(np.int32) for data in wire["sequences"]),
                logprobs=_floats(wire["logprobs"]),
                learner_dtype=learner_dtype,
                wire_dtype=wire_dtype,
                routed=bool(wire["routed"]),
                largest_logit=float(wire.get("largest_logit", math.inf)),
                noise=float(wire.get("noise", math.inf)),
                rivals=tuple(Rival(name=str(name), logprobs=_floats(parts)) for name, parts in wire.get("rivals", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"a canary arrived damaged: {error!r}") from error
        probes = [len(each) for each in found.sequences]
        for logprobs in (found.logprobs, *(rival.logprobs for rival in found.rivals)):
            if not probes or probes != [len(each) + 1 for each in logprobs] or len(probes) > MAX_PROBES:
                raise WeightsError(
                    f"a canary has {len(probes)} probes and {len(logprobs)} results that do not fit them"
                )
        if max(probes) > MAX_TOKENS:
            raise WeightsError(f"a canary's probe has more than {MAX_TOKENS} tokens")
        return found

    def earlier(self, policy_version: int) -> Rival:
        """This canary, of that version, as a rival of a later one's."""
        return Rival(name=f"version {policy_version}", logprobs=self.logprobs)

    def tolerance(self, engine_dtype: str) -> Tolerance:
        dtypes = self.learner_dtype, self.wire_dtype, engine_dtype
        return tolerance(*dtypes, routed=self.routed, largest_logit=self.largest_logit, noise=self.noise)


def _floats(parts: Sequence[bytes]) -> tuple[NDArray[np.float32], ...]:
    return tuple(np.frombuffer(data, "<f4").astype(np.float32) for data in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """|engine - learner| over all probe tokens. A log-prob that is NaN differs infinitely."""

    max: float
    mean: float
    within: float
    """Fraction of the tokens whose difference is at most the given bound."""
    probe: int
    """The first probe with a difference above the given bound; if there is none, the one with the largest
    difference."""
    token: int
    """The token of that probe with the largest difference."""
    learner: float
    engine: float


def compare(canary: Canary, scored: Sequence[NDArray[np.float32]], bound: float = math.inf) -> Difference:
    """Raises WeightsError unless `scored` has one array per probe, of its length."""
    if [len(values) for values in scored] != [len(values) for values in canary.logprobs]:
        raise WeightsError(f"the engine scored {[len(v) for v in scored]} tokens of probes it was given")
    parts = [_differences(ours, theirs) for ours, theirs in zip(canary.logprobs, scored, strict=True)]
    largest = [float(part.max()) for part in parts]
    probe = next((i for i, value in enumerate(largest) if value > bound), int(np.argmax(largest)))
    token = int(np.argmax(parts[probe]))
    everything = np.concatenate(parts)
    return Difference(
        max=max(largest),
        mean=float(everything.mean()),
        within=float((everything <= bound).mean()),
        probe=probe,
        token=token + 1,
        learner=float(canary.logprobs[probe][token]),
        engine=float(scored[probe][token]),
    )


def _differences(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        apart = np.abs(theirs.astype(np.float64) - ours.astype(np.float64))
    return np.where(np.isnan(apart), math.inf, apart)


def serves(rival: Rival, canary: Canary, scored: Sequence[NDArray[np.float32]]) -> bool:
    """Whether the engine serves the rival: the sum of squares of its differences to it is at most CLOSER times that of
    its differences to the learner, and this is no matter of a few tokens: the sum over tokens of how much one square
    exceeds the other, divided by the root of the sum of squares of the same, is above NEARER."""
    right, wrong, found = (
        np.concatenate(parts).astype(np.float64) for parts in (canary.logprobs, rival.logprobs, scored)
    )
    to_learner, to_rival = (found - right) ** 2, (found - wrong) ** 2
    margin = to_learner - to_rival
    clear = margin.sum() > NEARER * np.sqrt((margin**2).sum())
    return bool(clear and to_rival.sum() <= CLOSER * to_learner.sum())


WAY_OUT = "`asyncrl verify` shows which engine loads this model correctly"
SAME_BITS = "With engine.exact=true, learner and engine must both be exact and have the same torch and transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How a worker verifies what its engine serves.

    Args:
        score: the engine's scoring function, at the version it just loaded.
        verify_every: versions between two proofs; 0 verifies only this worker's first version and after every (re)join.
    """

    score: Score
    engine_dtype: str
    verify_every: int = 0
    exact: bool = False
    """Whether the engine computes exactly as the learner does, so that no difference counts as rounding."""
    everywhere: Callable[[Sequence[NDArray[np.int32]]], list[list[NDArray[np.float32]]]] | None = None
    """For an engine of several replicas: the result of `score` from each. All must agree with the learner."""

    def prove(self, policy_version: int, canary: Canary, before: tuple[int, Canary] | None = None) -> Difference:
        """Compare with the learner, and with rivals: those of the canary, and the version proven before.

        Raises:
            WeightsError: the engine disagrees with the learner, and which probe is off first; or a rival is nearer.
        """
        allowed = EXACT if self.exact else canary.tolerance(self.engine_dtype)
        answers = self.everywhere(canary.sequences) if self.everywhere else [self.score(canary.sequences)]
        found = max((compare(canary, scored, allowed.max) for scored in answers), key=lambda each: each.max)
        if not allowed.admits(found):
            raise WeightsError(
                f"the engine does not serve version {policy_version} as the learner has it: log-probs of the canary "
                f"differ by up to {found.max:.3g} (mean {found.mean:.3g}). Allowed are {allowed.max:g} for "
                f"{allowed.share:.0%} of the tokens (here {found.within:.1%} of them) and a mean of "
                f"{allowed.mean:.3g}; {canary.learner_dtype}, wire {canary.wire_dtype}, engine {self.engine_dtype}. "
                f"Probe {found.probe}, token {found.token}: learner {found.learner:.4f}, engine {found.engine:.4f}. "
                + (SAME_BITS if self.exact else WAY_OUT)
            )
        for rival in (*canary.rivals, *self._versions(canary, before)):
            if any(serves(rival, canary, scored) for scored in answers):
                raise WeightsError(
                    f"the engine does not serve version {policy_version} as the learner has it, but {rival.name}: its "
                    f"log-probs of the canary differ less from those. {WAY_OUT}"
                )
        return found

    def _versions(self, canary: Canary, before: tuple[int, Canary] | None) -> tuple[Rival, ...]:
        """The version proven before, where learner and engine compute with the same bits. Elsewhere an engine rounds
        away small steps that the learner computes with: it is right, and nearer to the older version."""
        if before is None or {canary.learner_dtype, canary.wire_dtype, self.engine_dtype} != {"bfloat16"}:
            return ()
        version, older = before
        same = len(older.sequences) == len(canary.sequences) and all(
            map(np.array_equal, older.sequences, canary.sequences)
        )
        return (older.earlier(version),) if same else ()


def random_probes(vocabulary: int, seed: int, *, count: int = 4, length: int = 24) -> tuple[NDArray[np.int32], ...]:
    """Return probes that depend on `seed` alone: token ids drawn uniformly from the vocabulary, [length] each."""
    keys = np.random.Philox(key=[seed % 2**64, 0xCA9A]).random_raw(count * length)
    return tuple((keys % vocabulary).astype(np.int32).reshape(count, length))
