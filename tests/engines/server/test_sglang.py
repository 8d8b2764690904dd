"""The SGLang link against `contract_sglang.py` alone: versions are never mixed, and weights arrive complete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from asyncrl.checks.servers import too_short
from asyncrl.engines.factory import make_server_engine
from asyncrl.engines.server import engine as server_engine
from asyncrl.engines.server import sglang_servers
from asyncrl.engines.server.answers import Answer, ServerGoneError
from asyncrl.engines.server.link import Load
from asyncrl.engines.server.sglang_link import SglangLink, facts_of, problems
from asyncrl.engines.server.sglang_servers import SglangServers
from asyncrl.errors import ContextFullError, EngineDiedError, GenerationError
from asyncrl.schema import Config
from tests.engines.models import request
from tests.engines.server.contract_sglang import SETTINGS, SglangContract, chunk
from tests.engines.server.test_engine import MODEL, PROMPT, until, wait_until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    MODEL.architectures = ["Qwen3ForCausalLM"]
    MODEL.save_pretrained(tmp_path)
    monkeypatch.setattr(server_engine, "LOOK_S", 0.05)
    monkeypatch.setattr(server_engine, "SILENT_S", 600.0)  # a busy machine makes nobody silent
    monkeypatch.setattr(sglang_servers, "RETRY_S", 0.0)
    return tmp_path


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[SglangContract, SglangContract]]:
    architectures = AutoConfig.from_pretrained(folder).architectures or []
    servers = SglangContract(architectures), SglangContract(architectures)
    yield servers
    for server in servers:
        server.end()


@pytest.fixture
def engine(folder: Path, pair: tuple[SglangContract, SglangContract]) -> Iterator[SglangServers]:
    config = Config()
    config.model.path, config.engine.name, config.run.dir = str(folder), "sglang", str(folder / "run")
    config.engine.urls = [server.url for server in pair]
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 24, 16
    made = make_server_engine(config)
    assert isinstance(made, SglangServers)
    yield made
    asyncio.run(made.close())
    assert not list((folder / "run" / "sglang").iterdir())


def weights(engine: SglangServers, value: float) -> dict[str, torch.Tensor]:
    """Views of one buffer, as in staging."""
    shapes = engine._parameters._required
    whole = torch.full((sum(each.numel() for each in shapes.values()),), value)
    parts = whole.split([each.numel() for each in shapes.values()])
    return {name: part.view(each.shape) for (name, each), part in zip(shapes.items(), parts, strict=True)}


def test_each_server_reads_a_version_and_tokens_carry_it(folder, pair, engine):
    for version in (0, 1):
        engine.load_weights(version, weights(engine, version + 0.5))
        (one,) = asyncio.run(engine.generate(request(PROMPT, new=3)))
        assert one.token_ids.tolist() == [7, 8, 9] and one.policy_versions.tolist() == [version] * 3
        np.testing.assert_allclose(one.logprobs, [-0.7, -0.8, -0.9], rtol=1e-6)
    for server in pair:
        assert (server.loads, server.flushed, server.paused) == (2, 2, False)
        assert server.weights.keys() == engine._parameters._required.keys()
        assert all((each == 1.5).all() for each in server.weights.values())
    assert len(list((folder / "run" / "sglang").rglob("model.safetensors"))) == 1  # the one before is gone
    np.testing.assert_allclose(engine.score([PROMPT])[0], -0.1 * np.arange(1, len(PROMPT)), rtol=1e-6)


def test_a_sequence_that_runs_when_weights_come_is_made_again_and_is_of_one_version(pair, engine):
    engine.load_weights(0, weights(engine, 0.0))

    async def work() -> list[Any]:
        for server in pair:
            server.held.set()
        task = asyncio.create_task(engine.generate(request(PROMPT, 2, new=3)))
        await until(lambda: engine.stats()["generated_tokens"] >= 2)
        await asyncio.to_thread(engine.load_weights, 1, weights(engine, 1.0))
        for server in pair:
            server.held.clear()
        return await task

    assert [one.policy_versions.tolist() for one in asyncio.run(work())] == [[1] * 3] * 2
    assert engine.stats()["restarted"] >= 2


def test_one_that_changes_its_label_under_a_sequence_made_none(pair, engine):
    engine.load_weights(0, weights(engine, 0.0))
    pair[0].turns_at = pair[0].label.removesuffix("0") + "1"
    completions = asyncio.run(engine.generate(request(PROMPT, 2, new=3)))
    assert [one.policy_versions.tolist() for one in completions] == [[0] * 3] * 2 and len(pair[1].ended) == 2


def test_one_that_began_under_a_later_version_than_it_was_sent_under_is_made_again_and_loses_no_server(pair, engine):
    engine.load_weights(0, weights(engine, 0.0))
    for server in pair:
        server.early = server.label.removesuffix("0") + "1"
    completions = asyncio.run(engine.generate(request(PROMPT, 2, new=3)))
    assert [one.policy_versions.tolist() for one in completions] == [[0] * 3] * 2
    assert engine.stats()["restarted"] and not engine.stats()["lost_servers"]


def test_one_that_always_says_another_version_is_not_asked_for_ever(pair, engine):
    engine.load_weights(0, weights(engine, 0.0))
    for server in pair:
        server.always_early, server.early = True, server.label.removesuffix("0") + "1"
    with pytest.raises(GenerationError, match="another version for a sequence"):
        asyncio.run(engine.generate(request(PROMPT, new=3)))


def test_a_prompt_that_every_server_answers_with_500_fails_and_is_not_asked_for_ever(pair, engine):
    engine.load_weights(0, weights(engine, 0.0))
    for server in pair:
        server.poison = PROMPT[::-1].tolist()
    with pytest.raises(GenerationError, match=r"lost its server 9 times; last: .*status 500.*it went wrong inside"):
        asyncio.run(engine.generate(request(PROMPT[::-1].copy(), new=3)))
    assert len(asyncio.run(engine.generate(request(PROMPT, new=3)))) == 1


def test_a_turn_for_which_a_server_spares_no_room_is_no_wrong_request_and_ends_its_episode(pair, engine):
    """Its server refused it, and the group failed. An episode has as much room as `max_length` says."""
    engine.load_weights(0, weights(engine, 0.0))
    longest = np.resize(PROMPT, SETTINGS["max_req_input_len"] - 1)
    room = engine.max_length - len(longest)
    assert len(asyncio.run(engine.generate(request(longest, new=room)))) == 1 and room == 5
    for more in range(1, room):
        with pytest.raises(ContextFullError, match=f"has {len(longest) + more} tokens, .* must leave 5"):
            asyncio.run(engine.generate(request(np.resize(PROMPT, len(longest) + more), new=room - more)))
    assert engine.stats()["lost_servers"] == 0


def test_weights_wait_for_a_server_where_all_are_away_just_now(pair, engine):
    engine.load_weights(0, weights(engine, 0.0))
    for server in pair:
        server.stop()
    wait_until(lambda: engine.stats()["servers"] == 0)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(engine.load_weights, 1, weights(engine, 1.0))
        pair[1].start()
        loading.result(120)
    assert pair[1].loads == 1 and all((each == 1.0).all() for each in pair[1].weights.values())
    (one,) = asyncio.run(engine.generate(request(PROMPT, new=3)))
    assert one.policy_versions.tolist() == [1] * 3


def test_one_that_comes_back_is_given_the_weights_before_it_makes_anything(pair, engine):
    engine.load_weights(0, weights(engine, 2.0))
    pair[0].stop()
    wait_until(lambda: engine.stats()["servers"] == 1)
    pair[0].start()
    wait_until(lambda: engine.stats()["servers"] == 2)
    assert pair[0].label == pair[1].label and all((each == 2.0).all() for each in pair[0].weights.values())
    assert not pair[0].begun


def test_one_that_does_not_see_the_folder_is_not_used_and_with_none_left_the_engine_ends(pair, engine):
    pair[0].blind = True
    engine.load_weights(0, weights(engine, 0.0))
    completions = asyncio.run(engine.generate(request(PROMPT, 2, new=3)))
    assert len(completions) == len(pair[1].ended) == 2 and not pair[0].begun
    pair[1].blind = True
    with pytest.raises(EngineDiedError, match="Can it read that folder"):
        engine.load_weights(1, weights(engine, 1.0))


def test_after_a_load_without_an_answer_the_same_process_is_left_alone_until_it_has_ended(pair):
    server = pair[0]
    link = SglangLink(server.url, base_url=server.url, key="", timeout_s=60.0)
    load = Load(label="run:1", path="/nowhere", recompute=False, overtake=lambda: None)

    async def work() -> None:
        await link.facts("", None)
        link._unanswered = (load.label, server.seed)
        with pytest.raises(ServerGoneError, match="may still be loading run:1"):
            await link.facts("", None)
        server.label = load.label
        await link.facts("", None)
        link._unanswered, server.label, server.seed = ("run:2", server.seed), "default", server.seed + 1
        await link.facts("", None)
        await link.close()

    asyncio.run(work())


def read(*chunks: dict[str, Any]) -> Answer:
    link, answer = SglangLink("http://u", base_url="http://u", key="", timeout_s=1.0), Answer()
    for each in chunks:
        link.read(each, answer)
    return answer


def test_one_that_was_started_with_a_model_of_another_shape_would_end_at_the_first_load(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 272, "hidden_size": 64, "head_dim": null}')
    settings = SETTINGS | {"model_path": str(tmp_path)}
    shape, info = {"vocab_size": 264, "hidden_size": 64, "head_dim": 32}, {"weight_version": "default"}
    (why,) = problems(settings, info, "float32", shape)
    assert "vocab_size=272, but model.path has 264" in why
    assert not list(problems(settings, info, "float32", None))
    assert not list(problems(settings, info, "float32", shape | {"vocab_size": 272}))


def test_chunks_have_all_tokens_or_the_new_ones():
    for second in (chunk(5, 6, 7, label="r:3", reason="stop"), chunk(6, 7, label="r:3", reason="stop", count=3)):
        answer = read(chunk(5, label="r:3"), second)
        assert (answer.token_ids, answer.logprobs) == ([5, 6, 7], [-0.5, -0.6, -0.7])
        assert answer.spans == [{"version": "r:3", "start": 0, "end": 3}] and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (chunk(7, label="r:3", count=3), "sent tokens 2 to 3 after 1"),
        (chunk(5, 6, label="r:4"), "changed its weights to 'r:4'"),
        ({"meta_info": chunk(5, 6, label="r:3")["meta_info"] | {"weight_versions": [{"version": "r:2"}]}}, "changed"),
        ({"meta_info": {}}, "a chunk that is not SGLang's"),
        ({"text": "x"}, "a chunk that is not SGLang's"),
    ],
)
def test_a_chunk_that_does_not_fit_is_none(second, said):
    with pytest.raises(ServerGoneError, match=said):
        read(chunk(5, label="r:3"), second)


def test_a_request_that_is_refused_in_the_stream_is_no_lost_server():
    assert SglangLink.broken_off is GenerationError


@pytest.mark.parametrize(
    ("settings", "model", "said"),
    [
        ({}, {}, "too old"),
        ({"dp_size": 2}, None, "its dp_size is 2"),
        ({"speculative_algorithm": "EAGLE"}, None, "has speculative_algorithm=EAGLE"),
        ({"preferred_sampling_params": "{}"}, None, "has preferred_sampling_params"),
        ({"dtype": "half"}, None, "Set engine.dtype=float16"),
        ({}, {"weight_version": "default", "architectures": ["LlamaForCausalLM"]}, "serves a LlamaForCausalLM"),
    ],
)
def test_one_that_cannot_be_used_is_told_why(settings, model, said):
    shape = {"architectures": ["Qwen3ForCausalLM"]}
    info = {"weight_version": "default"} | shape if model is None else model
    (why, *_) = problems(SETTINGS | settings, info, "float32", shape)
    assert said in why
    assert not list(problems(SETTINGS, {"weight_version": "default"} | shape, "float32", shape))


def test_a_context_two_tokens_longer_than_prompt_and_completion_is_enough_and_one_shorter_would_cut_the_end():
    """Of a context of C tokens SGLang reports C - 6, for prompts alone, and ends each sequence after C - 2."""

    def said(context: int, prompt: int, new: int) -> str:
        config = Config()
        config.data.max_prompt_tokens, config.rollout.max_new_tokens = prompt, new
        return too_short("http://127.0.0.1:1", facts_of(SETTINGS | {"max_req_input_len": context - 6}), config)

    assert said(66, 24, 40) == ""
    assert "it holds 63 tokens" in said(65, 24, 40) and "= 64. Start it with --context-length 66" in said(65, 24, 40)
    # Its canary is 24 tokens, and a prompt has to be shorter than what it reports.
    assert said(31, 1, 1) == "" and "the canary takes 29. Start it with --context-length 31" in said(30, 1, 1)
    assert said(67, 60, 1) == "" and "=60 takes 65. Start it with --context-length 67" in said(66, 60, 1)
