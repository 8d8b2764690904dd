"""Ranks on one machine act as two machines: each has a run folder of its own, or both share one."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from asyncrl.errors import CheckpointError, RunFolderError
from asyncrl.learner import assembly
from asyncrl.learner.checkpoints import sealing
from asyncrl.learner.parallel.place import Place
from asyncrl.schema import Config
from asyncrl.storage import sealed
from tests.learner.fed_replay import FedReplay, KeptRows, KeptWeights
from tests.learner.rank_process import on_ranks

CPU = torch.device("cpu")
pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two ranks saw in each case, by rank."""
    folder = tmp_path_factory.mktemp("machines")
    on_ranks(_rank, 2, folder, folder)
    ranks = [json.loads((folder / f"told_{rank}.json").read_text()) for rank in (0, 1)]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def _rank(rank: int, folder: Path) -> None:
    own = folder / f"machine_{rank}"
    cases = {
        "start": lambda: _start(rank, own),
        "start_shared": lambda: sealing.refuse_unshared(folder / "shared", rank, CPU),
        "left": lambda: [path.name for path in (folder / "shared").iterdir()] if rank == 0 else [],
        "save": lambda: _save(rank, own),
        "save_shared": lambda: _save(rank, folder / "shared"),
    }
    told = {}
    for case, run in cases.items():
        try:
            told[case] = run()
        except (RunFolderError, CheckpointError) as error:
            told[case] = f"{type(error).__name__}: {error}"
        dist.barrier()
    (folder / f"told_{rank}.json").write_text(json.dumps(told))


def _start(rank: int, run_dir: Path) -> None:
    assembly.refuse_unshared = partial(sealing.refuse_unshared, within_s=0.5)
    with ExitStack() as opened:
        assembly.assemble(
            Config(),
            Place(rank=rank, world=2, device=CPU, restarted=False, run_id="two"),
            opened,
            backend=None,
            replay=FedReplay(groups=1, size=1),
            run_dir=run_dir,
            resume="auto",
            publisher=lambda _: KeptWeights(),
            log=lambda _: KeptRows(),
        )


def _save(rank: int, folder: Path) -> list[str]:
    """Files that this rank hashed, and those of the manifest on rank 0."""
    mesh = init_device_mesh("cpu", (2,))
    tensors: dict[str, DTensor] = {"weight": distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])}
    aside = folder / "step_1.tmp"
    if rank == 0:
        aside.mkdir(parents=True)
    dist.barrier()
    state_dict_saver.save(tensors, checkpoint_id=aside)
    hashed: list[str] = []
    digest = sealed._digest
    sealed._digest = lambda path: hashed.append(path.name) or digest(path)
    try:
        entries = sealing.prove_own(aside, rank, CPU, within_s=0.5)
    finally:
        sealed._digest = digest
    if rank == 0:
        sealed.seal(aside, entries)
        sealed.verify(aside)
    return hashed


@pytest.mark.slow
def test_two_machines_without_a_shared_folder_are_refused_at_the_start_of_the_learner(told: dict[str, list[Any]]):
    for refusal in told["start"]:
        assert refusal.startswith("RunFolderError: rank 1 (")
        assert "machine_1/ckpt" not in refusal and "must name one folder that all learner machines share" in refusal


@pytest.mark.slow
def test_a_folder_that_all_share_is_taken_and_nothing_is_left_in_it(told: dict[str, list[Any]]):
    assert told["start_shared"] == [None, None]
    assert told["left"] == [[], []]


@pytest.mark.slow
def test_a_checkpoint_of_which_a_part_lies_on_another_machine_is_never_sealed(told: dict[str, list[Any]]):
    for refusal in told["save"]:
        assert refusal.startswith("CheckpointError: ") and "__1_0.distcp was written by another rank" in refusal


@pytest.mark.slow
def test_each_rank_hashes_what_it_wrote_and_nothing_else(told: dict[str, list[Any]]):
    assert told["save_shared"] == [["__0_0.distcp"], ["__1_0.distcp"]]


@pytest.mark.parametrize("damage", ["short", "gone"])
def test_a_file_that_lacks_what_the_metadata_promises_is_named(tmp_path: Path, damage: str):
    aside = tmp_path / "step_1.tmp"
    aside.mkdir()
    state_dict_saver.save({"weight": torch.arange(64.0)}, checkpoint_id=aside, no_dist=True)
    (file,) = aside.glob("*.distcp")
    if damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no rank wrote all of __0_0\.distcp"):
        sealing.prove_own(aside, 0, CPU)


def test_the_metadata_of_a_file_is_the_end_of_its_last_tensor(tmp_path: Path):
    state_dict_saver.save({"a": torch.ones(3), "b": torch.ones(5)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = sealing.FileSystemReader(tmp_path).read_metadata()
    assert metadata.storage_data is not None and MetadataIndex("a", torch.Size([0])) in metadata.storage_data
    (end,) = sealing.promised_bytes(metadata).values()
    assert end == (tmp_path / "__0_0.distcp").stat().st_size
