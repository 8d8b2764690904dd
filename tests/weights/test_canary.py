from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.errors import GenerationError, WeightsError
from asyncrl.weights.canary import (
    FULL,
    HALF,
    ROUTED,
    Canary,
    Decoy,
    Proof,
    compare,
    random_probes,
    serves,
    tolerance,
)
from asyncrl.weights.files.sender import FilesSender
from asyncrl.weights.files.subscriber import FilesSubscriber
from asyncrl.weights.publishing.publisher import WeightPublisher
from tests.waiting import until
from tests.weights.board import Board, WorkerRendezvous

PROBES = random_probes(97, seed=3)


def canary_of(values: list[np.ndarray], dtype: str = "float32") -> Canary:
    logprobs = tuple(value.astype(np.float32) for value in values)
    return Canary(sequences=PROBES, logprobs=logprobs, learner_dtype=dtype, wire_dtype="float32")


def zeros() -> list[np.ndarray]:
    return [np.zeros(len(ids) - 1, np.float32) for ids in PROBES]


def test_probes_are_the_same_for_a_seed_and_within_the_vocabulary():
    assert all(np.array_equal(a, b) for a, b in zip(PROBES, random_probes(97, seed=3), strict=True))
    assert not np.array_equal(PROBES[0], random_probes(97, seed=4)[0])
    assert {ids.dtype.name for ids in PROBES} == {"int32"}
    assert max(ids.max() for ids in PROBES) < 97 and min(ids.min() for ids in PROBES) >= 0


def test_a_canary_survives_the_wire_to_the_bit():
    canary = canary_of([np.random.default_rng(i).normal(size=len(ids) - 1) for i, ids in enumerate(PROBES)])
    back = Canary.from_wire(canary.to_wire())
    for name in ("sequences", "logprobs"):
        for ours, theirs in zip(getattr(canary, name), getattr(back, name), strict=True):
            assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype
    assert (back.learner_dtype, back.wire_dtype, back.largest_logit) == ("float32", "float32", np.inf)
    assert Canary.from_wire(replace(canary, largest_logit=2.5).to_wire()).largest_logit == 2.5
    decoys = (Decoy(name="version 3", logprobs=canary.logprobs),)
    (decoy,) = Canary.from_wire(replace(canary, decoys=decoys).to_wire()).decoys
    assert decoy.name == "version 3" and all(map(np.array_equal, decoy.logprobs, canary.logprobs))


def test_a_learner_that_does_not_say_its_largest_logit_is_held_to_the_outer_bound():
    wire = canary_of(zeros(), "bfloat16").to_wire()
    del wire["largest_logit"]
    assert Canary.from_wire(wire).tolerance("bfloat16") == HALF


@pytest.mark.parametrize(
    "damage",
    [
        lambda wire: wire.pop("logprobs"),
        lambda wire: wire["sequences"].pop(),
        lambda wire: wire["logprobs"].__setitem__(0, b"\0" * 4),
        lambda wire: wire["logprobs"].__setitem__(0, b"\0" * 5),
        lambda wire: wire.update(sequences=[], logprobs=[]),
        lambda wire: wire.update(sequences=[b"\0" * 40000], logprobs=[b"\0" * 39996]),
        lambda wire: wire.update(dtypes=["float32"]),
        lambda wire: wire.update(first=4),
        lambda wire: wire.update(decoys=[["version 3", wire["logprobs"][1:]]]),
        lambda wire: wire.update(decoys=["version 3"]),
    ],
)
def test_a_damaged_canary_is_a_weights_error(damage):
    wire = canary_of(zeros()).to_wire()
    damage(wire)
    with pytest.raises(WeightsError):
        Canary.from_wire(wire)


def test_the_difference_names_the_first_probe_over_the_bound_and_its_worst_token():
    scored = zeros()
    scored[1][4], scored[1][7], scored[3][0] = 0.5, -1.5, 9.0
    found = compare(canary_of(zeros()), scored, bound=0.1)
    assert (found.max, found.probe, found.token, found.engine, found.learner) == (9.0, 1, 8, -1.5, 0.0)
    assert found.mean == pytest.approx(11.0 / sum(len(ids) - 1 for ids in PROBES))
    assert compare(canary_of(zeros()), scored).probe == 3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_no_number_never_passes(value):
    scored = zeros()
    scored[0][0] = value
    with pytest.raises(WeightsError, match="differ by up to inf"):
        Proof(score=lambda _: scored, engine_dtype="bfloat16").prove(1, canary_of(zeros()))


def test_the_tolerance_is_that_of_the_coarsest_dtype():
    assert tolerance("float32", "float32", "float32") == FULL
    for i in range(3):
        dtypes = ["float32"] * 3
        dtypes[i] = "bfloat16"
        assert tolerance(*dtypes) == HALF
    proof = Proof(score=lambda _: [array + 0.01 for array in zeros()], engine_dtype="float32")
    with pytest.raises(WeightsError, match=r"version 7 .* up to 0\.01 .* Probe 0, token 1: learner 0\.0000, engine"):
        proof.prove(7, canary_of(zeros()))
    assert replace(proof, engine_dtype="bfloat16").prove(7, canary_of(zeros())).max == pytest.approx(0.01)


@pytest.mark.parametrize(("largest", "mean"), [(0.0, 2e-4), (1.0, 2 / 128), (6.4, 0.1), (30.0, 0.1), (np.nan, 2e-4)])
def test_the_mean_that_bfloat16_may_differ_by_follows_the_largest_logit_up_to_that_of_all_models(largest, mean):
    canary = replace(canary_of(zeros(), "bfloat16"), largest_logit=largest)
    assert canary.tolerance("bfloat16") == replace(HALF, mean=pytest.approx(mean))
    assert replace(canary, routed=True).tolerance("bfloat16") == ROUTED
    assert replace(canary, learner_dtype="float32").tolerance("float32") == FULL


def test_of_experts_in_half_precision_a_few_tokens_may_differ_much_and_in_float32_none():
    canary = Canary.from_wire(replace(canary_of(zeros()), routed=True).to_wire())
    assert canary.routed and tolerance("float32", "bfloat16", routed=True) == ROUTED
    scored = zeros()
    scored[0][:4] = 1.5  # of 92
    proof = Proof(score=lambda _: scored, engine_dtype="bfloat16")
    assert proof.prove(1, canary).max == 1.5
    for stricter, of, share in ((proof, canary_of(zeros()), 99), (replace(proof, engine_dtype="float32"), canary, 100)):
        with pytest.raises(WeightsError, match=rf"for {share}% of the tokens \(here 95\.7% of them\)"):
            stricter.prove(1, of)
    scored[0][4] = 1.5
    with pytest.raises(WeightsError, match=r"for 95% of the tokens \(here 94\.6% of them\)"):
        proof.prove(1, canary)


MANY = random_probes(97, seed=3, count=16)


def test_of_a_dense_model_one_token_in_a_hundred_may_be_far_off_and_none_very_far():
    canary = Canary(sequences=MANY, logprobs=tuple(flat()), learner_dtype="bfloat16", wire_dtype="bfloat16")
    scored = flat()  # 368 tokens
    scored[0][:3] = 2.0
    proof = Proof(score=lambda _: scored, engine_dtype="bfloat16")
    assert proof.prove(1, canary).max == 2.0
    scored[0][3] = 2.0
    with pytest.raises(WeightsError, match=r"0\.75 for 99% of the tokens \(here 98\.9% of them\), 3 for all of them"):
        proof.prove(1, canary)
    scored = flat()
    scored[0][0] = 3.01
    with pytest.raises(WeightsError, match=r"differ by up to 3\.01"):
        proof.prove(1, canary)


def two_sets() -> Canary:
    return Canary(
        sequences=PROBES + MANY[: len(PROBES)],
        logprobs=tuple(zeros() * 2),
        learner_dtype="bfloat16",
        wire_dtype="bfloat16",
        first=len(PROBES),
    )


def off(by: float) -> list[np.ndarray]:
    return [each + np.float32(by) for each in zeros()]


def test_a_first_set_of_probes_that_passes_is_enough(caplog: pytest.LogCaptureFixture):
    asked: list[int] = []
    canary = two_sets()
    Proof(score=lambda given: asked.append(len(given)) or zeros(), engine_dtype="bfloat16").prove(5, canary)
    assert asked == [len(PROBES)] and not caplog.records


def test_a_set_that_fails_is_repeated_with_the_second_which_decides(caplog: pytest.LogCaptureFixture):
    canary, answers = two_sets(), [off(4.0), off(0.01)]
    found = Proof(score=lambda _: answers.pop(0), engine_dtype="bfloat16").prove(5, canary)
    assert found.max == pytest.approx(0.01) and not answers
    (record,) = caplog.records
    said = record.getMessage()
    assert "version 5 passed on its second set of probes" in said and "0.01" in said and "differ by up to 4 " in said


@pytest.mark.parametrize("kind", ["size", "decoy"])
def test_an_engine_that_fails_on_both_sets_is_refused_with_both_numbers(kind: str):
    rng = np.random.default_rng(0)
    wrong = tuple((0.05 * rng.normal(size=len(each))).astype(np.float32) for each in zeros() * 2)
    canary = replace(two_sets(), decoys=(Decoy(name="layers 2 and 3 exchanged", logprobs=wrong),))
    half = len(PROBES)
    answers = [off(4.0), off(5.0)] if kind == "size" else [list(wrong[:half]), list(wrong[half:])]
    with pytest.raises(WeightsError) as caught:
        Proof(score=lambda _: answers.pop(0), engine_dtype="bfloat16").prove(5, Canary.from_wire(canary.to_wire()))
    said = str(caught.value)
    assert not answers and "; and so it is with a second set of probes" in said
    if kind == "size":
        assert "up to 4 " in said and "up to 5 " in said
    else:
        assert said.count("but layers 2 and 3 exchanged") == 2


def flat() -> list[np.ndarray]:
    return [np.zeros(len(ids) - 1, np.float32) for ids in MANY]


def noisy(values: list[np.ndarray], seed: int, size: float) -> list[np.ndarray]:
    """Rounding with heavy tails, as in a mixture of experts."""
    rng = np.random.default_rng(seed)
    return [(value + size * rng.standard_t(3, len(value))).astype(np.float32) for value in values]


def with_decoy(size: float) -> tuple[Canary, Decoy]:
    rng = np.random.default_rng(99)
    wrong = tuple((size * rng.normal(size=len(each))).astype(np.float32) for each in flat())
    decoy = Decoy(name="layers 2 and 3 exchanged", logprobs=wrong)
    right = Canary(sequences=MANY, logprobs=tuple(flat()), learner_dtype="bfloat16", wire_dtype="bfloat16")
    return replace(right, decoys=(decoy,)), decoy


def test_an_engine_within_the_tolerance_that_serves_a_decoy_is_refused_by_its_name():
    canary, decoy = with_decoy(0.03)
    proof = Proof(score=lambda _: noisy(flat(), 1, 0.01), engine_dtype="bfloat16")
    proof.prove(4, canary)
    wrong = noisy(list(decoy.logprobs), 1, 0.01)
    replace(proof, score=lambda _: wrong).prove(4, replace(canary, decoys=()))
    with pytest.raises(WeightsError, match="does not serve version 4 as the learner has it, but layers 2 and 3 exch"):
        replace(proof, score=lambda _: wrong).prove(4, canary)
    with pytest.raises(WeightsError, match="layers 2 and 3 exchanged"):  # one of two replicas
        replace(proof, everywhere=lambda _: [noisy(flat(), 1, 0.01), wrong]).prove(4, canary)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1e-2, 0.1])
def test_no_right_engine_is_taken_for_a_decoy(size: float):
    canary, decoy = with_decoy(size)
    assert not any(serves(decoy, canary, noisy(flat(), seed, 0.01)) for seed in range(500))


def test_a_few_tokens_alone_do_not_make_an_engine_serve_a_decoy():
    canary, decoy = with_decoy(0.0)
    far = [part.copy() for part in decoy.logprobs]
    far[0][:9] = 0.5
    scored = flat()
    scored[0][:9] = 0.5
    assert not serves(Decoy(name="", logprobs=tuple(far)), canary, scored)


def test_an_engine_that_still_serves_the_version_proven_before_is_found_where_all_compute_alike():
    older = with_decoy(0.03)[0]
    old = list(older.decoys[0].logprobs)
    older = replace(older, logprobs=tuple(old), decoys=())
    newer = replace(older, logprobs=tuple(flat()))
    proof = Proof(score=lambda _: noisy(old, 1, 0.01), engine_dtype="bfloat16")
    proof.prove(8, older)
    with pytest.raises(WeightsError, match="does not serve version 9 as the learner has it, but version 8"):
        proof.prove(9, newer, (8, older))
    proof.prove(9, newer)
    proof.prove(9, replace(newer, learner_dtype="float32"), (8, older))  # which sees steps that bfloat16 rounds away
    other = replace(older, sequences=random_probes(97, seed=4, count=16))
    proof.prove(9, newer, (8, other))
    replace(proof, score=lambda _: noisy(flat(), 1, 0.01)).prove(9, newer, (8, older))


def test_an_answer_of_another_shape_is_refused():
    with pytest.raises(WeightsError, match="scored"):
        compare(canary_of(zeros()), zeros()[:-1])


class TableEngine:
    """Scores from a table of one row per version; a stuck one goes on with what it loaded first."""

    def __init__(self, stuck: bool = False) -> None:
        self.stuck = stuck
        self.value: float | None = None
        self.scored = 0

    def load(self, version: int, tensors) -> None:
        if self.value is None or not self.stuck:
            self.value = float(tensors["w"][0])

    def score(self, sequences):
        self.scored += 1
        return [np.full(len(ids) - 1, self.value, np.float32) for ids in sequences]


class HalfEngine(TableEngine):
    """In bfloat16, and rounding as such engines do."""

    def score(self, sequences):
        return noisy(super().score(sequences), self.scored, 0.01)


class FilesPair:
    """Both ends of the files transport, and an engine."""

    def __init__(self, folder, engine, verify_every: int, dtype: str = "float32") -> None:
        board = Board()
        self.board = board
        self.dtype = dtype
        self.publisher = WeightPublisher(
            FilesSender(board, folder), wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=30
        )
        proof = Proof(score=engine.score, engine_dtype=dtype, verify_every=verify_every)
        self.subscriber = FilesSubscriber(WorkerRendezvous(board, "a"), engine.load, proof)

    def publish(self, version: int) -> None:
        values = [np.full(len(ids) - 1, self.small * version) for ids in PROBES]
        canary = replace(canary_of(values, self.dtype), wire_dtype=self.dtype)
        self.publisher.publish(version, [("w", torch.full((4,), self.small * version))], canary)

    @property
    def small(self) -> float:
        """What a version changes all log-probs by."""
        return 1.0 if self.dtype == "float32" else 0.02

    def wait(self, version: int) -> None:
        subscriber = self.subscriber
        until(lambda: subscriber.policy_version == version, holds=lambda: subscriber.check() is None)

    def close(self) -> None:
        self.publisher.close()
        self.subscriber.close()


def test_the_first_version_and_every_nth_are_proven(tmp_path):
    engine = TableEngine()
    pair = FilesPair(tmp_path, engine, verify_every=3)
    for version in range(7):
        pair.publish(version)
        pair.wait(version)
    assert engine.scored == 3, "versions 0, 3 and 6"
    assert pair.subscriber.proven
    pair.close()


def test_an_engine_that_keeps_old_weights_is_never_reported_as_serving_and_lets_nothing_out(tmp_path):
    engine = TableEngine(stuck=True)
    pair = FilesPair(tmp_path, engine, verify_every=1)
    pair.publish(0)
    pair.wait(0)
    pair.publish(1)
    with pytest.raises(WeightsError, match=r"version 1 is not served: .* learner 1\.0000, engine 0\.0000"):
        pair.wait(1)
    assert not pair.subscriber.proven
    assert pair.subscriber.policy_version == 0
    assert [version for _, version, _, _ in pair.board.served()] == [0]
    assert pair.subscriber.stats()["weights/canary_failed"] == 1
    pair.close()


def test_an_engine_in_bfloat16_that_keeps_weights_of_the_version_proven_before_is_found(tmp_path):
    pair = FilesPair(tmp_path, HalfEngine(stuck=True), verify_every=2, dtype="bfloat16")
    for version in range(2):
        pair.publish(version)
        pair.wait(version)
    pair.publish(2)
    with pytest.raises(WeightsError, match="does not serve version 2 as the learner has it, but version 0"):
        pair.wait(2)
    pair.close()


def test_an_engine_that_cannot_score_does_not_serve(tmp_path):
    engine = TableEngine()
    engine.score = lambda sequences: (_ for _ in ()).throw(GenerationError("out of memory"))
    pair = FilesPair(tmp_path, engine, verify_every=0)
    pair.publish(0)
    with pytest.raises(WeightsError, match="out of memory"):
        pair.wait(0)
    assert not pair.board.served()
    pair.close()
