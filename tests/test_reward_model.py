"""The reward model alone: how it scores, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Gemma3Config,
    Gemma3ForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen3_5Config,
    Qwen3_5ForSequenceClassification,
)

from asyncrl.errors import ConfigError, RewardError
from asyncrl.quickstart.byte_tokenizer import EOS_ID, PAD_ID, save_byte_tokenizer
from asyncrl.rewards import reward_model
from asyncrl.rewards.call import Call
from asyncrl.rewards.forms import adapt_reward
from asyncrl.rewards.reward_model import RewardModel

TEXTS = [("ab>", "ba"), ("abcdefg>", "gfedcba"), ("c>", ""), ("hgf>", "fghfghfgh")]


def tiny(labels: int = 1) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=labels,  # pyright: ignore[reportCallIssue]
        pad_token_id=PAD_ID,
    )


def save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return str(folder)


def one_by_one(model: PreTrainedModel, per_token: bool) -> list[float]:
    rewards = []
    for prompt, answer in TEXTS:
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([list((prompt + answer).encode())])).logits
        rewards.append((logits[0, -1, 0] if per_token else logits[0, 0]).item())
    return rewards


@pytest.mark.parametrize("batch_tokens", [20, 16384])
@pytest.mark.parametrize("kind", [Qwen2ForSequenceClassification, Qwen2ForTokenClassification])
def test_a_batch_scores_each_text_as_it_would_be_alone(kind, batch_tokens, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reward_model, "BATCH_TOKENS", batch_tokens)
    torch.manual_seed(0)
    model = kind(tiny())
    loaded = RewardModel(save(model, tmp_path))
    got = loaded([prompt for prompt, _ in TEXTS], [answer for _, answer in TEXTS])
    assert got == pytest.approx(one_by_one(model, kind is Qwen2ForTokenClassification), abs=1e-4)
    assert len(set(got)) == len(got)


def test_a_plain_text_gets_the_special_tokens_of_the_model_s_tokenizer(tmp_path: Path) -> None:
    """A BERT is read at its [CLS]: without one it would be read at the first letter of the prompt."""
    settings = BertConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,  # pyright: ignore[reportCallIssue]
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(settings).eval()
    path = save(model, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|eos|> $A", special_tokens=[("<|eos|>", 256)]
    )
    tokenizer.save_pretrained(path)
    with torch.no_grad():
        alone = [
            model(input_ids=torch.tensor([[256, *(prompt + answer).encode()]])).logits[0, 0].item()
            for prompt, answer in TEXTS
        ]
    got = RewardModel(path)([prompt for prompt, _ in TEXTS], [answer for _, answer in TEXTS])
    assert got == pytest.approx(alone, abs=1e-5)
    rendered = RewardModel(path)([f"<|pad|>{prompt}" for prompt, _ in TEXTS], [answer for _, answer in TEXTS])
    assert rendered == pytest.approx(alone, abs=1e-5), "a text that begins with the special token has it once"


@pytest.mark.parametrize("where", ["pad", "text"])
def test_the_tokenizer_of_another_model_is_refused(where: str, tmp_path: Path) -> None:
    settings = tiny()
    settings.vocab_size, settings.pad_token_id = (PAD_ID, 0) if where == "pad" else (100, 0)
    path = save(Qwen2ForSequenceClassification(settings), tmp_path)
    if where == "pad":
        with pytest.raises(ConfigError, match=f"pads with token id {PAD_ID}, but the model has {PAD_ID} tokens"):
            RewardModel(path)
        return
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    with pytest.raises(RewardError, match="gives token id 120, but the model has 100 tokens"):
        RewardModel(path)(["ab"], ["x"])


def test_without_a_pad_token_texts_are_scored_one_at_a_time(tmp_path: Path) -> None:
    model = Qwen2ForSequenceClassification(tiny())
    path = save(model, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    got = RewardModel(path)([prompt for prompt, _ in TEXTS], [answer for _, answer in TEXTS])
    assert got == pytest.approx(one_by_one(model, False), abs=1e-4)


@pytest.mark.parametrize("own", [None, EOS_ID])
def test_a_text_is_read_at_the_eos_unless_the_model_says_it_is_padding(own: int | None, tmp_path: Path) -> None:
    """The tokenizer pads with the EOS, as many do, and texts end with it: plain transformers reads a single text so."""
    settings = tiny()
    settings.pad_token_id = own
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(settings).eval()
    tokenizer = AutoTokenizer.from_pretrained(save(model, tmp_path))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    with torch.no_grad():
        alone = [
            model(input_ids=torch.tensor([[*(prompt + answer).encode(), EOS_ID]])).logits[0, 0].item()
            for prompt, answer in TEXTS
        ]
    got = RewardModel(str(tmp_path))([prompt for prompt, _ in TEXTS], [f"{answer}<|eos|>" for _, answer in TEXTS])
    assert got == pytest.approx(alone, abs=1e-4)


def test_a_conversation_goes_through_the_chat_template(tmp_path: Path) -> None:
    loaded = RewardModel(save(Qwen2ForSequenceClassification(tiny()), tmp_path))
    group: Any = adapt_reward(loaded, "model")
    (chat,) = group(Call(completions=["hi"], row={"prompt": [{"role": "user", "content": "hello"}]}))
    (plain,) = group(Call(completions=["assistant: hi\n"], row={"prompt": "user: hello\n"}))
    assert chat.value == pytest.approx(plain.value)


TEXT = {
    **{"vocab_size": 264, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.5},
}
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14, "num_attention_heads": 2}


def gemma3() -> PreTrainedModel:
    sight = SIGHT | {"num_hidden_layers": 1, "model_type": "siglip_vision_model"}
    tokens = {"boi_token_index": 261, "eoi_token_index": 262, "image_token_index": 263}
    config = Gemma3Config(text_config=TEXT, vision_config=sight, mm_tokens_per_image=4, **tokens)
    config.num_labels = 1
    return Gemma3ForSequenceClassification(config)


def qwen3_5() -> PreTrainedModel:
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    linear |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    tokens = {"image_token_id": 263, "video_token_id": 262, "vision_start_token_id": 260, "vision_end_token_id": 261}
    config = Qwen3_5Config(text_config=TEXT | linear, vision_config=sight, **tokens)
    config.num_labels = 1
    return Qwen3_5ForSequenceClassification(config)


@pytest.mark.parametrize("make", [gemma3, qwen3_5])
def test_a_classifier_that_also_sees_scores_each_text_of_a_batch_at_its_end(make: Any, tmp_path: Path) -> None:
    """Its head looks for the padding in the settings of its decoder, not in its own."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.normal_()
    loaded = RewardModel(save(model, tmp_path))
    rewards = loaded([prompt for prompt, _ in TEXTS], [answer for _, answer in TEXTS])
    assert rewards == pytest.approx(one_by_one(model, per_token=False), abs=1e-4)
    assert len({round(reward, 3) for reward in rewards}) == len(TEXTS)


def test_texts_that_cannot_be_scored_are_errors_and_no_scores(tmp_path: Path) -> None:
    loaded = RewardModel(save(Qwen2ForSequenceClassification(tiny()), tmp_path))
    with pytest.raises(RewardError, match="empty"):
        loaded([""], [""])
    with pytest.raises(RewardError, match="a text of 70 tokens is longer than the 64 tokens"):
        loaded(["ab>"], ["x" * 67])
    with pytest.raises(RewardError, match="must have the same form"):
        loaded([[{"role": "user", "content": "a"}]], ["b"])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Qwen2ForSequenceClassification(tiny(labels=3)), "num_labels=3, but a reward is one number"),
        (lambda: Qwen2ForCausalLM(tiny()), "is a Qwen2ForCausalLM, whose output is not a reward"),
    ],
)
def test_a_model_that_gives_no_single_number_is_refused(model, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardModel(save(model(), tmp_path))


def test_a_classifier_without_its_head_is_refused(tmp_path: Path) -> None:
    path = save(Qwen2ForCausalLM(tiny()), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("ForCausalLM", "ForSequenceClassification"))
    with pytest.raises(ConfigError, match=r"lacks weights \(score.weight\): its rewards would be random"):
        RewardModel(path)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        RewardModel(str(tmp_path))
