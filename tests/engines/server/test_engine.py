"""Two servers as one engine: what is lost is made again, what is not ours is not taken, who is back is asked to join.

Against `contract.py`: what is sent and what is made of answers. Weights and log-probs: `tests/vllm/test_servers.py`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, Qwen3Config

from asyncrl.engines.factory import make_server_engine
from asyncrl.engines.server import engine as server_engine
from asyncrl.engines.server.look import look_at_servers
from asyncrl.engines.server.receiver import StagedInServers
from asyncrl.engines.server.vllm_servers import VllmServers
from asyncrl.engines.vllm.names import shape_of
from asyncrl.errors import ConfigError, EngineDiedError, GenerationError, RequestError
from asyncrl.schema import Config
from asyncrl.weights.broadcast.staging import Seat
from tests.engines.models import request
from tests.engines.server.contract import ContractServer
from tests.engines.server.test_terms import SETTINGS

MODEL = Qwen3Config(
    vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=8,
)  # fmt: skip
PROMPT = np.arange(1, 9, dtype=np.int32)
WAIT_S = 60.0
SEAT = Seat(host="127.0.0.1", port=1, backend="sockets", epoch=1, rank=1, world=5, timeout_s=WAIT_S, manifest=[])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    MODEL.save_pretrained(tmp_path)
    monkeypatch.setattr(server_engine, "LOOK_S", 0.05)
    monkeypatch.setattr(server_engine, "SILENT_S", 600.0)  # a busy machine makes nobody silent
    return tmp_path


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[ContractServer, ContractServer]]:
    shape = shape_of(AutoConfig.from_pretrained(folder))
    servers = ContractServer(shape), ContractServer(shape)
    yield servers
    for server in servers:
        server.end()


def settings(folder: Path, *servers: ContractServer) -> Config:
    config = Config()
    config.model.path, config.engine.name, config.engine.dtype = str(folder), "server", "float32"
    config.engine.urls = [server.url for server in servers]
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 24, 16
    return config


def made(folder: Path, *servers: ContractServer) -> VllmServers:
    engine = make_server_engine(settings(folder, *servers))
    assert isinstance(engine, VllmServers)
    return engine


def load(engine: VllmServers, version: int) -> None:
    """As after a `receive` on all servers that are there."""
    receiver = engine.receiver()
    assert receiver.width
    shapes = dict(engine._parameters._required)
    engine.load_weights(version, StagedInServers(shapes=shapes, urls=tuple(receiver._asked)))


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.005)


def wait_until(true: Callable[[], object]) -> None:
    asyncio.run(until(true))


def test_each_server_is_given_a_version_and_tokens_carry_it(folder, pair):
    engine = made(folder, *pair)
    for version in (0, 1):
        load(engine, version)
        (one,) = asyncio.run(engine.generate(request(PROMPT, new=3)))
        assert one.token_ids.tolist() == [7, 8, 9] and one.policy_versions.tolist() == [version] * 3
    assert [server.loads for server in pair] == [2, 2] and not any(server.paused for server in pair)
    assert pair[0].label == pair[1].label and engine.policy_version == 1
    asyncio.run(engine.close())


def test_a_request_that_no_server_holds_names_the_option_of_the_server(folder, pair):
    engine = made(folder, *pair)
    holds = engine.max_length
    with pytest.raises(RequestError, match=f"engine holds {holds}. .*the servers with --max-model-len {holds + 5}$"):
        asyncio.run(engine.generate(request(PROMPT[:3], new=holds + 2)))
    asyncio.run(engine.close())


def test_what_a_server_makes_for_others_counts_where_the_least_loaded_is_looked_for(folder, pair):
    engine = made(folder, *pair)
    load(engine, 0)
    pair[0].running, pair[0].waiting = 40, 20
    wait_until(lambda: engine.stats()["others"] > 10.0)
    for number in range(3):
        asyncio.run(engine.generate(request(PROMPT + number, new=3)))
    assert (len(pair[0].begun), len(pair[1].begun)) == (0, 3)
    asyncio.run(engine.close())


def test_a_group_stays_together_and_groups_are_spread(folder, pair):
    engine = made(folder, *pair)
    load(engine, 0)

    async def groups() -> None:
        for server in pair:
            server.held.set()
        prompts = [PROMPT, PROMPT + 1, PROMPT, PROMPT + 1]
        tasks = [asyncio.create_task(engine.generate(request(prompt, 3, new=3))) for prompt in prompts[:1]]
        await until(lambda: len(pair[0].begun) == 3)
        tasks += [asyncio.create_task(engine.generate(request(prompt, 3, new=3))) for prompt in prompts[1:2]]
        await until(lambda: len(pair[1].begun) == 3)
        tasks += [asyncio.create_task(engine.generate(request(prompt, 3, new=3))) for prompt in prompts[2:]]
        await until(lambda: len(pair[0].begun) == len(pair[1].begun) == 6)
        for server in pair:
            server.held.clear()
        await asyncio.gather(*tasks)

    asyncio.run(groups())
    for server in pair:
        assert len({tuple(body["token_ids"]) for body in server.begun}) == 1
    asyncio.run(engine.close())


def test_what_a_lost_server_was_making_is_made_by_the_other_and_back_it_has_to_be_loaded(folder, pair):
    engine = made(folder, *pair)
    receiver = engine.receiver()
    load(engine, 0)
    assert receiver.width == 4 and not receiver.changed()

    async def work() -> list:
        pair[0].held.set()
        task = asyncio.create_task(engine.generate(request(PROMPT, 2, new=3)))
        await until(lambda: len(pair[0].begun) == 2)
        await asyncio.to_thread(pair[0].stop)
        return await task

    completions = asyncio.run(work())
    assert all(one.policy_versions.tolist() == [0] * 3 for one in completions) and len(pair[1].ended) == 2
    assert receiver.changed() and receiver.width == 2
    pair[0].start()
    wait_until(lambda: engine.stats()["servers"] == 1 and receiver.changed())
    (one,) = asyncio.run(engine.generate(request(PROMPT + 3, new=3)))  # not by the one without our weights
    assert not pair[0].begun and one.policy_versions.tolist() == [0] * 3
    load(engine, 0)
    assert pair[0].label == pair[1].label and engine.stats()["servers"] == 2
    asyncio.run(engine.close())


def test_weights_of_somebody_else_are_noticed_before_a_token_of_them_is_taken(folder, pair):
    engine = made(folder, *pair)
    load(engine, 0)
    pair[0].label = "another:0"
    completions = asyncio.run(engine.generate(request(PROMPT, 4, new=3)))
    assert all(one.policy_versions.tolist() == [0] * 3 for one in completions) and len(pair[1].ended) == 4
    assert engine.stats()["lost_servers"] >= 1
    asyncio.run(engine.close())


def test_a_load_without_any_server_ends_the_engine_and_a_wait_for_one_is_bounded(folder, pair, monkeypatch, caplog):
    engine = made(folder, *pair)
    assert engine._without_s == 0.8 * Config().replay.wait_timeout_s / 2
    load(engine, 0)
    for server in pair:
        server.stop()
    with pytest.raises(EngineDiedError, match=r"no server of engine\.urls is left"):
        engine.load_weights(1, StagedInServers(shapes=dict(engine._parameters._required), urls=tuple(engine._servers)))
    # The worker gives up after half of replay.wait_timeout_s, and would say nothing of servers.
    engine._without_s = 0.1
    with pytest.raises(EngineDiedError, match=r"no server of engine\.urls was left for 0\.1 s"):
        asyncio.run(engine.generate(request(PROMPT, new=3)))
    monkeypatch.setattr(server_engine, "PATIENCE_S", 0.2)
    asyncio.run(engine.close())
    with pytest.raises(GenerationError, match="closed"):
        asyncio.run(engine.generate(request(PROMPT, new=3)))
    caplog.clear()
    with pytest.raises(EngineDiedError, match="Is the address right"):
        made(folder, *pair)
    assert caplog.text.count("no server of engine.urls can be used yet") == 1, "said once, however often it looks"


def test_each_process_of_a_server_says_what_it_keeps_and_a_server_that_does_not_is_in_no_seat(folder, pair):
    engine = made(folder, *pair)
    pair[0].wanted = [["lm_head.weight", [[0, 16, 0, 8]]]]
    receiver = engine.receiver()
    assert receiver.width == 4
    assert [*receiver.wanted()] == [{"lm_head.weight": (((0, 16), (0, 8)),)}] * 2 + [{}] * 2
    load(engine, 0)
    pair[0].stop()
    pair[0].start()  # as quick as this, nobody may have seen it; it knows of no parts
    pair[0].wanted = []
    assert receiver.width == 4 and [*receiver.wanted()] == [{}] * 4
    pair[0].stop()
    assert receiver.width in (0, 2)
    wait_until(lambda: receiver.width == 2)
    assert [*receiver.wanted()] == [{}] * 2
    asyncio.run(engine.close())


@pytest.mark.parametrize("status", [404, 401, 400])
def test_one_that_came_back_as_another_while_it_had_a_seat_is_lost_and_the_other_keeps_its_own(status, folder, pair):
    engine = made(folder, *pair)
    receiver = engine.receiver()
    load(engine, 0)
    assert receiver.width == 4
    pair[0].rpc_status = status
    receiver.leave()
    assert receiver.changed() and receiver.width == 2
    wait_until(lambda: str(status) in engine._servers[pair[0].url].why)
    pair[0].rpc_status = 200
    wait_until(lambda: receiver.width == 4)
    pair[0].rpc_status = status
    with pytest.raises(RuntimeError, match=f"status {status}"):
        receiver.join(SEAT)
    assert list(engine._there()) == [pair[1].url]
    asyncio.run(engine.close())


def test_a_newcomer_that_does_not_join_is_left_alone_and_those_that_serve_go_on(folder, pair):
    pair[1].stop()
    engine = made(folder, *pair)
    receiver = engine.receiver()
    load(engine, 0)
    assert receiver.width == 2 and not receiver.changed()
    pair[1].start()
    wait_until(receiver.changed)
    engine._report_broken_join([server.url for server in pair], "no answer")
    assert not receiver.changed() and list(engine._there()) == [pair[0].url]
    engine._report_broken_join([pair[0].url], "the publisher died")  # alone, it is no reason
    assert list(engine._there()) == [pair[0].url]
    asyncio.run(engine.close())


def test_a_worker_that_starts_while_a_server_cannot_be_used_goes_on_with_the_other_until_it_can(folder, pair, caplog):
    ours, pair[1].shape = pair[1].shape, pair[1].shape | {"vocab_size": 64}
    engine = made(folder, *pair)
    load(engine, 0)
    assert list(engine._there()) == [pair[0].url]
    pair[0].stop()  # looked for again and again, and told each once
    wait_until(lambda: engine.stats()["servers"] == 0)
    pair[0].start()
    wait_until(lambda: pair[0].url in engine._there())
    assert sum("vocab_size=64" in said for said in caplog.messages) == 1
    pair[1].shape = ours
    wait_until(lambda: len(engine._there()) == 2)
    load(engine, 1)
    assert [server.loads for server in pair] == [1, 1] and engine.stats()["servers"] == 2
    asyncio.run(engine.close())


def test_one_that_cannot_be_used_beside_one_that_is_down_is_waited_for(folder, pair):
    ours, pair[1].shape = pair[1].shape, pair[1].shape | {"vocab_size": 64}
    pair[0].stop()
    mended = threading.Timer(0.5, lambda: setattr(pair[1], "shape", ours))
    mended.start()
    engine = made(folder, *pair)
    assert list(engine._there()) == [pair[1].url]
    asyncio.run(engine.close())


def test_servers_that_all_have_another_model_are_refused_and_before_a_run_each_is(folder, pair):
    config = settings(folder, *pair)
    look_at_servers(config)
    pair[1].shape = pair[0].shape | {"vocab_size": 64}
    with pytest.raises(ConfigError, match=f"{pair[1].url} cannot be used: it serves a model with vocab_size=64"):
        look_at_servers(config)
    pair[0].shape = pair[1].shape
    with pytest.raises(ConfigError, match="cannot be used: it serves a model with vocab_size=64"):
        made(folder, *pair)


def test_a_running_sequence_spans_an_update_and_one_cancelled_gives_its_place_back(folder, pair):
    engine = made(folder, pair[0])
    load(engine, 0)

    async def work() -> list:
        pair[0].held.set()
        running = asyncio.create_task(engine.generate(request(PROMPT, 2, new=3)))
        cancelled = asyncio.create_task(engine.generate(request(PROMPT, 1, new=3)))
        await until(lambda: len(pair[0].begun) == 3 and engine.stats()["generated_tokens"] >= 3)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await until(lambda: engine.stats()["running"] == 2)
        await asyncio.to_thread(load, engine, 1)
        pair[0].held.clear()
        return await running

    assert [one.policy_versions.tolist() for one in asyncio.run(work())] == [[0, 1, 1]] * 2
    assert engine.stats()["running"] == 0
    assert engine._router.load(pair[0].url) == 0
    asyncio.run(engine.close())


def test_what_a_server_answers_that_is_nothing_ends_no_look_at_the_others(folder, pair):
    engine = made(folder, *pair)
    load(engine, 0)
    pair[0].instead["/weight_info"] = ["no", "vLLM"]
    wait_until(lambda: "did not answer as vLLM does" in engine._servers[pair[0].url].why)
    pair[0].stop()
    wait_until(lambda: engine.stats()["servers"] == 1)
    pair[0].start()  # that it is back is seen by the same looks
    wait_until(lambda: pair[0].url in engine._there())
    asyncio.run(engine.close())


def test_one_that_takes_connections_and_says_nothing_hides_no_other(folder, pair):
    engine = made(folder, *pair)
    load(engine, 0)
    pair[0].stop()
    wait_until(lambda: engine.stats()["servers"] == 1)
    pair[0].hangs = "/server_info"
    pair[0].start()
    pair[1].label = "another:0"
    wait_until(lambda: engine.stats()["servers"] == 0)
    asyncio.run(engine.close())


def test_one_that_came_back_with_less_room_is_not_used(folder, pair):
    engine = made(folder, *pair)
    load(engine, 0)
    small = SETTINGS | {"model_config": SETTINGS["model_config"] | {"max_model_len": 32}}
    pair[0].stop()
    wait_until(lambda: engine.stats()["servers"] == 1)
    pair[0].instead["/server_info"] = {"vllm_config": small}
    pair[0].start()
    wait_until(lambda: "Start it with --max-model-len 64" in engine._servers[pair[0].url].why)
    assert list(engine._there()) == [pair[1].url]
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("held", "new", "said"),
    [
        (32, 16, r"data.max_prompt_tokens=24 \+ rollout.max_new_tokens=16 = 40. Start it with --max-model-len 40"),
        (24, 0, "the canary takes 25. Start it with --max-model-len 25"),
    ],
)
def test_one_that_holds_less_than_the_run_needs_is_refused_before_it_and_by_a_worker(folder, pair, held, new, said):
    """Its worker died of a canary that was too long for it, and was started again, without an end."""
    config = settings(folder, *pair)
    config.rollout.max_new_tokens = new
    small = SETTINGS | {"model_config": SETTINGS["model_config"] | {"max_model_len": held}}
    pair[1].instead["/server_info"] = {"vllm_config": small}
    with pytest.raises(ConfigError, match=f"{pair[1].url} cannot be used: it holds {held} tokens, and {said}"):
        look_at_servers(config)
    engine = make_server_engine(config)  # goes on with the other
    assert isinstance(engine, VllmServers) and list(engine._there()) == [pair[0].url]
    assert "cannot be used: it holds" in engine._servers[pair[1].url].why
    asyncio.run(engine.close())
    pair[0].instead = dict(pair[1].instead)
    with pytest.raises(ConfigError, match=said):
        make_server_engine(config)


def test_a_request_that_meets_a_server_without_our_key_is_made_by_the_other(folder, pair):
    engine = made(folder, *pair)
    load(engine, 0)
    pair[0].refuses = True
    completions = asyncio.run(engine.generate(request(PROMPT, 2, new=3)))
    assert len(completions) == len(pair[1].ended) == 2 and not pair[0].ended
    asyncio.run(engine.close())
