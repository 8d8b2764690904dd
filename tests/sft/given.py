"""Settings, rows and a tiny model for the tests of SFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from asyncrl.checks.sources import Source
from asyncrl.learner.parallel.place import Place
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.sft.assembly import assemble
from asyncrl.sft.rows import SftRows, train_sources
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import SftConfig
from asyncrl.sft.train import SftTraining, train_rows
from tests.learner.fed_replay import KeptRows
from tests.learner.feed import tiny_checkpoint

CPU = torch.device("cpu")
PLACE = Place(rank=0, world=1, device=CPU, restarted=False, run_id="alone")


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def texts(count: int) -> list[dict[str, str]]:
    """Return rows of several lengths."""
    return [{"prompt": f"q{i}" * (1 + i % 3) + ">", "completion": f"{i * 7919}"[: 1 + i % 5]} for i in range(count)]


def settings(folder: Path, *overrides: str, rows: Sequence[Mapping[str, Any]] | None = None) -> SftConfig:
    """Return a config with a model and rows in `folder`, which are made at the first call."""
    model, file = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        save_byte_tokenizer(tiny_checkpoint(model))
    if rows is not None or not file.exists():
        write(file, texts(20) if rows is None else rows)
    own = ["learner.rows_per_step=6", "learner.lr=1e-2", "learner.save_every=2", "data.max_tokens=64"]
    return load_sft([f"model.path={model}", f"data.path={file}", f"run.dir={folder / 'run'}", *own, *overrides])


def rows_of(given: SftConfig) -> SftRows:
    (source,) = train_sources(given)
    assert isinstance(source, Source)
    return SftRows(source, given.data)


def train_alone(given: SftConfig, stop_after: int = 0) -> tuple[SftTraining, KeptRows]:
    """Train one rank in this process.

    Args:
        stop_after: number of steps after which the training is asked to stop; 0 is never.
    """
    log = KeptRows()
    with ExitStack() as opened:
        parts = assemble(given, PLACE, opened, backend=None, run_dir=Path(given.run.dir), log=lambda _: log)
        train_rows(parts, lambda: 0 < stop_after <= len(log.rows))
    return parts, log


def weights(parts: SftTraining) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in parts.roles.policy.named_parameters()}
