"""Train the quickstart's task by TRL's `GRPOTrainer`, in the virtual environment that `benchmarks.trl` made for it.

`python trl_run.py FOLDER STEPS EVERY SEED` prints a JSON line: unix time of each optimizer step, and held-out accuracy
by step. The duration of evaluations is left out of the times. Imports nothing of asyncrl, which is not installed there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

PROMPTS, GROUP, NEW_TOKENS, LR = 32, 8, 10, 3e-4
"""Prompts per step, completions per prompt, most tokens of a completion and learning rate, as in
configs/experiment/quickstart.yaml."""
THREADS = 2


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


class Watch(TrainerCallback):
    """Records when each step ended, and every `every` steps the held-out accuracy."""

    def __init__(self, folder: Path, every: int) -> None:
        self.rows = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self.every, self.left_out = every, 0.0
        self.steps: list[float] = []
        self.accuracy: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.steps.append(time.time() - self.left_out)
        if state.global_step % self.every == 0:
            began = time.time()
            self.accuracy[state.global_step] = self.measured(given["model"])
            self.left_out += time.time() - began

    @torch.no_grad()
    def measured(self, model: Any) -> float:
        asked = self.tokenizer(
            [row["prompt"] for row in self.rows], return_tensors="pt", padding=True, padding_side="left"
        )
        ids = model.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        texts = self.tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        right = exact_match(texts, [row["answer"] for row in self.rows])
        return sum(right) / len(right)


def main(folder: Path, steps: int, every: int, seed: int) -> None:
    torch.set_num_threads(THREADS)
    watch = Watch(folder, every)
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            temperature=1.0,
            beta=0.0,
            learning_rate=LR,
            lr_scheduler_type="linear",
            adam_beta2=0.95,
            max_steps=steps,
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        rows = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=scratch)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
            reward_funcs=exact_match,
            args=config,
            train_dataset=rows,
            processing_class=watch.tokenizer,
            callbacks=[watch],
        )
        trainer.train()
    print(json.dumps({"steps": watch.steps, "accuracy": watch.accuracy}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
