"""Every family of docs/models.md: log-probs and gradients are those of transformers, or the model is refused."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.checks.architecture import foreign_maths, logit_factor, longest_sequence, may_forget, too_long_to_guess
from asyncrl.checks.machine import model_settings
from asyncrl.engines.hf.trial import trial
from asyncrl.errors import ConfigError
from asyncrl.learner.checkpoints.export import export_hf
from asyncrl.learner.model import layout
from asyncrl.learner.model.critic import build_critic
from asyncrl.learner.model.layout import Layout
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.publishing.canary import canary_of
from asyncrl.learner.publishing.probes import probes_of
from asyncrl.schema import Config, EngineConfig, EnvironmentConfig, LearnerConfig, ModelConfig, RunConfig
from tests.learner.families import (
    BEGIN,
    END,
    FAMILIES,
    batched,
    build,
    logprobs_alone,
    outcome,
    settings_for,
    siblings,
    table,
    tiny_family,
    trained_logprobs,
)
from tests.learner.feed import VOCABULARY
from tests.learner.rank_process import train_on_ranks
from tests.learner.smooth_steps import EQUAL, RATE, apart

PAGE = Path("docs/models.md")
FAST = ("OPT", "Granite", "DeepSeek-V3", "Qwen3-Next", "Mamba 2", "BLOOM", "Phi-3.5-MoE", "GPT-J", "DeepSeek-V4")
"""One of each way to be wrong: dropout by hand, logits that are divided by a number, a value width of its own,
recurrent layers beside attention and alone, attention that knows no interface, a window that only a mask knows, a list
of attentions that has not ours, routers that go by the token."""
TOLD_LATE = ("BLOOM", "MPT", "GPT-J", "GPT-Neo")
"""Refused by the built-in engine once they are loaded: positions come with their masks."""
REFUSED = ("Gemma 2", "GPT-OSS", "ModernBERT decoder")


def rows_of_the_page() -> dict[str, tuple[str, str]]:
    """Family -> whether the built-in engine batches it, and how sequences go."""
    part = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    cells = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")][2:]
    return {name: (engine, cell) for name, _, engine, cell in cells}


def agrees(name: str, folder: Path) -> None:
    model = build(name, folder)
    assert rows_of_the_page()[name][1] == ("packed" if model.layout is Layout.PACKED else "a row each")
    batch = siblings()
    assert len(batch.input_ids) < len(batch.packing.rows.index)  # prompts are shared
    alone = AutoModelForCausalLM.from_pretrained(folder).eval()
    mine, theirs = trained_logprobs(model, batch), logprobs_alone(alone, batch)
    order = torch.argsort(batch.sequence_ids[batch.loss_positions], stable=True)
    torch.testing.assert_close(mine[order], theirs, atol=2e-5, rtol=0)
    direction = torch.randn(len(theirs), generator=torch.Generator().manual_seed(0))
    (mine[order] * direction).sum().backward()
    (theirs * direction).sum().backward()
    wanted = {key: parameter.grad.detach() for key, parameter in alone.named_parameters() if parameter.grad is not None}
    found = {key: parameter.grad for key, parameter in model.hf.named_parameters() if key in wanted}
    whole = torch.nn.utils.get_total_norm(wanted.values())
    for key, grad in wanted.items():
        mine_of = found[key]
        assert mine_of is not None, key
        torch.testing.assert_close(mine_of / whole, grad / whole, atol=1e-5, rtol=0, msg=key)


@pytest.mark.parametrize("name", FAST)
def test_what_is_trained_is_what_transformers_computes(name: str, tmp_path: Path):
    agrees(name, tmp_path)


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*FAST, *REFUSED)])
def test_so_it_is_of_every_other_family_of_the_page(name: str, tmp_path: Path):
    agrees(name, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_learner_would_compute_otherwise_is_refused(name: str, tmp_path: Path):
    said = outcome(name, tmp_path)
    assert said.startswith("refused: ")
    assert rows_of_the_page()[name][1] == said


def test_the_table_of_the_page_names_every_family_and_no_other():
    page = rows_of_the_page()
    assert list(page) == list(FAMILIES)
    assert table(page) in PAGE.read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_built_in_engine_batches_what_the_page_says_and_is_refused_by_the_config_where_that_tells(
    name: str, tmp_path: Path
):
    wanted = rows_of_the_page()[name][0]
    assert batched(name) == wanted
    tiny_family(name).config.save_pretrained(tmp_path)
    with (
        pytest.raises(ConfigError, match="built-in engine")
        if wanted == "no" and name not in TOLD_LATE
        else nullcontext()
    ):
        trial({"path": "m", "folder": str(tmp_path)})
    assert wanted == "yes" or may_forget(model_settings(str(tmp_path)))


def test_a_warning_says_which_layers_keep_a_model_from_being_packed_and_what_that_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, "asyncrl.learner"):
        build("Qwen3-Next", tmp_path)
    assert "layers of the kinds linear_attention" in caplog.text
    assert "once per completion" in caplog.text


@pytest.mark.parametrize(("name", "sequences", "many"), [("Qwen3-Next", 2, 1), ("Llama", 3, 1), ("Llama", 3, 10**6)])
def test_a_large_model_is_asked_on_every_core_and_any_no_more_than_is_in_question(
    name: str, sequences: int, many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked, before, scored = [], torch.get_num_threads(), PolicyModel.seen_alone

    def seen_alone(model: PolicyModel, ids: torch.Tensor) -> torch.Tensor:
        asked.append(torch.get_num_threads())
        return scored(model, ids)

    monkeypatch.setattr(PolicyModel, "seen_alone", seen_alone)
    monkeypatch.setattr(layout, "MANY", many)
    build(name, tmp_path)
    assert asked == [before if many > 1 else max(before, len(os.sched_getaffinity(0)))] * sequences
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["BLOOM", "Mamba 2"])
def test_a_model_that_names_no_last_position_is_given_probes_all_the_same(name: str, tmp_path: Path):
    model = build(name, tmp_path)
    assert not hasattr(model.hf.config, "max_position_embeddings")
    probes = probes_of(model, 0)
    assert len(canary_of(model, probes, torch.device("cpu"), "float32", "float32").logprobs) == len(probes)


def test_a_model_is_asked_itself_where_its_config_names_no_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "asyncrl.learner"):
        build("RWKV", tmp_path)
    assert "RwkvSelfAttention sees across their borders" in caplog.text


def test_a_critic_of_such_a_model_runs_in_rows_too(tmp_path: Path):
    tiny_family("Qwen3-Next").save_pretrained(tmp_path)
    assert build_critic(settings_for(tmp_path), torch.device("cpu"), None).layout is Layout.ROWS


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_learn_the_same_weights_in_rows_as_one(tmp_path: Path):
    tiny_family("LFM2").save_pretrained(tmp_path / "model")

    def learned(run: str, world: int) -> dict[str, torch.Tensor]:
        config = Config(
            run=RunConfig(dir=str(tmp_path / run)),
            model=ModelConfig(path=str(tmp_path / "model")),
            learner=LearnerConfig(steps=1, lr=RATE, max_tokens_per_microbatch=60),
        )
        return train_on_ranks(config, world)

    one, two = learned("one", 1), learned("two", 2)
    assert apart(one, two, load_file(tmp_path / "one" / "first.safetensors")) < EQUAL


@pytest.mark.parametrize("name", ["Qwen3-Next", "BLOOM"])
def test_a_model_in_rows_is_exported_as_transformers_loads_it(name: str, tmp_path: Path):
    model = build(name, tmp_path / "source")
    export_hf(model, ModelConfig(path=str(tmp_path / "source")), tmp_path / "hf", rank=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(9)[None]
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert torch.equal(loaded(input_ids=ids).logits, first(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"model_type": "x", "text_config": {"model_type": "y", "lm_head_multiplier": 0.04}}, "lm_head"),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.0}, "lm_head"),
    ],
)
def test_what_a_config_tells_is_refused_before_anything_starts(settings: dict[str, object], named: str):
    assert named in foreign_maths(settings)
    assert not foreign_maths({"model_type": "qwen3", "lm_head_multiplier": 1.0})


def test_logits_that_are_multiplied_by_a_number_are_no_reason_to_refuse():
    of_granite = {"model_type": "granite", "logits_scaling": 8.0}
    of_cohere = {"model_type": "x", "text_config": {"model_type": "cohere2", "logit_scale": 0.25}}
    assert (logit_factor(of_granite), logit_factor(of_cohere)) == (0.125, 0.25)
    assert not foreign_maths(of_granite) and not foreign_maths(of_cohere)
    assert foreign_maths({**of_granite, "final_logit_softcapping": 30.0})


@pytest.mark.parametrize("name", ["Granite", "Cohere"])
def test_evaluations_and_canaries_see_multiplied_logits_too(name: str, tmp_path: Path):
    model, batch = build(name, tmp_path), siblings()
    trained = trained_logprobs(model, batch).detach()
    judged, _, largest = model.judge(batch)
    torch.testing.assert_close(judged, trained)
    factor, model.factor = model.factor, 1.0
    assert factor != 1.0
    torch.testing.assert_close(largest, factor * model.judge(batch)[2])


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0]}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 22}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 22}),
    ],
)
def test_frequencies_that_a_longer_neighbour_changes_are_refused_where_one_may_come(
    kind: str, changes: dict[str, Any], tmp_path: Path
):
    torch.manual_seed(0)
    settings = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0, bos_token_id=0, eos_token_id=0, initializer_range=0.5, **changes,
    )  # fmt: skip
    alone = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    ids = torch.arange(2, 25)[None]
    short, long = (alone(input_ids=ids[:, :tokens], use_cache=False).logits for tokens in (22, 23))
    assert (short - long[:, :22]).abs().max() > 1e-4  # a 23rd token changes what those before it are
    alone.save_pretrained(tmp_path)
    config = settings_for(tmp_path)  # sequences of up to 22 tokens
    build_model(config, torch.device("cpu"), None)
    longer = replace(config, rollout=replace(config.rollout, max_new_tokens=13))
    with pytest.raises(ConfigError, match=r"Sequences here may have 23 tokens\. Keep them within 22"):
        build_model(longer, torch.device("cpu"), None)
    assert "within 22" in too_long_to_guess({"text_config": settings.to_dict()}, 23)


def test_frequencies_of_one_kind_of_layer_are_looked_at_and_equal_ones_do_not_matter():
    rope = LONGROPE | {"original_max_position_embeddings": 22}
    assert "within 22" in too_long_to_guess({"rope_parameters": {"full_attention": rope}}, 23)
    assert not too_long_to_guess({"rope_parameters": rope | {"long_factor": rope["short_factor"]}}, 23)
    legacy = {"rope_scaling": {"type": "longrope", "long_factor": [2.0]}, "original_max_position_embeddings": 22}
    assert "any number" in too_long_to_guess(
        legacy, longest_sequence(replace(settings_for(Path("m")), environment=EnvironmentConfig(name="tools")))
    )
    environment, engine = EnvironmentConfig(name="tools", max_tokens=22), EngineConfig(max_model_len=99)
    bounded = replace(settings_for(Path("m")), environment=environment, engine=engine)
    assert longest_sequence(bounded) == 22 and not too_long_to_guess(legacy, 22)
