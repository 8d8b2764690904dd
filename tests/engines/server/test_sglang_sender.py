"""Weights are sent to servers that form the group and receive them: whole, or seen to be torn; nobody waits for ever.

The servers are `sglang_process.py`: without a model, but with scores that tell the mean of the weights they have.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen3Config

from asyncrl.engines.server import engine as server_engine
from asyncrl.engines.server import sglang_servers
from asyncrl.engines.server.look import look_at_servers
from asyncrl.engines.server.sglang_sender import buckets
from asyncrl.engines.server.sglang_servers import SglangServers
from asyncrl.errors import ConfigError, EngineDiedError
from tests.engines.models import request
from tests.engines.server.sending_worker import config_of, engine_of, killed_at, random_weights
from tests.engines.server.sglang_process import MODULES, SglangProcess
from tests.engines.server.test_engine import PROMPT, wait_until
from tests.forked import forked_from

MODEL = Qwen3Config(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip
"""12 MB: more than a socket takes while nobody reads, in several buckets of at most 1 MiB."""
TIMEOUT_S = 10.0
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    MODEL.save_pretrained(tmp_path)
    monkeypatch.setattr(server_engine, "LOOK_S", 0.05)
    monkeypatch.setattr(server_engine, "SILENT_S", 600.0)
    monkeypatch.setattr(sglang_servers, "RETRY_S", 0.2)
    return tmp_path


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[SglangProcess, SglangProcess]]:
    architectures = AutoConfig.from_pretrained(folder).architectures or []
    servers = SglangProcess(architectures), SglangProcess(architectures, tensor_parallel=2)
    yield servers
    for server in servers:
        server.kill()


@contextmanager
def running(
    folder: Path, *servers: SglangProcess, weights: str = "distributed", timeout_s: float = 60.0
) -> Iterator[SglangServers]:
    engine = engine_of(config_of(str(folder), [each.url for each in servers], weights=weights, timeout_s=timeout_s))
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def load(engine: SglangServers, version: int) -> dict[str, torch.Tensor]:
    sent = random_weights(engine, version)
    engine.load_weights(version, sent)
    return sent


def assert_has(server: SglangProcess, sent: dict[str, torch.Tensor], version: int) -> None:
    state = server.state()
    assert state["weights"].keys() == sent.keys()
    assert all(state["weights"][name].tobytes() == each.numpy().tobytes() for name, each in sent.items())
    assert state["label"].endswith(f":{version}") and not state["paused"] and not state["session"]
    assert state["groups"] == [] and state["flushed"]


def scores(engine: SglangServers) -> list[float]:
    return [float(each[0][0]) for each in engine.score_everywhere([PROMPT])]


def mean(sent: dict[str, torch.Tensor]) -> float:
    return sum(float(each.double().mean()) for each in sent.values()) / len(sent)


def versions(engine: SglangServers, prompts: int = 4) -> list[list[int]]:
    made = [asyncio.run(engine.generate(request(PROMPT + n, new=3)))[0] for n in range(prompts)]
    return [one.policy_versions.tolist() for one in made]


def test_every_process_of_every_server_gets_all_bytes_of_each_version_and_serves_them(folder, pair):
    with running(folder, *pair) as engine:
        for version in range(3):
            sent = load(engine, version)
            for server in pair:
                assert_has(server, sent, version)
            np.testing.assert_allclose(scores(engine), [-mean(sent)] * 2, rtol=1e-5)
            assert versions(engine) == [[version] * 3] * 4
        states = [server.state() for server in pair]
        assert all(state["begun"] and state["updates"] > 9 and not state["read"] for state in states)


def test_with_auto_a_server_that_sees_the_folder_reads_it_and_another_is_sent_the_weights(folder, pair, caplog):
    pair[1].blind()
    with caplog.at_level(logging.INFO), running(folder, *pair, weights="auto") as engine:
        for version in range(2):
            sent = load(engine, version)
            for server in pair:
                assert_has(server, sent, version)
        assert (pair[0].state()["read"], pair[0].state()["updates"]) == (2, 0) and not pair[1].state()["read"]
    said = [each.message for each in caplog.records if "its weights" in each.message]
    assert len(said) == 2 and f"{pair[0].url} reads its weights from" in "".join(said)
    assert f"{pair[1].url} is sent its weights over gloo" in "".join(said)


def test_a_server_killed_while_it_receives_costs_the_others_nothing_and_gets_all_of_it_when_it_is_back(folder, pair):
    with running(folder, *pair) as engine:
        load(engine, 0)
        pair[1].set(updates=0, dies_at=3)
        sent = load(engine, 1)
        pair[1].wait_for_end()
        assert_has(pair[0], sent, 1)
        assert versions(engine) == [[1] * 3] * 4 and engine.stats()["servers"] == 1
        pair[1].kill()
        pair[1].start()
        wait_until(lambda: engine.stats()["servers"] == 2)
        assert not pair[1].state()["begun"]
        assert_has(pair[1], sent, 1)
        sent = load(engine, 2)
        assert_has(pair[1], sent, 2)


def test_a_server_that_stops_while_it_receives_is_left_out_in_time_and_asked_again(folder, pair):
    with running(folder, *pair, timeout_s=TIMEOUT_S) as engine:
        load(engine, 0)
        pair[1].set(updates=0, stops_at=2)
        begun = time.monotonic()
        sent = load(engine, 1)
        assert time.monotonic() - begun < 6 * TIMEOUT_S
        assert_has(pair[0], sent, 1)
        assert engine.stats()["servers"] == 1 and versions(engine) == [[1] * 3] * 4
        pair[1].signal(signal.SIGCONT)
        wait_until(lambda: engine.stats()["servers"] == 2)
        assert_has(pair[1], sent, 1)


def test_a_server_that_takes_no_more_in_the_middle_has_a_label_of_nobody_and_makes_nothing_until_it_has_all(
    folder, pair, monkeypatch
):
    monkeypatch.setattr(sglang_servers, "RETRY_S", 600.0)
    with running(folder, *pair) as engine:
        load(engine, 0)
        pair[1].set(updates=0, refuses_at=4)
        begun = pair[1].state()["begun"]
        sent = load(engine, 1)
        state = pair[1].state()
        assert state["label"].endswith(":1.part") and state["paused"] and 0.1 < state["mean"] < 0.9
        assert versions(engine) == [[1] * 3] * 4 and pair[1].state()["begun"] == begun
        engine._servers[pair[1].url].not_before = 0.0  # now it is asked again
        wait_until(lambda: engine.stats()["servers"] == 2)
        assert_has(pair[1], sent, 1)


def test_a_worker_killed_while_it_sends_leaves_torn_weights_that_are_seen_and_the_next_one_sends_all(folder, pair):
    context = forked_from(*MODULES)
    process = context.Process(target=killed_at, args=(str(folder), [pair[0].url], 4))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    state = pair[0].state()
    assert state["label"].endswith(":1.part") and state["paused"] and state["session"]
    assert 0.1 < state["mean"] < 0.9, "some of version 1's tensors, with means of 1, among those of version 0"
    with running(folder, pair[0]) as engine:
        sent = load(engine, 5)
        assert_has(pair[0], sent, 5)
        np.testing.assert_allclose(scores(engine), [-mean(sent)], rtol=1e-5)
        assert versions(engine) == [[5] * 3] * 4


def test_a_server_that_cannot_connect_is_left_out_in_time_and_the_reason_names_the_address(folder, pair, caplog):
    pair[1].set(unreachable=True)
    with running(folder, *pair, timeout_s=TIMEOUT_S) as engine:
        begun = time.monotonic()
        sent = load(engine, 0)
        assert time.monotonic() - begun < 6 * TIMEOUT_S
        assert_has(pair[0], sent, 0)
        assert versions(engine) == [[0] * 3] * 4
        assert f"{pair[1].url} has not connected to 127.0.0.1:" in caplog.text and "weights.interface" in caplog.text
        pair[1].set(unreachable=False)
        wait_until(lambda: engine.stats()["servers"] == 2)
        assert_has(pair[1], sent, 0)


def test_with_no_server_left_the_engine_ends_and_says_what_each_way_met(folder, pair):
    pair[0].blind()
    pair[0].set(refuses_at=1)
    said = r"Can it read that folder\? Nor could it be sent them: .*Failed to update parameter online"
    with running(folder, pair[0], weights="auto") as engine, pytest.raises(EngineDiedError, match=said):
        load(engine, 0)


def test_a_server_without_sessions_is_refused_with_what_to_do(folder, pair):
    pair[0].set(too_old=True)
    config = config_of(str(folder), [pair[0].url], weights="distributed", timeout_s=60.0)
    with pytest.raises(ConfigError, match=r"no /begin_weight_update.*0\.5\.23 or newer, or set engine\.weights=disk"):
        look_at_servers(config)
    config.engine.weights = "auto"
    look_at_servers(config)


def test_buckets_have_all_tensors_once_aligned_and_are_small_where_a_tensor_is():
    sizes: dict[str, tuple[Any, int]] = {
        "a": (torch.bfloat16, 3), "b": (torch.float32, 5), "c": (torch.uint8, 7), "d": (torch.float32, 90),
        "e": (torch.bfloat16, 11), "f": (torch.int64, 1),
    }  # fmt: skip
    tensors = {name: torch.zeros(count, dtype=dtype) for name, (dtype, count) in sizes.items()}
    made = list(buckets(tensors, 64))
    assert sorted(itertools.chain(*made)) == sorted(tensors)
    for names in made:
        assert len(names) == 1 or sum(tensors[name].nbytes for name in names) <= 64
        offsets = np.cumsum([0, *(tensors[name].nbytes for name in names)])
        assert all(offset % tensors[name].itemsize == 0 for offset, name in zip(offsets, names, strict=False))
    assert list(buckets({}, 64)) == []
