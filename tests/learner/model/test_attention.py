from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from asyncrl.errors import ConfigError
from asyncrl.learner.batch import packing as packing_module
from asyncrl.learner.batch.packing import Packing, Siblings, plan_packing
from asyncrl.learner.model.attention import PACKED_ATTENTION, packed_attention
from asyncrl.learner.parallel.sequence import SequenceRanks
from tests.learner.feed import FAMILIES, VOCABULARY, tiny_model

EXACT = {"atol": 1e-11, "rtol": 1e-11}
"""In float64, where only the order of a sum differs."""
LENGTHS = np.array([3, 60, 7, 20, 20, 51, 1])


def ends_to_ends(lengths: np.ndarray) -> np.ndarray:
    return np.arange(lengths.sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients_equal_those_of_each_sequence_alone(family: str):
    packed, alone = tiny_model(family).double(), tiny_model(family).double()
    packed.set_attn_implementation(PACKED_ATTENTION)
    ids = torch.randint(0, VOCABULARY, (int(LENGTHS.sum()),))
    positions = torch.cat([torch.arange(int(length)) for length in LENGTHS])
    packing = plan_packing(ends_to_ends(LENGTHS), LENGTHS, len(ids))
    assert len(packing.padded.shapes) > 1
    out = packed(input_ids=ids[None], position_ids=positions[None], use_cache=False, packing=packing).logits[0]
    each = [alone(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(LENGTHS.tolist())]
    expected = torch.cat(each)
    torch.testing.assert_close(out, expected, **EXACT)
    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for mine, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        scale = theirs.grad.abs().max()
        torch.testing.assert_close(mine.grad / scale, theirs.grad / scale, **EXACT)


def test_a_shared_prompt_gives_every_sibling_the_attention_of_its_own_copy():
    heads, width = 2, 8
    full = [
        torch.randn(3, heads, 6, width, dtype=torch.float64) for _ in range(2)
    ]  # q, k of prompt (4 tokens) and completions a, b
    values = torch.randn(3, heads, 6, width, dtype=torch.float64)
    rows = np.array([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7])
    packing = plan_packing(rows, np.array([6, 6]), 8)
    q, k, v = (
        torch.cat([t[0, :, :4], t[0, :, 4:], t[1, :, 4:]], dim=1)[None].requires_grad_() for t in (*full, values)
    )
    out = packed_attention(torch.nn.Identity(), q, k, v, None, packing=packing)[0][0]
    siblings = [
        functional.scaled_dot_product_attention(*(t[:, :, row] for t in (q, k, v)), is_causal=True)[0].transpose(0, 1)
        for row in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7])
    ]
    torch.testing.assert_close(out, torch.cat([siblings[0], siblings[1][4:]]), **EXACT)
    direction = torch.randn_like(out)
    mine = torch.autograd.grad((out * direction).sum(), (q, k, v), retain_graph=True)
    twin = torch.cat([siblings[0], siblings[1][4:]])
    theirs = torch.autograd.grad((twin * direction).sum(), (q, k, v))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def family_pack() -> tuple[np.ndarray, np.ndarray, Siblings, int]:
    """Rows, lengths, siblings and tokens of a pack: three completions of a prompt of 40 tokens, of which one is empty,
    one sequence alone, two completions of another prompt of 40, and two of one of 60."""
    return pack_of([(40, [5, 0, 23]), (30, [9]), (40, [6, 6]), (60, [30, 1])])


def pack_of(groups: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray, Siblings, int]:
    """The same of groups of a prompt's length and those of its completions."""
    rows, lengths, leader, prompts, tokens = [], [], [], [], 0
    for prompt, completions in groups:
        asked, first = np.arange(tokens, tokens + prompt), len(lengths)
        tokens += prompt
        for length in completions:
            rows.append(np.concatenate([asked, np.arange(tokens, tokens + length)]))
            lengths.append(prompt + length)
            leader.append(first)
            prompts.append(prompt)
            tokens += length
    siblings = Siblings(leader=np.array(leader), prompts=np.array(prompts))
    return np.concatenate(rows), np.array(lengths), siblings, tokens


@pytest.fixture
def blocks_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "BLOCK_PAIRS", 0)


def computed(packing: Packing, *tensors: torch.Tensor, window: int | None = None) -> tuple[torch.Tensor, ...]:
    """Output and gradients of attention to [1, heads, tokens, width] of q, k and v."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, sliding_window=window, packing=packing)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return out, *torch.autograd.grad((out * direction).sum(), (q, k, v))


def random_tokens(tokens: int, value_dim: int = 8, size: float = 1.0) -> list[torch.Tensor]:
    shapes = ((4, 8), (2, 8), (2, value_dim))
    return [size * torch.randn(1, heads, tokens, width, dtype=torch.float64) for heads, width in shapes]


@pytest.mark.usefixtures("blocks_cost_nothing")
@pytest.mark.parametrize("window", [None, 7, 50, 90])
@pytest.mark.parametrize("value_dim", [8, 5])
def test_siblings_read_one_copy_of_their_prompt_with_the_values_and_gradients_of_whole_rows(
    window: int | None, value_dim: int
):
    rows, lengths, siblings, tokens = family_pack()
    whole = plan_packing(rows, lengths, tokens)
    apart = plan_packing(rows, lengths, tokens, siblings=siblings)
    assert whole.shared is None and apart.shared is not None
    assert apart.shared.shapes == ((28, 40), (12, 40), (31, 60))
    assert apart.shared.segments.shapes == ((1, 60), (4, 40), (1, 23), (4, 6))
    # The prompts, each once more as keys, and what follows them.
    assert apart.real(any_length=False) == 2 * (40 + 40 + 60) + 39 + (5 + 23 + 6 + 6 + 30 + 1)
    assert apart.pairs == whole.pairs - 3 * (40 * 41 // 2) - 60 * 61 // 2
    tensors = random_tokens(tokens, value_dim)
    both = (computed(packing, *tensors, window=window) for packing in (apart, whole))
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(0, 40), min_size=1, max_size=5)), min_size=1, max_size=4
    )
)
@settings(max_examples=40, deadline=None)
def test_so_they_do_in_packs_of_any_groups(groups: list[tuple[int, list[int]]]):
    rows, lengths, siblings, tokens = pack_of(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module._Groups, "cost", -1)  # apart, whatever it costs
        apart = plan_packing(rows, lengths, tokens, siblings=siblings)
    whole = plan_packing(rows, lengths, tokens)
    assert (apart.shared is not None) == any(len(answers) > 1 for _, answers in groups)
    torch.manual_seed(0)
    tensors = random_tokens(tokens, size=3.0)
    for mine, theirs in zip(*(computed(packing, *tensors) for packing in (apart, whole)), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.usefixtures("blocks_cost_nothing")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_far_apart_overflow_nowhere(dtype: torch.dtype):
    """A slot of padding has the scores of another token than it names, by thousands larger than that one's sum."""
    rows, lengths, siblings, tokens = family_pack()
    tensors = [each.to(dtype) for each in random_tokens(tokens, size=30.0)]
    packings = plan_packing(rows, lengths, tokens, siblings=siblings), plan_packing(rows, lengths, tokens)
    apart, whole = (computed(packing, *tensors) for packing in packings)
    assert all(each.isfinite().all() for each in apart)
    if dtype == torch.float64:
        q, k, _ = tensors
        width = q.shape[-1]
        score = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / width**0.5
        # Both round a score, by width + 1 halves of eps, and so a probability: by as much, and once more by the sum.
        apart_by = 2 * (width + 1) * torch.finfo(dtype).eps * score
        for mine, theirs in zip(apart, whole, strict=True):
            torch.testing.assert_close(mine, theirs, atol=apart_by * float(theirs.abs().max()), rtol=0)


@pytest.mark.usefixtures("blocks_cost_nothing")
@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_share_a_pack_see_its_tokens_by_rank_and_give_each_the_same_output(shared: bool):
    rows, lengths, siblings, tokens = family_pack()
    packing = plan_packing(rows, lengths, tokens, siblings=siblings if shared else None)
    ranks: Any = None  # no collective is called
    apart = replace(SequenceRanks(group=ranks, rank=0, size=2).apart(packing), sequence=None)
    place = torch.arange(-(-tokens // 2) * 2)
    of_rank, within = place // (len(place) // 2), place % (len(place) // 2)
    order = (within * 2 + of_rank).clamp(max=tokens - 1)
    q, k, v = (torch.randn(1, 2, tokens, 8, dtype=torch.float64) for _ in range(3))
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, packing=packing)
    at_rank = [each[:, :, order] for each in (q, k, v)]
    found, _ = packed_attention(torch.nn.Identity(), at_rank[0], at_rank[1], at_rank[2], None, packing=apart)
    torch.testing.assert_close(found[0], out[0, order], **EXACT)


def test_a_shared_prompt_is_computed_with_each_completion_where_that_is_less_work(monkeypatch: pytest.MonkeyPatch):
    rows, lengths, siblings, tokens = family_pack()
    assert plan_packing(rows, lengths, tokens, siblings=siblings).shared is None  # three small groups
    monkeypatch.setattr(packing_module, "BLOCK_PAIRS", 0)
    assert plan_packing(rows, lengths, tokens, siblings=siblings).shared is not None
    short = np.array([0, 1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10])
    of_both = Siblings(leader=np.array([0, 0]), prompts=np.array([1, 1]))
    assert plan_packing(short, np.array([6, 6]), 11, siblings=of_both).shared is None


@pytest.mark.usefixtures("blocks_cost_nothing")
def test_a_shared_prompt_is_computed_with_each_completion_on_other_devices():
    rows, lengths, siblings, tokens = family_pack()
    assert plan_packing(rows, lengths, tokens, torch.device("meta"), siblings).shared is None


def test_a_sliding_window_hides_what_is_further_back():
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    packing = plan_packing(np.arange(9), np.array([9]), 9)
    out = packed_attention(torch.nn.Identity(), q, k, v, None, sliding_window=3, packing=packing)[0][0]
    for t in range(9):
        seen = slice(max(0, t - 2), t + 1)
        one = functional.scaled_dot_product_attention(q[:, :, t : t + 1], k[:, :, seen], v[:, :, seen])[0, :, 0]
        torch.testing.assert_close(out[t], one, **EXACT)


def test_blocks_never_pad_a_short_row_to_a_long_one():
    packing = plan_packing(ends_to_ends(LENGTHS), LENGTHS, int(LENGTHS.sum()))
    assert packing.padded.shapes == ((2, 60), (3, 20), (2, 3))


def test_score_capping_is_refused_by_name():
    q = torch.randn(1, 2, 3, 8)
    packing = plan_packing(np.arange(3), np.array([3]), 3)
    with pytest.raises(ConfigError, match=r"does not support attention sinks \(s_aux\), which Identity uses"):
        packed_attention(torch.nn.Identity(), q, q, q, None, packing=packing, s_aux=q)
    with pytest.raises(ConfigError, match="softcap"):
        packed_attention(torch.nn.Identity(), q, q, q, None, packing=packing, softcap=30.0)


def test_a_forward_without_packing_is_refused():
    model = tiny_model()
    model.set_attn_implementation(PACKED_ATTENTION)
    with pytest.raises(ConfigError, match="without packing"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.long))
