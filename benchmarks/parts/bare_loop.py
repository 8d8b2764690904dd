"""The quickstart's task in one process with transformers alone: a loop that generates, scores and trains in turn.

`python -m benchmarks.parts.bare_loop FOLDER STEPS SEED` prints a JSON line: for every step its seconds, its CPU seconds
and the mean reward.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.parts.bare_training import Part, bare_step

PROMPTS, GROUP, NEW_TOKENS, LR = 32, 8, 10, 3e-4
"""Prompts per step, completions per prompt, most tokens of a completion and learning rate, as in
configs/experiment/quickstart.yaml."""
THREADS = 2


def collect(model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]) -> tuple[Part, float]:
    """Generate and score a batch. Returns it with its mean reward. Prompts are padded on the left."""
    asked = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
    width = asked["input_ids"].shape[1]
    with torch.no_grad():
        ids = model.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            num_return_sequences=GROUP,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    assert isinstance(ids, torch.Tensor)
    written = ids[:, width:]
    ended = (written == tokenizer.eos_token_id).long().cumsum(1)
    chosen = (ended == 0) | ((ended == 1) & (written == tokenizer.eos_token_id))
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    answers = [row["answer"] for row in rows for _ in range(GROUP)]
    rewards = torch.tensor([float(text.strip() == answer) for text, answer in zip(texts, answers, strict=True)])
    of_groups = rewards.view(len(rows), GROUP)
    advantages = (of_groups - of_groups.mean(1, keepdim=True)) / (of_groups.std(1, keepdim=True) + 1e-6)
    mask = torch.cat([asked["attention_mask"].repeat_interleave(GROUP, 0), chosen.long()], 1)
    part = Part(
        inputs={"input_ids": ids, "attention_mask": mask},
        keep=written.shape[1] + 1,
        targets=written,
        chosen=chosen,
        advantages=advantages.view(-1, 1),
    )
    return part, float(rewards.mean())


def main(folder: Path, steps: int, seed: int) -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    seconds, cpu, rewards = [], [], []
    for step in range(steps):
        drawn = torch.randperm(len(rows))[:PROMPTS].tolist()
        started, busy = time.perf_counter(), time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / steps)
        part, reward = collect(model, tokenizer, [rows[i] for i in drawn])
        bare_step(model, optimizer, [part])
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - busy)
        rewards.append(reward)
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "rewards": rewards}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
