"""Two ranks learn the same as one, and each layout continues from the other's checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.learner.backends.factory import backend_of
from asyncrl.learner.parallel.place import Place
from asyncrl.sft import assembly
from asyncrl.sft.settings import SftConfig, learner_config
from asyncrl.sft.train import train_rows
from tests.learner.rank_process import on_ranks, whole
from tests.learner.smooth_steps import EQUAL, RATE, apart, make_smooth_optimizer
from tests.sft.given import CPU, KeptRows, settings, texts, write

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]


def trained(given: SftConfig, world: int) -> Path:
    """The run folder, with `last.safetensors`, the weights, and `row.safetensors`, the last rows of the log."""
    folder = Path(given.run.dir)
    on_ranks(_rank, world, folder, world, given)
    return folder


def _rank(rank: int, world: int, given: SftConfig) -> None:
    assembly.make_optimizer = make_smooth_optimizer
    folder, log = Path(given.run.dir), KeptRows()
    place = Place(rank=rank, world=world, device=CPU, restarted=False, run_id="ranks")
    with ExitStack() as opened:
        parts = assembly.assemble(
            given,
            place,
            opened,
            backend=backend_of(learner_config(given), place),
            run_dir=folder,
            log=lambda _: log,
        )
        train_rows(parts)
    last = {name: whole(tensor) for name, tensor in parts.roles.policy.named_parameters()}
    if rank == 0:
        save_file(last, folder / "last.safetensors")
        row = log.rows[-1] | log.evaluations[-1]
        del row["policy_version"]
        save_file({name: torch.tensor(value) for name, value in row.items()}, folder / "row.safetensors")


def test_two_ranks_learn_the_same_weights_as_one_and_resume_each_other(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held.jsonl", texts(7))
    own = [f"learner.lr={RATE}", "learner.max_tokens_per_microbatch=40", f"eval.path={held_out}"]

    def given(run: str, *more: str) -> SftConfig:
        return settings(tmp_path, *own, f"run.dir={tmp_path / run}", "learner.schedule=constant", *more)

    one, two = trained(given("one"), 1), trained(given("two"), 2)
    begun = {f"hf.{name}": tensor for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items()}
    first, second = (load_file(folder / "last.safetensors") for folder in (one, two))
    begun = {name: begun[name] for name in first}
    assert apart(first, second, begun) < EQUAL
    trained(given("three", "learner.epochs=0.6"), 2)
    third = load_file(trained(given("three", "resume=auto"), 1) / "last.safetensors")
    assert apart(first, third, begun) < EQUAL, "the first half on two ranks, the second on one"
    shared = trained(given("four", "learner.ranks=2", "learner.sequence_parallel=2"), 2)
    assert apart(first, load_file(shared / "last.safetensors"), begun) < EQUAL
    expected, *rows = (load_file(folder / "row.safetensors") for folder in (one, two, shared))
    for row in rows:
        for name in expected:
            if not name.startswith(("time/", "perf/", "checkpoint/")):
                assert expected[name].item() == pytest.approx(row[name].item(), abs=1e-4, rel=1e-3), name
