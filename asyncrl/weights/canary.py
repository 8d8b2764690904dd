"""The canary: learner and engine score the same few tokens, and must agree before a version counts as served.

    learner at v: log-probs of the probes --with v--> engine, after loading v: its log-probs --compare--> served

Fingerprints prove what arrived; only the canary proves that the engine loaded it correctly (it finds a tied head that
was not re-tied, experts packed from old weights, a tensor that the loader skipped).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightsError

log = logging.getLogger(__name__)

Score = Callable[[Sequence[NDArray[np.int32]]], list[NDArray[np.float32]]]
"""`engines.base.Engine.score`."""
MAX_PROBES, MAX_TOKENS = 128, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest absolute differences of log-probs that count as rounding."""

    max: float
    """Of `share` of the probe tokens."""
    mean: float
    """Mean over all probe tokens."""
    share: float = 1.0
    outer: float = math.inf
    """Of every probe token."""

    def admits(self, found: Difference) -> bool:
        """Whether `found`, returned by `compare` with `max` as its bound, is rounding."""
        return found.within >= self.share and found.mean <= self.mean and found.max <= self.outer


FULL = Tolerance(max=2e-3, mean=2e-4)
HALF = Tolerance(max=0.75, mean=0.1, share=0.99, outer=3.0)
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
"""When an engine counts as serving a decoy, see `serves`.

With right weights, at most once in a million proofs, if rounding is as often up as down at each token, independently of
other tokens: the sum of numbers x_i with random signs exceeds z times the root of the sum of x_i^2 with a probability
of at most exp(-z^2 / 2), 9e-8 for each of up to 9 decoys. That right log-probs and a decoy's differ only lowers it.
Tokens are not quite independent (such sums for right engines, which should have a deviation of 1, had 1.2, and one was
5.0), so CLOSER is asked, too: a right engine would have to round in the direction of the decoy, with a correlation of
0.7 over the tokens. It was 0.01 +- 0.06, and 0.22 at most, for 1,665 pairs of a right engine and exchanged layers.
`python -m benchmarks.canary` shows what is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoy:
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
    """[T] each: two sets of probes, one after the other."""
    logprobs: tuple[NDArray[np.float32], ...]
    """[T - 1] each: log-probs of tokens 1.., at temperature 1."""
    learner_dtype: str
    wire_dtype: str
    first: int = 0
    """Number of sequences in the first set; 0: there is only one set."""
    routed: bool = False
    """Whether the model is a mixture of experts, see `ROUTED`."""
    largest_logit: float = math.inf
    """Largest |logit| at the positions that predict the probe tokens; infinite if the learner does not report it."""
    noise: float = math.inf
    """Mean |difference| in the learner's own log-probs caused by an error of at most half of bfloat16's spacing in all
    outputs of its layers; infinite if the learner did not measure it."""
    decoys: tuple[Decoy, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """msgpack-able; read back by `from_wire`."""
        return {
            "sequences": [ids.astype("<i4").tobytes() for ids in self.sequences],
            "logprobs": [values.astype("<f4").tobytes() for values in self.logprobs],
            "dtypes": [self.learner_dtype, self.wire_dtype],
            "first": self.first,
            "routed": self.routed,
            "largest_logit": self.largest_logit,
            "noise": self.noise,
            "decoys": [[each.name, [part.astype("<f4").tobytes() for part in each.logprobs]] for each in self.decoys],
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
                first=int(wire["first"]),
                routed=bool(wire["routed"]),
                largest_logit=float(wire.get("largest_logit", math.inf)),
                noise=float(wire.get("noise", math.inf)),
                decoys=tuple(Decoy(name=str(name), logprobs=_floats(parts)) for name, parts in wire.get("decoys", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"a canary arrived damaged: {error!r}") from error
        probes = [len(each) for each in found.sequences]
        for logprobs in (found.logprobs, *(decoy.logprobs for decoy in found.decoys)):
            if not probes or probes != [len(each) + 1 for each in logprobs] or len(probes) > MAX_PROBES:
                raise WeightsError(
                    f"a canary has {len(probes)} probes and {len(logprobs)} results that do not fit them"
                )
        if not 0 <= found.first < len(probes):
            raise WeightsError(f"a canary's first set has {found.first} of {len(probes)} probes")
        if max(probes) > MAX_TOKENS:
            raise WeightsError(f"a canary's probe has more than {MAX_TOKENS} tokens")
        return found

    def sets(self) -> tuple[Canary, ...]:
        """Each set of probes as a canary of its own, with the same tolerance."""
        cuts = (slice(None),) if not self.first else (slice(0, self.first), slice(self.first, None))
        return tuple(
            replace(
                self,
                sequences=self.sequences[cut],
                logprobs=self.logprobs[cut],
                first=0,
                decoys=tuple(replace(decoy, logprobs=decoy.logprobs[cut]) for decoy in self.decoys),
            )
            for cut in cuts
        )

    def earlier(self, policy_version: int) -> Decoy:
        """This canary, of that version, as a decoy of a later one's."""
        return Decoy(name=f"version {policy_version}", logprobs=self.logprobs)

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


def serves(decoy: Decoy, canary: Canary, scored: Sequence[NDArray[np.float32]]) -> bool:
    """Whether the engine serves the decoy: the sum of squares of its differences to it is at most CLOSER times that of
    its differences to the learner, and this is no matter of a few tokens: the sum over tokens of how much one square
    exceeds the other, divided by the root of the sum of squares of the same, is above NEARER."""
    right, wrong, found = (
        np.concatenate(parts).astype(np.float64) for parts in (canary.logprobs, decoy.logprobs, scored)
    )
    to_learner, to_decoy = (found - right) ** 2, (found - wrong) ** 2
    margin = to_learner - to_decoy
    clear = margin.sum() > NEARER * np.sqrt((margin**2).sum())
    return bool(clear and to_decoy.sum() <= CLOSER * to_learner.sum())


WAY_OUT = "`asyncrl verify` shows which engine loads this model correctly"


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
    everywhere: Callable[[Sequence[NDArray[np.int32]]], list[list[NDArray[np.float32]]]] | None = None
    """For an engine of several replicas: the result of `score` from each. All must agree with the learner."""

    def prove(self, policy_version: int, canary: Canary, before: tuple[int, Canary] | None = None) -> Difference:
        """Compare with the learner, and with decoys: those of the canary, and the version proven before. What fails on
        the first set of probes is decided by the second: a right engine may differ much on a few tokens, a wrong one
        fails on any.

        Raises:
            WeightsError: the engine disagrees with the learner on both sets, and which probe is off first; or a decoy
                is nearer.
        """
        refused: list[str] = []
        for part, older in zip(canary.sets(), self._older(canary, before), strict=True):
            found, why = self._judge(part, older)
            if not why:
                if refused:
                    log.warning(
                        "weights: the canary of version %d passed on its second set of probes (log-probs differ by up "
                        "to %.3g, mean %.3g) after it failed on the first%s",
                        policy_version, found.max, found.mean, refused[0],
                    )  # fmt: skip
                return found
            refused.append(why)
        raise WeightsError(
            f"the engine does not serve version {policy_version} as the learner has it"
            + "; and so it is with a second set of probes".join(refused)
            + f". {canary.learner_dtype}, wire {canary.wire_dtype}, engine {self.engine_dtype}. "
            + WAY_OUT
        )

    def _judge(self, canary: Canary, older: tuple[Decoy, ...]) -> tuple[Difference, str]:
        """Compare on one set of probes. Returns the largest difference of a replica, and why it is refused, if so."""
        allowed = canary.tolerance(self.engine_dtype)
        answers = self.everywhere(canary.sequences) if self.everywhere else [self.score(canary.sequences)]
        compared = [compare(canary, scored, allowed.max) for scored in answers]
        found = max(compared, key=lambda each: (not allowed.admits(each), each.max))
        if not allowed.admits(found):
            return found, (
                f": log-probs of the canary differ by up to {found.max:.3g} (mean {found.mean:.3g}). Allowed are "
                f"{allowed.max:g} for {allowed.share:.0%} of the tokens (here {found.within:.1%} of them)"
                + (f", {allowed.outer:g} for all of them" if allowed.outer < math.inf else "")
                + f" and a mean of {allowed.mean:.3g}. Probe {found.probe}, token {found.token}: learner "
                f"{found.learner:.4f}, engine {found.engine:.4f}"
            )
        for decoy in (*canary.decoys, *older):
            if any(serves(decoy, canary, scored) for scored in answers):
                return found, (
                    f", but {decoy.name}: its log-probs of the canary differ less from those (from the learner's by up "
                    f"to {found.max:.3g}, mean {found.mean:.3g})"
                )
        return found, ""

    def _older(self, canary: Canary, before: tuple[int, Canary] | None) -> list[tuple[Decoy, ...]]:
        """For each set of probes, the version proven before, where learner and engine compute with the same bits.
        Elsewhere an engine rounds away small steps that the learner computes with: it is right, and nearer to the older
        version."""
        sets = canary.sets()
        if before is None or {canary.learner_dtype, canary.wire_dtype, self.engine_dtype} != {"bfloat16"}:
            return [()] * len(sets)
        version, older = before
        same = len(older.sequences) == len(canary.sequences) and all(
            map(np.array_equal, older.sequences, canary.sequences)
        )
        return (
            [(part.earlier(version),) for part in replace(older, first=canary.first).sets()]
            if same
            else [()] * len(sets)
        )


def random_probes(vocabulary: int, seed: int, *, count: int = 4, length: int = 24) -> tuple[NDArray[np.int32], ...]:
    """Return probes that depend on `seed` alone: token ids drawn uniformly from the vocabulary, [length] each."""
    keys = np.random.Philox(key=[seed % 2**64, 0xCA9A]).random_raw(count * length)
    return tuple((keys % vocabulary).astype(np.int32).reshape(count, length))
