from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.batch import packing
from asyncrl.learner.checkpoints.export import export_hf
from asyncrl.learner.model.policy import build_model
from asyncrl.learner.model.reading import files_of
from asyncrl.quickstart.byte_tokenizer import CHAT_TEMPLATE, EOS_ID, save_byte_tokenizer
from asyncrl.schema import Config, ModelConfig, RunConfig
from tests.learner.families import siblings, tiny_family, trained_logprobs
from tests.learner.feed import FAMILIES, VOCABULARY, tiny_checkpoint, tiny_model

CPU = torch.device("cpu")


def config_for(path: Path) -> Config:
    return Config(model=ModelConfig(path=str(path)), run=RunConfig(name="t"))


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_are_those_of_the_hugging_face_checkpoint(tmp_path: Path, family: str):
    tiny_checkpoint(tmp_path, family)
    model = build_model(config_for(tmp_path), CPU, None)
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    mine = dict(model.named_hf_parameters())
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_loads_in_transformers_with_the_trained_weights(tmp_path: Path, family: str):
    source = tiny_checkpoint(tmp_path / "source", family)
    (source / "tokenizer.json").write_text("{}")
    model = build_model(config_for(source), CPU, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    export_hf(model, ModelConfig(path=str(source)), tmp_path / "hf", rank=0)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, dict(model.named_hf_parameters())[name])
    head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head is embedding) == loaded.config.tie_word_embeddings
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert "attn_implementation" not in (tmp_path / "hf" / "config.json").read_text()
    assert loaded.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=3, do_sample=False).shape == (1, 5)


@pytest.mark.parametrize(("named", "known"), [(None, [EOS_ID]), (7, [7]), ([7, 8], [7, 8])])
def test_an_export_names_the_tokens_that_end_a_turn(tmp_path: Path, named: int | list[int] | None, known: list[int]):
    """Also those that only the chat template names: other engines stop at what generation_config.json says."""
    source = tiny_checkpoint(tmp_path / "source")
    save_byte_tokenizer(source, template=CHAT_TEMPLATE.replace("\n{% endfor", "<|reserved_260|>\n{% endfor"))
    if named is not None:
        GenerationConfig(eos_token_id=named).save_pretrained(source)
    export_hf(build_model(config_for(source), CPU, None), ModelConfig(path=str(source)), tmp_path / "hf", rank=0)
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == [*known, 260]


def test_a_checkpoint_that_lacks_weights_is_refused_and_not_filled_up_at_random(tmp_path: Path):
    tiny_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "layers.0" in name)
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=rf"its checkpoint has no {lost} \(1 weights\), which would be made at random"
    ):
        build_model(config_for(tmp_path), CPU, None)


def test_a_head_of_its_own_in_a_model_that_ties_it_is_refused_with_both_names(tmp_path: Path):
    """One rank trained both; several ended by "rank 1 has built another PolicyModel than rank 0"."""
    weights = load_file(tiny_checkpoint(tmp_path, tie_word_embeddings=True) / "model.safetensors")
    for head, fine in ((weights["model.embed_tokens.weight"].clone(), True), (torch.ones(VOCABULARY, 32), False)):
        save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if fine:
            build_model(config_for(tmp_path), CPU, None)
            continue
        with pytest.raises(ConfigError, match=r"lm_head\.weight differs from its model\.embed_tokens\.weight"):
            build_model(config_for(tmp_path), CPU, None)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    head = build_model(config_for(tmp_path), CPU, None).head
    assert bool((head.weight == 1).all())


def test_weights_that_are_no_numbers_are_told_as_that(tmp_path: Path):
    tiny_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="transformers itself gives a sequence are nan"):
        build_model(config_for(tmp_path), CPU, None)


def test_whatever_transformers_raises_of_a_config_is_a_refusal(tmp_path: Path):
    """A rank that ended by anything else was started three times more."""
    settings = json.loads((tiny_checkpoint(tmp_path) / "config.json").read_text())
    for changes in ({"max_position_embeddings": "512"}, {"text_config": "none"}, {"pad_token_id": 10**6}):
        (tmp_path / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ConfigError, match=r"model\.path=.* cannot be loaded as a causal LM: \w*Error: "):
            build_model(config_for(tmp_path), CPU, None)


def test_ranks_read_the_files_that_transformers_loads(tmp_path: Path):
    """A file of its own beside the shards of another model: one rank trained the one, two the other."""
    tiny_model("qwen2").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(files_of(str(tmp_path))) > 1
    tiny_model("qwen2").save_pretrained(tmp_path / "later")
    (tmp_path / "later" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert files_of(str(tmp_path)) == [tmp_path / "model.safetensors"]


def test_an_export_that_cannot_be_written_says_where_and_how_to_go_on(tmp_path: Path):
    model = build_model(config_for(tiny_checkpoint(tmp_path / "source")), CPU, None)
    (tmp_path / "run").write_text("a file where the folder has to go")
    with pytest.raises(CheckpointError, match=r"cannot write the trained model to .*run/hf.*resume=auto"):
        export_hf(model, ModelConfig(path=str(tmp_path / "source")), tmp_path / "run" / "hf", rank=0)


def test_an_export_that_was_damaged_is_refused_by_the_file_s_name_and_what_lies_beside_it_is_no_damage(tmp_path: Path):
    source = tiny_checkpoint(tmp_path / "source")
    export_hf(build_model(config_for(source), CPU, None), ModelConfig(path=str(source)), tmp_path / "hf", rank=0)
    (tmp_path / "hf" / "README.md").write_text("mine")
    build_model(config_for(tmp_path / "hf"), CPU, None)
    weights = tmp_path / "hf" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors was changed after it was written"):
        build_model(config_for(tmp_path / "hf"), CPU, None)


def test_an_export_can_be_bfloat16(tmp_path: Path):
    source = tiny_checkpoint(tmp_path / "source")
    model = build_model(config_for(source), CPU, None)
    export_hf(model, ModelConfig(path=str(source), dtype="bfloat16"), tmp_path / "hf", rank=0)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16


def test_a_model_that_transforms_its_logits_is_refused(tmp_path: Path):
    source = tiny_checkpoint(tmp_path)
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        build_model(config_for(source), CPU, None)


def test_a_missing_model_is_refused_with_its_path(tmp_path: Path):
    with pytest.raises(ConfigError, match="nothing_here"):
        build_model(config_for(tmp_path / "nothing_here"), CPU, None)


def test_of_every_second_layer_activations_are_kept_and_gradients_are_the_same_bits(tmp_path: Path):
    tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=5)
    gradients, runs = {}, {}
    for every in (0, 1, 2):
        config = config_for(tmp_path)
        config.model.activation_checkpointing, config.model.checkpoint_every = every > 0, max(1, every)
        model = build_model(config, CPU, None)
        calls: list[int] = []
        for layer in model.hf.model.layers:
            layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        trained_logprobs(model, siblings()).sum().backward()
        runs[every] = len(calls)
        gradients[every] = [parameter.grad for parameter in model.parameters()]
    assert runs == {0: 5, 1: 10, 2: 8}
    for every in (1, 2):
        assert all(map(torch.equal, gradients[every], gradients[0]))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_wide_head_is_that_of_every_model_that_is_built(tmp_path: Path, frozen: bool):
    tiny_checkpoint(tmp_path)
    config = config_for(tmp_path)
    for wide in (False, True):
        config.model.fp32_head = wide
        assert build_model(config, CPU, None, frozen=frozen).fp32_head == wide


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_kept_of_a_checkpointed_layer_is_not_computed_twice_and_gradients_are_the_same_bits(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if apart:
        monkeypatch.setattr(packing._Groups, "cost", -1)
    assert (siblings().packing.shared is not None) == apart
    tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=3)
    gradients, attended, multiplied = {}, {}, {}
    for keep in ("everything", "nothing", "attention", "matmul"):
        config = config_for(tmp_path)
        if keep != "everything":
            config.model.activation_checkpointing, config.model.checkpoint_keep = True, keep
        model = build_model(config, CPU, None)
        with Counted() as counted:
            trained_logprobs(model, siblings()).sum().backward()
        attended[keep] = counted.seen["_scaled_dot_product_flash_attention_for_cpu"]
        multiplied[keep] = counted.seen["mm"]
        gradients[keep] = [parameter.grad for parameter in model.parameters()]
    blocks = attended["everything"]
    assert attended == {"everything": blocks, "nothing": 2 * blocks, "attention": blocks, "matmul": blocks}
    again = {keep: count - multiplied["everything"] for keep, count in multiplied.items()}
    # The last product of a layer is needed by nobody in its backward: the recomputation stops before it.
    assert again["matmul"] == again["everything"] == 0 < again["attention"] == again["nothing"] <= 3 * 7
    for keep in ("nothing", "attention", "matmul"):
        assert all(map(torch.equal, gradients[keep], gradients["everything"]))


@pytest.mark.parametrize(("asked", "runs"), [(False, 1), (True, 2)])
def test_activation_checkpointing_runs_every_layer_again_in_the_backward_pass_and_drops_nothing(
    tmp_path: Path, asked: bool, runs: int
):
    tiny_family("OPT").save_pretrained(tmp_path)  # a model with dropout, which it applies by hand
    config = config_for(tmp_path)
    config.model.activation_checkpointing = asked
    model = build_model(config, CPU, None)
    layer = model.hf.model.decoder.layers[0]
    calls: list[int] = []
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    batch = siblings()
    trained_logprobs(model, batch).sum().backward()
    assert len(calls) == runs
    assert torch.equal(trained_logprobs(model, batch), trained_logprobs(model, batch))
