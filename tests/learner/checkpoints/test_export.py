"""Tests of exports: an exported folder is the folder that the model came from, with other weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from asyncrl.chat.hub import described_in
from asyncrl.config import load_config
from asyncrl.data.local_tokenizer import tokenizer_digest
from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpoints.export import export_critic, export_hf
from asyncrl.learner.model.critic import build_critic
from asyncrl.learner.model.policy import build_model
from asyncrl.quickstart.byte_tokenizer import CHAT_TEMPLATE, save_byte_tokenizer
from asyncrl.schema import Config, ModelConfig, RunConfig
from asyncrl.storage.sealed import verify_export
from tests.learner.feed import tiny_checkpoint

CPU = torch.device("cpu")
CONVERSATION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + CHAT_TEMPLATE


def model_folder(folder: Path, **changes: Any) -> Path:
    tiny_checkpoint(folder, **changes)
    (folder / "generation_config.json").unlink()
    save_byte_tokenizer(folder)
    return folder


def exported(source: Path, target: Path, **settings: Any) -> Path:
    """Export the model in `source` after a change of its weights, and check what each export has to keep."""
    given = ModelConfig(path=str(source), **settings)
    trained = replace(given, dtype="float32")  # one rank without a backend computes in no other
    model = build_model(Config(model=trained, run=RunConfig(name="t")), CPU, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    described_in.cache_clear()
    export_hf(model, given, target, rank=0, trained=3)
    verify_export(target)
    return target


def same_text(source: Path, target: Path) -> None:
    """Both folders tokenize, and render a conversation, alike: with tools, without them, and by each named template."""
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (target, source))
    assert type(ours) is type(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours("a b, Ünïcode <|eos|>").input_ids == theirs("a b, Ünïcode <|eos|>").input_ids
    assert ours.chat_template == theirs.chat_template
    names = list(theirs.chat_template) if isinstance(theirs.chat_template, dict) else [None]
    for tools in (None, [TOOL]):
        for name in (None, *names):
            given: dict[str, Any] = {"tools": tools, "chat_template": name, "tokenize": False}
            assert ours.apply_chat_template(CONVERSATION, **given) == theirs.apply_chat_template(CONVERSATION, **given)
    assert tokenizer_digest(str(target)) == tokenizer_digest(str(source))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.9, "top_p": 0.6},
        {"do_sample": False, "temperature": 0.7, "top_k": 20},
        {"do_sample": True, "temperature": 0.0},
        {"eos_token_id": [258, 259], "of_another_program": {"x": 1}},
        None,
    ],
)
def test_generation_config_survives_an_export_as_written(tmp_path: Path, settings: dict[str, Any] | None):
    """Temperature without do_sample, as many public models have it, was refused by transformers after training."""
    source = model_folder(tmp_path / "model")
    file = "generation_config.json"
    if settings is not None:
        (source / file).write_text(json.dumps({"bos_token_id": 257, "eos_token_id": 258} | settings))
    target = exported(source, tmp_path / "hf")
    assert (target / file).exists() == (settings is not None)
    if settings is not None:
        assert (target / file).read_text() == (source / file).read_text()
    same_text(source, target)
    again = exported(target, tmp_path / "again")
    assert (again / file).exists() == (settings is not None)
    same_text(source, again)


def test_generation_settings_in_config_json_survive_an_export(tmp_path: Path):
    """Older models have them there; transformers loads such a config and refuses to save it."""
    source = model_folder(tmp_path / "model")
    settings = json.loads((source / "config.json").read_text())
    settings |= {"temperature": 0.6, "max_length": 30, "top_p": 0.9, "transformers_version": "4.31.0"}
    settings |= {"rope_theta": 1e4, "of_another_program": [1], "torch_dtype": "float16"}
    (source / "config.json").write_text(json.dumps(settings))
    target = exported(source, tmp_path / "hf", dtype="bfloat16")
    found = json.loads((target / "config.json").read_text())
    assert found == settings | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    assert AutoModelForCausalLM.from_pretrained(target, dtype="auto").dtype == torch.bfloat16
    same_text(source, target)


def test_every_chat_template_survives_an_export(tmp_path: Path):
    source = model_folder(tmp_path / "model")
    (source / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name in ("tool_use", "rag"):
        (source / "additional_chat_templates").mkdir(exist_ok=True)
        (source / "additional_chat_templates" / f"{name}.jinja").write_text(WITH_TOOLS + name)
    target = exported(source, tmp_path / "hf")
    same_text(source, target)
    assert set(AutoTokenizer.from_pretrained(target).chat_template) == {"default", "tool_use", "rag"}
    assert "add;" in AutoTokenizer.from_pretrained(target).apply_chat_template(
        CONVERSATION, tools=[TOOL], tokenize=False
    )


def test_templates_in_a_list_survive_an_export(tmp_path: Path):
    source = model_folder(tmp_path / "model")
    file = source / "tokenizer_config.json"
    both = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": WITH_TOOLS}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": both}))
    same_text(source, exported(source, tmp_path / "hf"))


def test_tokenizer_files_of_other_names_survive_an_export(tmp_path: Path):
    source = model_folder(tmp_path / "model")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(["newer"])
    tokenizer.save(str(source / "tokenizer.4.0.json"))
    settings["fast_tokenizer_files"] = ["tokenizer.4.0.json"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("spiece.model", "tekken.json", "qwen.tiktoken", "vocab.txt", "processor_config.json", "LICENSE"):
        (source / name).write_text("{}")
    same_text(source, target := exported(source, tmp_path / "hf"))
    assert {each.name for each in source.iterdir()} | {"exported.json", "manifest.json"} == {
        each.name for each in target.iterdir()
    }


def test_weights_and_hidden_files_of_the_source_are_not_exported(tmp_path: Path):
    source = model_folder(tmp_path / "model")
    for name in ("optimizer.pt", "training_args.bin", "model-q8.gguf", "a.bin.index.json", ".gitattributes"):
        (source / name).write_text("{}")
    (source / "checkpoint-5").mkdir()
    (source / "checkpoint-5" / "big").write_text("x")
    target = exported(source, tmp_path / "hf")
    names = {each.name for each in target.iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("exported.json", "manifest.json"),
    }


def test_a_merged_adapter_is_exported_with_the_files_of_its_base(tmp_path: Path):
    source = model_folder(tmp_path / "model")
    (source / "generation_config.json").write_text('{"temperature": 0.9, "eos_token_id": 258}')
    same_text(source, target := exported(source, tmp_path / "hf", lora_rank=2))
    assert (target / "generation_config.json").read_text() == (source / "generation_config.json").read_text()


def test_a_critic_is_exported_with_the_config_it_came_with(tmp_path: Path):
    policy = model_folder(tmp_path / "model")
    source = model_folder(tmp_path / "critic", intermediate_size=48)
    config = load_config([f"model.path={policy}", "data.path=d", "reward.function=r.py:f", "run.dir=x"])
    config.critic.path = str(source)
    model = build_critic(config, CPU, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    export_critic(model, ModelConfig(path=str(source)), tmp_path / "out", rank=0)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.num_labels == 1
    assert loaded.config.intermediate_size == 48
    for name, parameter in model.hf.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))
    same_text(source, tmp_path / "out")


def test_a_source_that_is_gone_is_named_with_the_way_to_an_export(tmp_path: Path):
    source = model_folder(tmp_path / "model")
    model = build_model(Config(model=ModelConfig(path=str(source)), run=RunConfig(name="t")), CPU, None)
    shutil.rmtree(source)
    described_in.cache_clear()
    with pytest.raises(CheckpointError, match=r"cannot be read any more.*put that model back"):
        export_hf(model, ModelConfig(path=str(source)), tmp_path / "hf", rank=0)
