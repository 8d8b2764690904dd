"""`python -m tests.gpu` in a tiny form on a CPU, so that it stays usable; with `-m gpu` in full on a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

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
from tests.gpu import first, together
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


@pytest.mark.parametrize("block", sorted({*first.OWN} - {"collectives"}))
def test_a_block_of_the_first_minutes_runs_without_a_gpu(block: str):
    assert json.loads(json.dumps(first.OWN[block](torch.device("cpu"))))


def test_every_block_of_the_first_minutes_is_there_and_they_fit_into_twelve():
    given = [arguments for _, arguments in first.BLOCKS.values() if arguments]
    names = [name for arguments in given for name in arguments[arguments.index("--only") + 1 :]]
    assert sorted(names) == sorted(CHECKS)
    assert set(first.OWN) == {block for block, (_, arguments) in first.BLOCKS.items() if not arguments}
    assert sum(limit for limit, _ in first.BLOCKS.values()) <= first.ALL_S


def ran(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["first", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit):
        first.main()
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


@pytest.mark.slow
def test_the_first_minutes_end_with_one_line_of_what_each_process_found(monkeypatch, capfd):
    one, two, line = ran(monkeypatch, capfd, "--only", "facts", "collectives")
    assert (one["block"], one["passed"], two["block"], two["passed"]) == ("facts", True, "collectives", True)
    assert line["benchmark"] == "tests.gpu.first" and line["result"]["facts"]["torch"] == torch.__version__


def test_a_block_that_takes_too_long_is_killed_and_one_of_the_first_ends_all(monkeypatch, capfd):
    monkeypatch.setitem(first.BLOCKS, "facts", (0.01, ()))
    found, line = ran(monkeypatch, capfd, "--only", "facts", "head")
    assert not found["passed"] and "killed after" in found["why"] and list(line["result"]) == ["facts"]


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
    for name in ("__main__", "look", "first"):
        importlib.import_module(f"tests.gpu.{name}")


@pytest.mark.slow
def test_they_need_little_to_be_installed():
    process = forked_from("tests.learner.rank_process").Process(target=import_without)
    process.start()
    process.join(120)
    assert process.exitcode == 0
