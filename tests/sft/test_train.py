"""The step against plain transformers in float64, and the loop: exact resume, evaluation, the best checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.errors import CheckpointMismatchError, ConfigError, DataError, NonFiniteError, StepMemoryError
from asyncrl.learner.checkpoints.checkpoint import LearnerState
from asyncrl.learner.model.policy import build_model
from asyncrl.sft import train as train_module
from asyncrl.sft.batches import lease_of
from asyncrl.sft.examples import Example, open_encoder
from asyncrl.sft.settings import SftConfig, learner_config
from asyncrl.sft.step import accumulate, evaluate, micro_batches
from tests.sft.given import CPU, rows_of, settings, texts, train_alone, weights, write


def examples(given: SftConfig) -> list[Example]:
    rows, encoder = rows_of(given), open_encoder(given)
    return [encoder.example(rows.form(row), rows.where(row)) for row in range(len(rows))]


def reference(given: SftConfig, rows: list[Example]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Mean loss and share of likeliest tokens over all learned tokens, and the gradient, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(given.model.path, dtype=torch.float64)
    total, right, tokens = torch.zeros((), dtype=torch.float64), 0, 0
    for row in rows:
        ids = torch.from_numpy(row.token_ids).long()[None]
        wanted, mask = ids[0, 1:], torch.from_numpy(row.loss_mask)[1:]
        logits = model(input_ids=ids).logits[0, :-1]
        total = total + (functional.cross_entropy(logits, wanted, reduction="none") * mask).sum()
        right += int(((logits.argmax(-1) == wanted) & mask).sum())
        tokens += int(mask.sum())
    (total / tokens).backward()
    gradients = {f"hf.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return (total / tokens).item(), right / tokens, gradients


@pytest.mark.parametrize("budget", [30, 10_000])
def test_loss_and_gradient_are_those_of_the_mean_over_all_tokens_however_they_are_packed(
    tmp_path: Path, budget: int
) -> None:
    talk = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e"))
    ]
    given = settings(tmp_path, f"learner.max_tokens_per_microbatch={budget}", rows=[{"messages": talk}] * 2)
    rows = examples(given) + examples(settings(tmp_path, rows=texts(9)))
    config, lease = learner_config(given), lease_of(0, rows, rank=0, world=1)
    policy = build_model(config, CPU, None)
    batches, tokens = micro_batches(config, policy, lease, 0, CPU)
    assert (len(batches) > 3) == (budget == 30) and tokens == sum(row.loss_tokens for row in rows)
    loss, measured = accumulate(policy, batches, tokens)
    expected, _, gradients = reference(given, rows)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert measured.row()["policy/entropy"] > 0
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        apart = (parameter.grad.double() - gradients[name]).norm() / gradients[name].norm()
        assert apart < 1e-4, name


def test_held_out_rows_are_measured_as_plain_transformers_would(tmp_path: Path) -> None:
    given = settings(tmp_path, "learner.max_tokens_per_microbatch=40")
    config, rows = learner_config(given), examples(given)
    found = evaluate(config, build_model(config, CPU, None), rows, rank=0, world=1, device=CPU)
    loss, right, _ = reference(given, rows)
    assert (found["loss"], found["token_accuracy"]) == (pytest.approx(loss, rel=1e-5), right)
    assert found["loss_low"] < found["loss"] < found["loss_high"]
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["count"] == 20 and found["tokens"] == sum(row.loss_tokens for row in rows)


def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held.jsonl", texts(5))
    schedule = ["learner.epochs=2", "learner.warmup_steps=2", "learner.weight_decay=0.1", f"eval.path={held_out}"]
    whole, log = train_alone(settings(tmp_path, *schedule, f"run.dir={tmp_path / 'whole'}"))
    assert [row["step"] for row in log.rows] == list(range(1, 8))
    assert [row["step"] for row in log.evaluations] == [0, 7]
    _, first = train_alone(settings(tmp_path, *schedule), stop_after=3)
    assert len(first.rows) == 3
    resumed, second = train_alone(settings(tmp_path, *schedule, "resume=auto"))
    for before, after in zip(log.rows, [*first.rows, *second.rows], strict=True):
        assert (before["step"], before["loss/total"]) == (after["step"], after["loss/total"])
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    exported = [(tmp_path / run / "hf" / "model.safetensors").read_bytes() for run in ("run", "whole")]
    assert exported[0] == exported[1]


def test_what_it_exports_is_a_model_that_learned_its_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{letter}>", "completion": letter * 3} for letter in "abcd"]
    given = settings(tmp_path, "learner.epochs=60", "learner.rows_per_step=4", "learner.save_every=100", rows=rows)
    _, log = train_alone(given)
    losses = [row["loss/total"] for row in log.rows]
    assert losses[-1] < 0.05 < 1 < losses[0]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")
    ids = tokenizer("c>", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0]) == "c>ccc<|eos|>"


def test_the_best_checkpoint_by_held_out_loss_stays(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held.jsonl", texts(40)[20:])  # other answers: learning the rows makes it worse
    keep = ["learner.keep_best=eval/heldout/loss", f"eval.path={held_out}", "eval.every=2", "learner.epochs=4"]
    _, log = train_alone(settings(tmp_path, *keep, "learner.lr=3e-2", "learner.keep_checkpoints=1"))
    measured = {int(row["step"]): row["eval/heldout/loss"] for row in log.evaluations if row["step"]}
    best = json.loads((tmp_path / "run" / "ckpt" / "best.json").read_text())
    assert best["step"] == min(measured, key=measured.__getitem__) and best["value"] == min(measured.values())
    assert (tmp_path / "run" / "ckpt" / "best" / "state.json").is_file()


def test_a_step_whose_rows_are_all_too_long_trains_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    long = [{"prompt": "p" * 90, "completion": "c"}] * 6
    _, log = train_alone(settings(tmp_path, "data.shuffle=false", rows=[*long, *texts(6)]))
    assert [row["data/overlong_dropped"] for row in log.rows] == [6.0, 0.0]
    assert [row["data/rows"] for row in log.rows] == [0.0, 6.0] and log.rows[0]["data/loss_tokens"] == 0


def test_a_row_that_cannot_be_used_ends_the_run_with_its_name(tmp_path: Path) -> None:
    given = settings(tmp_path, rows=[*texts(8), {"prompt": "q", "completion": ""}])
    with pytest.raises(DataError, match=r"rows\.jsonl:9: `completion` is empty"):
        train_alone(given)


def test_weights_that_are_no_numbers_end_the_run(tmp_path: Path) -> None:
    given = settings(tmp_path, "learner.epochs=5", "learner.max_nonfinite_steps=1")
    given.learner.lr = 1e30
    with pytest.raises(NonFiniteError):
        train_alone(given)


def test_a_checkpoint_of_reinforcement_learning_is_refused(tmp_path: Path) -> None:
    parts, _ = train_alone(settings(tmp_path))
    state = LearnerState(step=3, policy_version=4, skipped_steps=0)
    parts.checkpoints.save(state, parts.roles, {"schema": 3, "cursor": 9})
    with pytest.raises(CheckpointMismatchError, match=r"saved by reinforcement learning.*model\.path="):
        train_alone(settings(tmp_path, "resume=auto"))


def test_adapters_alone_are_trained_and_merged_into_what_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    given = settings(tmp_path, "model.lora_rank=4", "learner.lr=1e-1", "learner.epochs=3")
    parts, log = train_alone(given)
    assert log.rows[-1]["loss/total"] < log.rows[0]["loss/total"]
    trained = [name for name, tensor in parts.roles.policy.named_parameters() if tensor.requires_grad]
    assert trained and all("lora" in name for name in trained)
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_step_that_does_not_fit_is_tried_again_with_half_the_micro_batch_and_then_the_run_ends_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, fits = train_module.sft_step, 40

    def fitted(config: Any, *arguments: Any, **named: Any) -> Any:
        if config.learner.max_tokens_per_microbatch > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return step(config, *arguments, **named)

    monkeypatch.setattr(train_module, "sft_step", fitted)
    given = settings(tmp_path, "learner.max_tokens_per_microbatch=80")
    with pytest.raises(StepMemoryError, match=r"max_tokens_per_microbatch=80: CUDA out of memory\. All ranks"):
        train_alone(given)
    parts, log = train_alone(given)
    assert parts.config.learner.max_tokens_per_microbatch == 40 and [row["step"] for row in log.rows] == [1, 2, 3, 4]
    fits = 0
    with pytest.raises(ConfigError, match=r"half the micro-batch too \(40 tokens\).*activation_checkpointing=true"):
        train_alone(given)
