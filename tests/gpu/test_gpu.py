"""`python -m tests.gpu` in a tiny form on a CPU, so that it stays usable; with `-m gpu` in full on a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.model.attention_kernel import FLEX
from asyncrl.learner.model.attention_rows import Rows, attend
from tests.forked import forked_from
from tests.gpu import together
from tests.gpu.__main__ import CHECKS, run
from tests.gpu.checks import computed
from tests.gpu.scale import LARGE, TINY

NOT_THERE = (
    "pytest",
    "hypothesis",
    "vllm",
    "ray",
    "zmq",
    "renderers",
    "rich",
    "pyarrow",
    "matplotlib",
    "peft",
    "datasets",
)
"""On the machine with the GPU."""


@pytest.fixture(scope="module")
def backend():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield FSDP2(init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "check", [pytest.param(name, marks=[pytest.mark.slow] if name in together.CHECKS else []) for name in CHECKS]
)
def test_a_check_of_a_gpu_runs_without_one(check: str, backend, folder: Path):
    CHECKS[check](TINY, folder, backend)


def test_flex_attention_which_float32_uses_on_a_gpu_runs_where_names_of_operations_are_noted():
    q, k, v = (torch.randn(194, heads, 16) for heads in (4, 2, 2))
    rows = Rows.of(np.array([150, 1, 43]), q.device)
    names = computed(lambda: attend(FLEX, q, k, v, rows, 0.25, None))
    assert any("flexattention" in name.lower() for name in names), names


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch could use")
def test_the_checks_pass_on_a_gpu():
    assert run(LARGE, list(CHECKS)) == 0


def import_without() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("asyncrl", *NOT_THERE)]:
        del sys.modules[name]
    sys.modules |= dict.fromkeys(NOT_THERE)  # pyright: ignore[reportArgumentType]
    for name in ("fed_replay", "feed"):
        sys.modules.pop(f"tests.learner.{name}", None)
    for name in [name for name in sys.modules if name.startswith(("tests.gpu.", "tests.weights."))]:
        del sys.modules[name]
    for name in ("__main__", "look"):
        importlib.import_module(f"tests.gpu.{name}")


@pytest.mark.slow
def test_they_need_little_to_be_installed():
    process = forked_from("tests.learner.rank_process").Process(target=import_without)
    process.start()
    process.join(120)
    assert process.exitcode == 0
