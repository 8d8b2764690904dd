from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightsError
from asyncrl.weights.delta import FULL, GAPS, MASK, DeltaChoice, Encoded, apply, encode, payload_limit


def pair(words: int, changes: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new bytes that differ in about `changes` elements of `width` bytes."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (16 * words,), dtype=torch.uint8, generator=generator)
    new = old.clone().view(-1, width)
    places = torch.randperm(len(new), generator=generator)[:changes]
    new[places] = torch.randint(0, 256, (len(places), width), dtype=torch.uint8, generator=generator)
    return old, new.view(-1)


@given(
    words=st.integers(1, 400),
    share=st.floats(0, 1),
    width=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=150)
def test_what_was_encoded_comes_back_to_the_bit_and_is_never_larger_than_the_bucket(words, share, width, seed):
    old, new = pair(words, int(share * words * 16 / width), width, seed)
    encoded = encode(new, old, width)
    assert payload_limit(encoded.header(), len(new)) == len(encoded.payload) <= len(new)
    received = old.clone()
    apply(encoded, received, width)
    assert torch.equal(received, new)


@pytest.mark.parametrize(("share", "kind"), [(0.01, GAPS), (0.2, MASK), (0.99, FULL)])
def test_the_smallest_encoding_is_taken(share, kind):
    old, new = pair(4096, int(share * 4096 * 8), 2, 0)
    assert encode(new, old, 2).kind == kind


def test_an_unchanged_bucket_costs_nothing():
    old, _ = pair(100, 0, 2, 0)
    encoded = encode(old.clone(), old, 2)
    assert (encoded.kind, len(encoded.payload)) == (GAPS, 0)
    apply(encoded, old, 2)


@pytest.mark.parametrize("places", [[0], [65534], [65535], [65536], [131070], [200001], [5, 70000, 70001, 270000]])
def test_changes_farther_apart_than_a_gap_can_say_are_found(places):
    old = torch.zeros(2 * 300000, dtype=torch.uint8)
    new = old.clone()
    for place in places:
        new[2 * place] = 7
    encoded = encode(new, old, 2)
    assert encoded.kind == GAPS
    apply(encoded, old, 2)
    assert torch.equal(old, new)


@pytest.mark.parametrize(
    "bad",
    [
        Encoded(kind=GAPS, payload=torch.zeros(7, dtype=torch.uint8), changed=2),
        Encoded(kind=GAPS, payload=torch.full((4,), 255, dtype=torch.uint8), changed=1),
        Encoded(kind=MASK, payload=torch.full((1,), 255, dtype=torch.uint8), changed=0),
        Encoded(kind=FULL, payload=torch.zeros(8, dtype=torch.uint8), changed=4),
        Encoded(kind="zip", payload=torch.zeros(8, dtype=torch.uint8), changed=4),
    ],
)
def test_a_delta_that_does_not_fit_is_refused(bad):
    with pytest.raises(WeightsError):
        apply(bad, torch.zeros(16, dtype=torch.uint8), 2)


@pytest.mark.parametrize("header", [["gaps", 17, 1], ["gaps", -1, 1], ["zip", 4, 1], ["mask", 4, -1]])
def test_no_more_than_the_bucket_may_be_announced(header):
    with pytest.raises(WeightsError, match="bucket of 16"):
        payload_limit(header, 16)


def test_auto_goes_back_to_full_versions_when_a_delta_took_longer_and_tries_again():
    choice = DeltaChoice("auto", retry=2)
    choice.sent_full(1.0)
    assert choice.wanted()
    choice.sent_delta(encode_s=0.1, send_s=0.2)
    assert choice.wanted()
    choice.sent_delta(encode_s=0.5, send_s=0.2)
    assert [choice.wanted() for _ in range(3)] == [False, False, True]
    always = DeltaChoice("always")
    always.sent_full(0.1)
    always.sent_delta(encode_s=9.0, send_s=9.0)
    assert always.wanted()
    assert not DeltaChoice("never").wanted()
