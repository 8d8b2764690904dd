"""What vLLM is told about memory on a GPU, checked by vLLM's own worker on a GPU that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.utils import request_memory

from asyncrl.engines.vllm.gpu_memory import FIXED, GIB, parameters_in
from asyncrl.engines.vllm.settings import gpu_args
from asyncrl.errors import ConfigError
from asyncrl.schema import Config, EngineConfig, ModelConfig

GPU = 141 * GIB
SHARE = 0.45


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def run(model: Path, **vllm: Any) -> Config:
    return Config(model=ModelConfig(path=str(model)), engine=EngineConfig(name="vllm", dtype="bfloat16", vllm=vllm))


class MadeUpGpu:
    """A GPU of which vLLM uses a part, and another process too."""

    def __init__(self) -> None:
        self.vllm = self.other = 0

    def free(self, device: Any = None) -> tuple[int, int]:
        return GPU - self.vllm - self.other, GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MadeUpGpu:
    made = MadeUpGpu()
    for name, value in {
        "get_memory_info": made.free,
        "memory_stats": lambda device=None: {},
        "memory_reserved": lambda device=None: made.vllm,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", lambda worker: None)
    return made


def kv_bytes_beside(gpu: MadeUpGpu, grows: int, **told: Any) -> int:
    """The KV cache that vLLM's worker decides on while another process grows by so many bytes during its profile."""
    cache = SimpleNamespace(**{"gpu_memory_utilization": SHARE, "kv_cache_memory_bytes": None} | told)
    gpu.vllm = gpu.other = 0
    start = MemorySnapshot(device=torch.device("cuda:0"))

    def profile_run(**given: Any) -> None:
        gpu.vllm, gpu.other = 5 * GIB, grows

    @contextmanager
    def split(**given: Any) -> Iterator[None]:
        yield

    worker: Any = SimpleNamespace(
        cache_config=cache,
        init_snapshot=start,
        requested_memory=request_memory(start, cache),  # pyright: ignore[reportArgumentType]
        model_runner=SimpleNamespace(profile_run=profile_run, model_memory_usage=3 * GIB),
        model_config=SimpleNamespace(multimodal_config=None),
        parallel_config=SimpleNamespace(),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=None)),
        randomize_dummy_inputs=False,
        _scoped_allocator_max_split=split,
    )
    return gpu_worker.Worker.determine_available_memory(worker)


def test_beside_a_learner_vllm_gets_the_same_cache_whatever_the_learner_allocates(model: Path, gpu: MadeUpGpu):
    told = gpu_args(run(model, gpu_memory_utilization=SHARE), "bfloat16", GPU)
    told = {"kv_cache_memory_bytes": told["kv_cache_memory_bytes"]}
    assert (
        kv_bytes_beside(gpu, 0, **told) == kv_bytes_beside(gpu, 27 * GIB, **told) == kv_bytes_beside(gpu, -GIB, **told)
    )
    assert kv_bytes_beside(gpu, 0) - kv_bytes_beside(gpu, 27 * GIB) == 27 * GIB, "vLLM takes it for its own"
    with pytest.raises(AssertionError, match="Error in memory profiling"):
        kv_bytes_beside(gpu, -6 * GIB)


def test_the_cache_is_the_share_less_weights_and_what_computing_takes(model: Path):
    kv = gpu_args(run(model, gpu_memory_utilization=SHARE), "bfloat16", GPU)["kv_cache_memory_bytes"]
    other = int(SHARE * GPU) - kv - 2 * parameters_in(model)
    assert FIXED < other < FIXED + GIB
    assert parameters_in(model) == sum(each.numel() for each in Qwen3ForCausalLM.from_pretrained(model).parameters())


@pytest.mark.parametrize("vllm", [{}, {"gpu_memory_utilization": 0.9}])
def test_an_engine_alone_on_its_gpu_lets_vllm_measure(model: Path, vllm: dict[str, float]):
    assert "kv_cache_memory_bytes" not in gpu_args(run(model, **vllm), "bfloat16", GPU)


def test_what_the_user_says_of_the_cache_is_kept(model: Path):
    config = run(model, gpu_memory_utilization=SHARE, kv_cache_memory_bytes=GIB)
    assert "kv_cache_memory_bytes" not in gpu_args(config, "bfloat16", GPU)
    config = run(model, gpu_memory_utilization=SHARE)
    config.engine.kv_cache_mb = 100
    assert gpu_args(config, "bfloat16", GPU)["kv_cache_memory_bytes"] == 100 << 20


def test_a_model_that_does_not_fit_the_share_is_refused_with_the_arithmetic(model: Path):
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization=0\.45 of a GPU of 4 GiB: 0\.0 GiB of weights and 2\."
    ):
        gpu_args(run(model, gpu_memory_utilization=SHARE), "bfloat16", 4 * GIB)


def test_an_engine_takes_as_many_tokens_per_step_as_vllms_server_and_never_fewer_than_sequences(model: Path):
    theirs = AsyncEngineArgs.get_batch_defaults.__func__(AsyncEngineArgs, 1)[0]  # pyright: ignore
    assert UsageContext.ENGINE_CONTEXT not in theirs, "then vLLM falls back to 2,048"
    assert gpu_args(run(model), "bfloat16", GPU)["max_num_batched_tokens"] == 8192
    config = run(model)
    config.engine.max_sequences = 10_000
    assert gpu_args(config, "bfloat16", GPU)["max_num_batched_tokens"] == 10_000
