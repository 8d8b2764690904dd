"""Two ranks learn the same as one, and each layout continues from the other's checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import start_processes

from asyncrl.learner.backends.factory import backend_of
from asyncrl.learner.parallel.place import Place
from asyncrl.sft import assembly
from asyncrl.sft.settings import SftConfig, learner_config
from asyncrl.sft.train import train_rows
from tests.forked import forked_from
from tests.learner.rank_process import whole
from tests.learner.smooth_steps import EQUAL, RATE, apart, make_smooth_optimizer
from tests.sft.given import CPU, KeptRows, settings, texts, write

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]


def trained(given: SftConfig, world: int) -> Path:
    """The run folder, with `last.safetensors`, the weights, and `row.safetensors`, the last rows of the log."""
    folder = Path(given.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    forked_from(__name__)
    start_processes(_rank, args=(world, given), nprocs=world, start_method="forkserver")
    return folder


def _rank(rank: int, world: int, given: SftConfig) -> None:
    torch.set_num_threads(1)
    assembly.make_optimizer = make_smooth_optimizer
    folder, log = Path(given.run.dir), KeptRows()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
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
    dist.barrier()
    dist.destroy_process_group()


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
