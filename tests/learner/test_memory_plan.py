"""The plan of memory against models that are built and sharded as in a run: fake tensors, made-up ranks."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from asyncrl.checks.architecture import COMPUTED_TOGETHER
from asyncrl.checks.parallel import ParallelDims
from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.batch.packing import Packing, plan_packing
from asyncrl.learner.memory_plan import Sizes, head_backward_rows, head_bytes, held, on_one_of, share, stacked
from asyncrl.learner.model.attention import PACKED_ATTENTION
from asyncrl.learner.model.building import prepare
from asyncrl.learner.model.lora import NAME, add_adapters
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.learner.parallel.sharding import numbers_computed_with, shards_of
from asyncrl.learner.roles import Roles, build_roles
from asyncrl.learner.step.memory_peak import begin_peak, peak_row, planned_bytes
from asyncrl.memory.model_size import ModelSize, model_size
from asyncrl.memory.usage import (
    activation_rows,
    buckets_bytes,
    host_rows,
    learner_rows,
    memory_lines,
    policy_held,
    policy_rows,
    rank_bytes,
    role_rows,
)
from asyncrl.schema import (
    AdvantageConfig,
    Config,
    EngineConfig,
    LearnerConfig,
    ModelConfig,
    PlacementConfig,
)
from asyncrl.settings.weights import WeightsConfig
from tests.learner.families import FAMILIES, tiny_family
from tests.learner.feed import make_lease, make_step, tiny_model

WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
QWEN = {
    "7b": (3584, 18944, 28, 28, 4),
    "7b in 2 layers": (3584, 18944, 2, 28, 4),
    "32b": (5120, 27648, 64, 40, 8),
    "72b": (8192, 29568, 80, 64, 8),
}
"""Of Qwen2.5."""
LONG = (pytest.mark.slow, pytest.mark.long)


def qwen(size: str) -> Qwen2Config:
    sizes = dict(zip(WIDTHS, QWEN[size], strict=True))
    return Qwen2Config(**sizes, vocab_size=152064, tie_word_embeddings=False)


@contextmanager
def made_up_ranks(shards: int, together: int = 1, experts: int = 1) -> Iterator[DeviceMesh]:
    dims = ParallelDims(shard=shards, tensor=together, expert=experts)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.ranks)
    try:
        yield init_device_mesh("cpu", tuple(dims.mesh.values()), mesh_dim_names=tuple(dims.mesh))
    finally:
        dist.destroy_process_group()


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize(
    ("size", "ranks"),
    [
        ("7b in 2 layers", 3),
        pytest.param("7b", 8, marks=LONG),
        pytest.param("32b", 32, marks=LONG),
        pytest.param("72b", 64, marks=LONG),
    ],
)
def test_parameters_and_optimizer_of_a_rank_are_those_of_the_plan_to_the_byte(size: str, ranks: int, tmp_path: Path):
    with made_up_ranks(ranks) as mesh, FakeTensorMode():
        model = PolicyModel(AutoModelForCausalLM.from_config(qwen(size)))
        plan = held((tuple(parameter.shape) for parameter in model.parameters()), ranks)
        write_headers(tmp_path, qwen(size), model.hf)
        FSDP2(mesh).shard(model, torch.bfloat16)
        optimizer = make_optimizer(model.parameters(), LearnerConfig())
        state = [value for each in optimizer.state.values() for value in each.values()]
        assert plan.weights == sum(map(local_bytes, model.parameters()))
        assert plan.optimizer == sum(map(local_bytes, state))
        assert plan.gradients == plan.weights
    read = model_size(tmp_path)
    assert read is not None and held(read.shapes.values(), ranks) == plan


@pytest.mark.parametrize(
    ("size", "shards", "together"), [("7b in 2 layers", 3, 2), pytest.param("72b", 8, 8, marks=LONG)]
)
def test_weights_of_a_rank_that_computes_with_others_are_those_of_the_plan_to_the_byte(
    size: str, shards: int, together: int, tmp_path: Path
):
    with made_up_ranks(shards, together) as mesh:
        with torch.device("meta"):
            model = PolicyModel(AutoModelForCausalLM.from_config(qwen(size)))
        write_headers(tmp_path, qwen(size), model.hf)
        FSDP2(mesh).shard(model, torch.bfloat16)
        read = model_size(tmp_path)
        assert read is not None
        planned = held(on_one_of(read.shapes, together).values(), shards)
        assert planned.weights == sum(map(local_bytes, model.parameters()))
        assert all(shards_of(each) in (shards, shards * together) for each in model.parameters())


@pytest.mark.parametrize("family", [name for name, (kind, _) in FAMILIES.items() if kind in COMPUTED_TOGETHER])
def test_so_they_are_with_adapters_of_every_family_that_ranks_compute_together(family: str):
    with made_up_ranks(3, 2) as mesh:
        model = PolicyModel(tiny_family(family))
        model.adapters = add_adapters(model.hf, ModelConfig(path="tiny", lora_rank=5), "")
        shapes = {name.replace(f".{NAME}", ""): tuple(each.shape) for name, each in model.hf.named_parameters()}
        FSDP2(mesh).shard(model, torch.bfloat16)
        # Frozen or trained, they are in fp32 here.
        planned = held(
            on_one_of({name.replace(".base_layer", ""): each for name, each in shapes.items()}, 2).values(), 3
        )
        assert planned.weights == sum(map(local_bytes, model.parameters()))


@pytest.mark.parametrize(
    ("layers", "experts", "ranks", "spread"), [(2, 12, 6, 2), pytest.param(48, 128, 64, 8, marks=LONG)]
)
def test_what_a_rank_with_experts_of_its_own_holds_is_that_of_the_plan_to_the_byte(
    layers: int, experts: int, ranks: int, spread: int, tmp_path: Path
):
    # Of Qwen3-30B-A3B.
    sizes = dict(zip(WIDTHS, (2048, 6144, layers, 32, 4), strict=True))
    given = Qwen3MoeConfig(**sizes, num_experts=experts, moe_intermediate_size=768, vocab_size=151936)
    with made_up_ranks(ranks, experts=spread) as mesh:
        with torch.device("meta"):
            model = PolicyModel(AutoModelForCausalLM.from_config(given))
        write_headers(tmp_path, given, model.hf)
        read = model_size(tmp_path)
        assert read is not None
        learner = LearnerConfig(ranks=ranks, expert_parallel=spread)
        config = Config(model=ModelConfig(path="tiny", dtype="bfloat16"), learner=learner)
        planned = policy_held(config, read)
        FSDP2(mesh).shard(model, torch.bfloat16)
        assert planned.weights == sum(map(local_bytes, model.parameters()))
        assert planned.optimizer == 2 * planned.weights + 4 * len(list(model.parameters()))
    # Its gradients before they are reduced: of its own experts, and of all else.
    computed = sum(map(numbers_computed_with, model.parameters()))
    stacks = sum(math.prod(shape) for name, shape in read.shapes.items() if ".experts." in name)
    assert computed == read.parameters - stacks + stacks // spread
    assert 4 * computed in [count for count, _ in learner_rows(config, read)]
    assert rank_bytes(config, read) < rank_bytes(replace(config, learner=LearnerConfig(ranks=ranks)), read)


def test_adapters_of_a_rank_that_computes_with_others_are_those_of_the_plan_to_the_byte(tmp_path: Path):
    with made_up_ranks(3, 2) as mesh:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(qwen("7b in 2 layers"))
        write_headers(tmp_path, qwen("7b in 2 layers"), hf)
        settings = ModelConfig(path="tiny", lora_rank=5)
        model = PolicyModel(hf)
        model.adapters = add_adapters(hf, settings, "")
        FSDP2(mesh).shard(model, torch.bfloat16)
        read = model_size(tmp_path)
        assert read is not None
        planned = held(on_one_of(read.adapters(5, []), 2).values(), 3)
        trained = [each for each in model.parameters() if each.requires_grad]
        assert planned.weights == sum(map(local_bytes, trained))
        assert planned.optimizer == 2 * planned.weights + 4 * len(trained)
        config = Config(model=settings, learner=LearnerConfig(ranks=6, tensor_parallel=2))
        assert policy_held(config, read) == planned


def two_layers_in(folder: Path) -> tuple[PreTrainedModel, ModelSize]:
    """A model of two layers of a 7 B, without storage, and what is read of its files in `folder`."""
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(qwen("7b in 2 layers"))
    write_headers(folder, qwen("7b in 2 layers"), hf)
    read = model_size(folder)
    assert read is not None
    return hf, read


def test_moments_in_8_bits_are_planned_by_their_bytes_critic_and_copy_too(tmp_path: Path):
    config = Config(
        model=ModelConfig(path=str(tmp_path)),
        learner=LearnerConfig(ranks=2, optimizer="adamw_8bit"),
        advantage=AdvantageConfig(estimator="gae", baseline="none"),
    )
    hf, model = two_layers_in(tmp_path)
    matrices = sum(each.numel() for each in hf.parameters() if each.ndim == 2)
    rest = sum(each.numel() for each in hf.parameters() if each.ndim == 1)
    mine = policy_held(config, model)
    assert mine.optimizer == 2.25 * matrices / 2 + 8 * rest / 2 + 4 * len(list(hf.parameters()))
    ((critic, said),) = role_rows(config, model)
    assert said == "master weights + gradients + Adam moments of the critic"
    assert critic == pytest.approx(10.25 * model.of_critic / 2)


@pytest.mark.parametrize("lora", [0, 4])
def test_what_is_offloaded_is_planned_in_host_memory_and_nowhere_else(lora: int, tmp_path: Path):
    config = Config(
        model=ModelConfig(path="tiny", dtype="bfloat16", lora_rank=lora),
        learner=LearnerConfig(ranks=2, proximal_ema=0.9),
        engine=EngineConfig(dtype="bfloat16"),
        advantage=AdvantageConfig(estimator="gae", baseline="none"),
    )
    _, model = two_layers_in(tmp_path)
    here, there, critic = {}, {}, 16 * model.of_critic / 2
    for offload in ("none", "optimizer", "all"):
        config.learner.offload = offload
        here[offload] = rank_bytes(config, model)
        there[offload] = sum(count for count, _ in host_rows(config, model))
        assert here[offload] + there[offload] == here["none"]
    assert there["none"] == 0
    assert there["optimizer"] == policy_held(config, model).optimizer + critic / 2
    base = 2 * held(model.shapes.values(), 2).weights / 4 if lora else 0
    assert there["all"] == policy_held(config, model).total + base + critic + 4 * model.parameters / 2


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [0, 4])
def test_all_models_of_a_learner_are_planned_as_they_are_counted(family: str, tied: bool, lora: int, tmp_path: Path):
    """From the files that transformers writes, which name each expert; of the critic without the head it has not."""
    tiny_model(family, tie_word_embeddings=tied).save_pretrained(tmp_path)
    config = Config(
        model=ModelConfig(path=str(tmp_path), dtype="float32", lora_rank=lora),
        learner=LearnerConfig(ranks=1, proximal_ema=0.9),
        engine=EngineConfig(dtype="float32"),
        advantage=AdvantageConfig(estimator="gae", baseline="none", kl_coef=0.1),
        weights=WeightsConfig(wire_dtype="float32"),
    )
    model = model_size(tmp_path)
    assert model is not None
    roles = build_roles(config, torch.device("cpu"), None)
    assert roles.critic is not None and roles.average is not None and (roles.reference is None) == (lora > 0)
    trained = [each for each in roles.policy.parameters() if each.requires_grad]
    state = [value for each in roles.optimizer.state.values() for value in each.values()]
    counted = sum(map(local_bytes, [*roles.policy.parameters(), *trained, *state]))
    planned = {said.rpartition("of the ")[2]: count for count, said in role_rows(config, model)}
    # The model has gate and up of a layer's experts in one tensor, with one count of steps.
    assert sum(count for count, _ in policy_rows(config, model)[0]) == pytest.approx(counted, abs=8)
    assert planned["averaged policy"] == sum(map(local_bytes, roles.average.parameters()))
    if roles.reference is not None:
        assert planned["reference"] == sum(map(local_bytes, roles.reference.parameters()))
    of_critic = sum(map(local_bytes, roles.critic.model.parameters()))
    assert planned["critic"] == pytest.approx(4 * of_critic, rel=0.01)
    saved = next(line for line in memory_lines(config, model) if "learner.async_save" in line)
    held_twice = policy_held(config, model)
    copied = held_twice.weights + held_twice.optimizer + 3 * of_critic + planned["averaged policy"]
    found = re.search(r": ([\d.]+) ([KM])iB", saved)
    assert found is not None
    assert float(found[1]) * {"K": 1 << 10, "M": 1 << 20}[found[2]] == pytest.approx(copied, rel=0.05)


def test_a_sender_is_planned_four_buckets_of_the_largest_tensor_at_least_and_no_more_than_the_model(tmp_path: Path):
    hf = tiny_model("qwen2")
    hf.save_pretrained(tmp_path)
    model = model_size(tmp_path)
    assert model is not None
    config = Config(model=ModelConfig(path=str(tmp_path)), weights=WeightsConfig(wire_dtype="bfloat16"))
    assert buckets_bytes(config, model) == 4 * 2 * hf.num_parameters(), "one bucket"
    whole = replace(model, shapes={"model.embed_tokens.weight": (1 << 20, 512)}, parameters=1 << 30)
    assert buckets_bytes(config, whole) == 4 * 2 * (1 << 20) * 512


@pytest.mark.parametrize(
    ("gpus", "device", "kind", "rows"), [(8, "auto", "cuda", 4352), (8, "cpu", "cpu", 512), (0, "auto", "cpu", 512)]
)
def test_the_head_is_planned_in_the_chunks_of_what_it_will_compute_on(
    gpus: int, device: str, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = Sizes.of(qwen("7b").to_dict())
    assert sizes is not None and head_backward_rows(sizes.vocabulary, kind) == rows
    for tokens in (16_384, 256):
        config = Config(
            model=ModelConfig(path="tiny", dtype="bfloat16"),
            learner=LearnerConfig(device=device, max_tokens_per_microbatch=tokens),
            placement=PlacementConfig(gpus=gpus),
        )
        planned, said = activation_rows(config, sizes, 1)[1]
        assert planned == head_bytes(sizes.vocabulary, sizes.hidden, 2, kind, tokens)
        assert f"{min(rows, tokens)} * 152064 logits" in said


def write_headers(folder: Path, config: PreTrainedConfig, hf: PreTrainedModel) -> None:
    """A checkpoint with everything but the numbers."""
    config.save_pretrained(folder)
    entries = {name: {"dtype": "BF16", "shape": list(each.shape)} for name, each in hf.named_parameters()}
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_a_layer_keeps_for_its_backward_is_about_as_planned(family: str, dtype: torch.dtype):
    lengths = np.array([40, 56])
    packing = plan_packing(np.arange(96), lengths, 96)
    kept, sizes = {}, None
    for layers in (1, 2):
        hf: Any = tiny_model(
            family, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_hidden_layers=layers
        )
        hf.set_attn_implementation(PACKED_ATTENTION)
        kept[layers] = saved_bytes(PolicyModel(hf.to(dtype=dtype)), packing)
        sizes = Sizes.of(hf.config.to_dict())
    assert sizes is not None
    planned = sizes.layer_bytes(96, 96, dtype.itemsize)
    assert 0.8 < (kept[2] - kept[1]) / planned < 1.25


def saved_bytes(model: PolicyModel, packing: Packing) -> int:
    """Of everything that autograd keeps in a forward, but for parameters; each storage once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    alive = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.arange(96)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.hidden_states(ids, torch.cat([torch.arange(40), torch.arange(56)]), packing)
    return sum(found.values())


def test_experts_are_planned_as_one_tensor_of_a_layer():
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in (0, 1) for e in range(5)]
    found = stacked(dict.fromkeys(names, (8, 4)) | {"lm_head.weight": (7, 4)})
    assert sorted(map(tuple, found.values())) == [(5, 8, 4), (5, 8, 4), (7, 4)]
    assert share((5, 8, 4), 4) == 2 * 32 and share((7, 4), 4) == 8 and share((3,), 8) == 1


def test_a_checkpointed_model_keeps_one_layer_and_the_input_of_each():
    sizes = Sizes(layers=10, hidden=4, queries=4, keys=2, inner=8, vocabulary=100)
    each = sizes.layer_bytes(3, 3, 2)
    assert sizes.activations(3, 3, 2) == 10 * each
    assert sizes.activations(3, 3, 2, every=1) == each + 10 * 3 * 4 * 2
    assert sizes.activations(3, 3, 2, every=4) == 8 * each + 3 * 3 * 4 * 2
    assert (
        sizes.activations(3, 5, 2, every=1, keep="attention") == sizes.layer_bytes(3, 5, 2) + 10 * (3 * 4 + 5 * 4) * 2
    )


@pytest.mark.parametrize("keep", ["attention", "matmul"])
def test_what_a_checkpointed_layer_keeps_is_about_as_planned(keep: str):
    packing, live = plan_packing(np.arange(96), np.array([40, 56]), 96), []
    for layers in (2, 4):
        hf: Any = tiny_model("qwen3", hidden_size=128, intermediate_size=384, num_hidden_layers=layers, head_dim=32)
        hf.set_attn_implementation(PACKED_ATTENTION)
        config = ModelConfig(path="tiny", activation_checkpointing=True, checkpoint_keep=keep)
        live.append(allocated(PolicyModel(prepare(hf, config)), packing))
    sizes = Sizes.of(hf.config.to_dict())
    assert sizes is not None
    planned = 2 * sizes.kept_bytes(96, sum(rows * length for rows, length in packing.padded.shapes), 4, keep)
    assert 0.8 < (live[1] - live[0]) / planned < 1.25


def allocated(model: PolicyModel, packing: Packing) -> int:
    """Bytes of what a forward made and that is still there, for the backward, when it is over."""
    ids, positions = torch.arange(96), torch.cat([torch.arange(40), torch.arange(56)])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        out = model.hidden_states(ids, positions, packing)
    assert out.requires_grad and seen.profiler is not None and seen.profiler.kineto_results is not None
    events: Any = seen.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def test_the_peak_of_a_step_on_a_gpu_stands_beside_the_plan_of_its_largest_micro_batch(monkeypatch: pytest.MonkeyPatch):
    plan, groups = make_step(3)
    lease, cpu = make_lease(plan, groups), torch.device("cpu")
    members = sorted(lease.trajectories)
    small, large = (pack(lease, chosen, cpu) for chosen in (members[:2], members))
    policy = PolicyModel(tiny_model())
    roles, config = Roles(policy=policy, optimizer=torch.optim.SGD(policy.parameters())), ModelConfig(path="tiny")
    planned = planned_bytes(config, roles, [small, large])
    assert planned == planned_bytes(config, roles, [large]) > planned_bytes(config, roles, [small])
    assert planned > sum(16 * each.numel() for each in policy.parameters()), "weights, gradients and moments"
    begin_peak(cpu)
    assert peak_row(config, roles, [large], cpu) == {}, "only a GPU's allocator counts"
    asked = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 3e9)
    gpu = torch.device("cuda", 0)
    begin_peak(gpu)
    row = peak_row(config, roles, [small, large], gpu)
    assert row == {"memory/peak_gb": 3.0, "memory/planned_gb": planned / 1e9} and asked == [gpu, gpu]
