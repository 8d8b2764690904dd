"""Kernels that take rows of any length: what they compute, and that one is used only after it has shown that it works.

Here is no GPU: flex_attention runs uncompiled, and functions that compute what FlashAttention's promise stand for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from asyncrl.learner.batch.packing import Pack
from asyncrl.learner.model import attention, attention_rows, attention_trial
from asyncrl.learner.model.attention import PACKED_ATTENTION
from asyncrl.learner.model.attention_kernel import BLOCKS, FLASH, FLASH3, FLASH3_CACHED, FLEX, Kernel, There
from asyncrl.learner.model.attention_rows import Rows, attend
from asyncrl.learner.model.attention_trial import kernel_of, plainly, tried
from asyncrl.learner.model.layout import Layout
from asyncrl.learner.model.policy import build_model
from asyncrl.schema import Config, DataConfig, ModelConfig
from tests.far_device import FAR, FarDevice, FarTensor
from tests.learner.families import logprobs_alone, siblings, tiny_family
from tests.learner.feed import tiny_checkpoint
from tests.pretended_gpu import pretended_gpus

CPU = torch.device("cpu")
EXACT = {"atol": 1e-11, "rtol": 1e-11}
Flash = Callable[..., Any]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """With the arguments of FlashAttention's function."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    lengths = tuple(cu_seqlens_q.diff().tolist())
    assert max_seqlen_q == max_seqlen_k == max(lengths) and causal and window_size[1] == 0
    return plainly(q, k, v, lengths, softmax_scale, None if window_size[0] < 0 else window_size[0] + 1)


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Tensor,
    same: Tensor,
    longest: int,
    also: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """With the arguments of torch's function."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert enable_gqa or q.shape[1] == k.shape[1]
    return flash_attn_varlen_func(q, k, v, edges, same, longest, also, scale, True, window_size)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch):
    """Puts a function where `kernels` would have FlashAttention-3."""

    def put(function: Flash) -> None:
        module = SimpleNamespace(flash_attn_varlen_func=function)
        monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_local_kernel=lambda _: module))  # pyright: ignore
        monkeypatch.setattr(attention_rows, "cached_build", lambda: "build")
        attention_rows._cached_kernel.cache_clear()

    yield put
    attention_rows._cached_kernel.cache_clear()


@pytest.fixture
def any_kernel(cached: Callable[[Flash], None], monkeypatch: pytest.MonkeyPatch) -> None:
    # torch refuses the backward of flex_attention on a CPU; the uncompiled one works.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention_rows, "varlen_attn", varlen_attn)
    cached(flash_attn_varlen_func)


@pytest.mark.usefixtures("any_kernel")
@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("window", [None, 1, 60, 200])
@pytest.mark.parametrize("kernel", [FLASH, FLASH3_CACHED, FLEX])
def test_rows_end_to_end_have_the_attention_and_gradients_of_each_alone(
    kernel: str, window: int | None, takes_groups: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention_rows, "FLASH_TAKES_GROUPS", takes_groups)
    lengths = (3, 200, 1, 1, 127, 129, 60)
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, 16), (2, 16), (2, 8), (4, 8))  # values narrower than keys, as in multi-head latent attention
    *inputs, towards = (torch.randn(sum(lengths), *shape, dtype=torch.float64, generator=generator) for shape in shapes)
    q, k, v = (tensor.requires_grad_() for tensor in inputs)

    def with_gradients(out: Tensor) -> tuple[Tensor, ...]:
        return out, *torch.autograd.grad(out, (q, k, v), towards)

    found = with_gradients(attend(kernel, q, k, v, Rows.of(np.array(lengths), CPU), 0.3, window))
    for mine, theirs in zip(found, with_gradients(plainly(q, k, v, lengths, 0.3, window)), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("window", [None, 1, 100, 129])
def test_the_tiles_of_a_mask_are_those_that_torch_finds_by_asking_every_pair(window: int | None):
    lengths = np.array([3, 200, 1, 127, 129, 300])
    mine, total = attention_rows.tiles_of(lengths.tobytes(), window, CPU), int(lengths.sum())
    theirs = flex.create_block_mask(mine.mask_mod, None, None, total, total, device="cpu")
    assert torch.equal(mine.to_dense(), theirs.to_dense())


@pytest.mark.usefixtures("any_kernel")
@pytest.mark.parametrize("kernel", [FLASH, FLASH3_CACHED, FLEX])
def test_a_model_packed_with_any_kernel_has_the_log_probs_and_gradients_of_each_sequence_alone(
    kernel: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "kernel_of", lambda *_: Kernel(kernel, "for this test"))
    batch = siblings()
    assert len(batch.input_ids) < len(batch.packing.rows.index)  # prompts are shared
    packed, alone = (tiny_family("Mistral").double() for _ in range(2))
    packed.set_attn_implementation(PACKED_ATTENTION)
    out = packed(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, packing=batch.packing
    ).logits[0]
    scores = out[batch.predictors].log_softmax(-1)
    order = torch.argsort(batch.sequence_ids[batch.loss_positions], stable=True)
    mine = scores.gather(-1, batch.input_ids[batch.loss_positions, None])[order, 0]
    theirs = logprobs_alone(alone, batch)
    torch.testing.assert_close(mine, theirs, **EXACT)
    mine.sum().backward()
    theirs.sum().backward()
    wanted = [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(wanted)
    # Norms compute in float32, and a shared prompt's gradients are summed before them, not behind.
    for one, other in zip(packed.parameters(), wanted, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad / norm, other / norm, atol=1e-6, rtol=0)


def whole(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return flash_attn_varlen_func(q, k, v, **(given | {"window_size": (-1, 0)}))


def one_key_more(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    window = given["window_size"][0]
    return flash_attn_varlen_func(q, k, v, **(given | {"window_size": (window + (window > 0), 0)}))


def across(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return plainly(q, k, v, (len(q),), given["softmax_scale"], None)


def rounded(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    out = flash_attn_varlen_func(q.double(), k.double(), v.double(), **given)
    return out.to(q.dtype)


def forward_only(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return flash_attn_varlen_func(q, k, v, **given).detach()


def not_a_number(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return flash_attn_varlen_func(q, k, v, **given) * float("nan")


def with_sums(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, None]:
    return flash_attn_varlen_func(q, k, v, **given), None


TRIALS = {
    "right": (flash_attn_varlen_func, ""),
    "right, rounded at the end": (rounded, ""),
    "right, with the log-sum-exps": (with_sums, ""),
    "no window": (whole, "is off by .* window 20"),
    "a window of one key more": (one_key_more, "is off by .* window 20"),
    "rows see each other": (across, "is off by .* window None"),
    "no backward": (forward_only, "RuntimeError"),
    "not a number": (not_a_number, "is off by nan"),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", TRIALS)
def test_a_kernel_that_computes_something_else_is_not_used_and_the_reason_is_named(
    name: str, dtype: torch.dtype, cached: Callable[[Flash], None]
):
    function, why = TRIALS[name]
    cached(function)
    said = tried(FLASH3_CACHED, CPU, dtype, 64)
    assert bool(said) == bool(why) and re.search(why, said), said


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    there = There("cuda", (9, 0), flash3=True, cached=True, triton=True)
    monkeypatch.setattr(There, "of", classmethod(lambda cls, _: there))


@pytest.mark.usefixtures("hopper", "any_kernel")
def test_of_what_is_there_the_first_that_works_is_used_and_the_line_says_what_did_not(
    cached: Callable[[Flash], None], monkeypatch: pytest.MonkeyPatch
):
    restored = []
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda **_: restored.append(True))
    choice = kernel_of.__wrapped__
    # Its wheel is not installed here.
    found = choice(CPU, torch.bfloat16, 64)
    assert found.name == FLASH3_CACHED and "flash3 is there and cannot be used" in found.why and restored == [True]
    cached(across)
    found = choice(CPU, torch.bfloat16, 64)
    assert found.name == FLASH and "flash3_cached is there and cannot be used (the " in found.why
    works = {FLEX}
    monkeypatch.setattr(attention_trial, "tried", lambda name, *_: "" if name in works else "no such symbol")
    assert [choice(CPU, dtype, 64).name for dtype in (torch.bfloat16, torch.float32)] == [FLEX, FLEX]
    works.clear()
    found = choice(CPU, torch.float32, 64)
    assert found.name == BLOCKS and "flex is there and cannot be used (no such symbol)" in found.why


@pytest.mark.usefixtures("hopper", "any_kernel")
def test_a_trial_leaves_no_trace_in_what_surrounds_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_trial, "tried", lambda name, *rest: "no" if name == FLASH3 else tried(name, *rest))
    kept = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda each: each):
        assert kernel_of.__wrapped__(CPU, torch.bfloat16, 64).name == FLASH3_CACHED
    assert not kept


def test_the_mask_of_flex_attention_costs_no_wait_for_the_device():
    with FarDevice() as device:
        mask = attention_rows.tiles_of.__wrapped__(np.array([150, 1, 43]).tobytes(), 20, FAR)
        assert device.waits == [] and isinstance(mask.kv_indices, FarTensor)


def test_a_trial_runs_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch):
    gpu, seen = torch.device("cuda", 1), list[int]()
    monkeypatch.setattr(There, "of", classmethod(lambda cls, _: There("cuda", (8, 0))))
    monkeypatch.setattr(attention_trial, "_apart", lambda *_: seen.append(torch.cuda.current_device()) or "")
    with pretended_gpus(2):
        assert kernel_of.__wrapped__(gpu, torch.bfloat16, 64).name == FLASH
        assert set(seen) == {gpu.index} and torch.cuda.current_device() != gpu.index


def test_a_cpu_needs_no_trial(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_trial, "tried", None)
    assert kernel_of.__wrapped__(CPU, torch.bfloat16, 64).name == BLOCKS


def test_the_probe_of_a_float32_model_at_load_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """On a GPU float32 takes flex_attention, whose compilation took every rank a minute at its start."""
    chosen: list[torch.dtype] = []
    monkeypatch.setattr(
        attention, "kernel_of", lambda device, dtype, width: chosen.append(dtype) or Kernel(BLOCKS, "for this test")
    )
    setting = ModelConfig(path=str(tiny_checkpoint(tmp_path / "model")), dtype="float32")
    model = build_model(Config(model=setting, data=DataConfig(path="none")), CPU, None)
    assert model.layout is Layout.PACKED and not chosen
    with torch.no_grad():
        model.judge(Pack.of([np.arange(5, dtype=np.int32)], CPU))
    assert set(chosen) == {torch.float32}
