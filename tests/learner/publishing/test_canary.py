"""The rounding that the learner measures in its own model, and the engines that the resulting bound accepts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.errors import NonFiniteError
from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.publishing.canary import DECOYS, ProvingPublisher, canary_of, exchanging, layers_of
from asyncrl.learner.publishing.probes import Probes, probes_of, probes_of_run
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.quickstart.smoke_rows import write_gsm8k
from asyncrl.schema import Config, DataConfig, ModelConfig, RunConfig
from asyncrl.weights.base import Publisher
from asyncrl.weights.canary import ROUTED, Canary, compare, serves
from tests.learner.families import build
from tests.learner.feed import tiny_checkpoint, tiny_model

CPU = torch.device("cpu")
IN_A_RELEASE = [pytest.mark.slow, pytest.mark.long]
DEEP: dict[str, Any] = {"num_hidden_layers": 24, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}


@pytest.fixture
def backend() -> Iterator[FSDP2]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield FSDP2(init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def policy_of(folder: Path, family: str, dtype: str, backend: FSDP2, **sizes: Any) -> PolicyModel:
    path = tiny_checkpoint(folder / family, family, **sizes)
    model = ModelConfig(path=str(path), dtype=dtype)
    return build_model(Config(model=model, run=RunConfig(dir=str(folder)), data=DataConfig(path="none")), CPU, backend)


def probes_from(kind: str, policy: PolicyModel, folder: Path) -> Probes:
    if kind == "random":
        return probes_of(policy, 0)
    save_byte_tokenizer(folder)
    write_gsm8k(folder)
    data = DataConfig(path=str(folder / "train.parquet"))
    probes, why_random = probes_of_run(Config(model=ModelConfig(path=str(folder)), data=data), policy)
    assert not why_random
    return probes


def scored(engine: Any, canary: Canary) -> list[np.ndarray]:
    """As the built-in engine does: each sequence alone, by torch's own attention; the learner has all in one pack."""
    return ModelRunner(engine, CPU, 1).score(canary.sequences)


def exchanged(engine: Any, one: int, other: int) -> Any:
    """With the weights of two layers in each other's place."""
    wrong = copy.deepcopy(engine)
    first, second = (copy.deepcopy(wrong.model.layers[layer].state_dict()) for layer in (one, other))
    wrong.model.layers[one].load_state_dict(second)
    wrong.model.layers[other].load_state_dict(first)
    return wrong


@pytest.mark.parametrize(
    ("family", "dtype", "probes"),
    [
        ("qwen3", "float32", "prompts"),
        ("llama", "bfloat16", "random"),
        pytest.param("qwen3", "bfloat16", "prompts", marks=IN_A_RELEASE),
        pytest.param("llama", "float32", "random", marks=IN_A_RELEASE),
    ],
)
def test_of_24_layers_in_bfloat16_even_the_last_two_exchanged_are_found(
    family: str, dtype: str, probes: str, backend: FSDP2, tmp_path: Path
):
    policy = policy_of(tmp_path, family, dtype, backend, **DEEP)
    canary = canary_of(policy, probes_from(probes, policy, tmp_path), CPU, dtype, "bfloat16", with_noise=True)
    allowed = Canary.from_wire(canary.to_wire()).tolerance("bfloat16")
    engine = tiny_model(family, **DEEP).bfloat16().eval()
    honest = compare(canary, scored(engine, canary), allowed.max)
    assert allowed.admits(honest) and honest.mean < allowed.mean / 2, (honest, allowed)
    for layers in ((22, 23), (11, 12), (0, 1)):
        found = compare(canary, scored(exchanged(engine, *layers), canary), allowed.max)
        assert not allowed.admits(found) and found.mean > 1.1 * allowed.mean, (layers, found, allowed)


def exchanged_experts(engine: Any, layer: int) -> Any:
    wrong = copy.deepcopy(engine)
    with torch.no_grad():
        for weights in wrong.model.layers[layer].mlp.experts.parameters():
            weights[[0, 1]] = weights[[1, 0]]
    return wrong


@pytest.mark.parametrize(
    ("dtype", "probes"), [("bfloat16", "prompts"), pytest.param("float32", "random", marks=IN_A_RELEASE)]
)
def test_of_24_layers_of_experts_two_layers_or_two_experts_exchanged_are_found(
    dtype: str, probes: str, backend: FSDP2, tmp_path: Path
):
    sizes = DEEP | {"initializer_range": 0.1, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    policy = policy_of(tmp_path, "qwen3_moe", dtype, backend, **sizes)
    chosen = probes_from(probes, policy, tmp_path)
    canary = canary_of(policy, chosen, CPU, dtype, "bfloat16", with_noise=True, decoys=DECOYS)
    allowed = Canary.from_wire(canary.to_wire()).tolerance("bfloat16")
    engine = tiny_model("qwen3_moe", **sizes).bfloat16().eval()
    honest = compare(canary, scored(engine, canary), allowed.max)
    assert allowed.admits(honest) and honest.mean < allowed.mean / 1.5, (honest, allowed)
    middle = exchanged(engine, 11, 12)
    for wrong in (exchanged(engine, 0, 1), middle, exchanged_experts(engine, 0)):
        found = compare(canary, scored(wrong, canary), allowed.max)
        assert not allowed.admits(found) and found.mean > 1.1 * allowed.mean, (found, allowed)
        assert ROUTED.admits(found) == (wrong is middle)  # what is allowed of any mixture would let that pass
    right, last = scored(engine, canary), scored(exchanged(engine, 22, 23), canary)
    assert allowed.admits(compare(canary, last, allowed.max))  # only the decoys find it
    assert [decoy.name for decoy in canary.decoys if serves(decoy, canary, last)] == ["layers 22 and 23 exchanged"]
    assert not any(serves(decoy, canary, right) for decoy in canary.decoys)


def test_decoys_are_the_last_pairs_of_layers_and_leave_the_model_as_it_was(backend: FSDP2, tmp_path: Path):
    policy = policy_of(tmp_path, "qwen3", "float32", backend, num_hidden_layers=4)
    probes, before = probes_of(policy, 0), layers_of(policy)
    canary = canary_of(policy, probes, CPU, "float32", "bfloat16", decoys=2)
    assert [decoy.name for decoy in canary.decoys] == ["layers 1 and 2 exchanged", "layers 2 and 3 exchanged"]
    assert layers_of(policy) == before
    engine = tiny_model("qwen3", num_hidden_layers=4).eval()
    for decoy, first in zip(canary.decoys, (1, 2), strict=True):
        expected = scored(exchanged(engine, first, first + 1), canary)
        for ours, theirs in zip(decoy.logprobs, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
    with pytest.raises(RuntimeError):
        for _ in exchanging(policy, 1):
            assert layers_of(policy) != before
            raise RuntimeError
    assert layers_of(policy) == before
    assert len(list(exchanging(policy, 8))) == 3


@pytest.mark.parametrize(("family", "names"), [("MiniMax", []), ("Qwen3-Next", ["0 and 1", "1 and 2"])])
def test_layers_of_two_kinds_are_not_exchanged(family: str, names: list[str], tmp_path: Path):
    """A linear layer of MiniMax fails on the mask of its neighbour: the run ended before its first version."""
    policy = build(family, tmp_path)
    canary = canary_of(policy, probes_of(policy, 0), CPU, "float32", "bfloat16", decoys=DECOYS)
    assert [decoy.name for decoy in canary.decoys] == [f"layers {name} exchanged" for name in names]


@pytest.mark.parametrize(("dtype", "pairs"), [("bfloat16", 1), ("float32", 0)])
def test_only_the_first_canary_of_a_learner_has_decoys_and_none_in_float32(
    dtype: str, pairs: int, backend: FSDP2, tmp_path: Path
):
    sent: list[Canary] = []
    inner = SimpleNamespace(publish=lambda *given: sent.append(given[2]), stats=dict[str, float])
    config = Config(model=ModelConfig(dtype=dtype))
    config.weights.wire_dtype = config.engine.dtype = dtype
    publisher = ProvingPublisher(cast(Publisher, inner), config, policy_of(tmp_path, "qwen2", dtype, backend), CPU)
    for version in range(2):
        publisher.publish(version, [])
    assert [len(canary.decoys) for canary in sent] == [pairs, 0]


@pytest.mark.parametrize(("version", "said"), [(2, r"Lower learner\.lr \(it is 1e\+30\)"), (0, "is broken")])
def test_a_policy_that_gives_no_numbers_is_sent_to_no_engine(
    version: int, said: str, backend: FSDP2, tmp_path: Path
) -> None:
    """An engine refused it as its own failure, and was started again and again."""
    model = policy_of(tmp_path, "llama", "float32", backend)
    config, sent = Config(), []
    config.learner.lr = 1e30
    inner = cast(Publisher, SimpleNamespace(publish=lambda *given: sent.append(given), stats=dict[str, float]))
    publisher = ProvingPublisher(inner, config, model, CPU)
    publisher.publish(1, [])
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=rf"version {version} of the policy .* no engine.*{said}"):
        publisher.publish(version, [])
    assert [given[0] for given in sent] == [1]


def test_what_the_learner_scores_is_the_same_after_it_was_disturbed(backend: FSDP2, tmp_path: Path):
    policy = policy_of(tmp_path, "qwen2", "float32", backend)
    probes = probes_of(policy, 0)
    before, noisy, after = (
        canary_of(policy, probes, CPU, "float32", "float32", with_noise=looked) for looked in (False, True, False)
    )
    assert before.noise == after.noise == np.inf and 0 < noisy.noise < 0.1
    for canary in (noisy, after):
        assert all(map(np.array_equal, canary.logprobs, before.logprobs))
    assert canary_of(policy, probes, CPU, "float32", "float32", with_noise=True).noise == noisy.noise
