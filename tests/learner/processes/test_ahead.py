"""Ranks that begin before their torchrun is ready, and what they do with their instructions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import handlers

from asyncrl.cli.processes.commands import learner_command
from asyncrl.config import load_config
from asyncrl.learner.processes.ahead import Ahead, ranks_and_command
from asyncrl.learner.torchrun import take_first

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
RANK = "import json, os, sys; from asyncrl.learner.processes.launcher import as_rank; from pathlib import Path\n"
RANK += "def work(opened):\n    told = {'pid': os.getpid(), 'input': sys.stdin.read(), **os.environ}\n"
RANK += "    Path(sys.argv[1] + os.environ['LOCAL_RANK']).write_text(json.dumps(told)); sys.exit(7)\n"
RANK += "sys.exit(as_rank(work, 'test'))"


def test_the_ranks_of_a_run_on_this_machine_are_known_from_the_command_that_starts_their_torchrun() -> None:
    config = load_config(["learner.ranks=3", "model.path=m", "data.path=d", "reward.function=r.py:f"])
    for module in ("asyncrl.learner", "asyncrl.sft"):
        command = learner_command(config, ["run.name=-m", "x=a b"], "id", module).arguments
        found = ranks_and_command(command[3:], ONE_THREAD)
        assert found == (3, (sys.executable, "-u", "-m", module, "run.name=-m", "x=a b"))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-m"],
        ["--nnodes=1", "--nproc-per-node=2", "-m"],
        ["--nnodes=2", "--nproc-per-node=2", "-m", "asyncrl.learner"],
        ["--nproc-per-node=2", "-m", "asyncrl.learner"],
        ["--nnodes=1", "--nproc-per-node=gpu", "-m", "asyncrl.learner"],
        ["--nnodes=1", "--nproc-per-node=2", "--nproc-per-node=1", "-m", "asyncrl.learner"],
        ["--nnodes=1", "--nproc-per-node=2", "-m", "asyncrl.cli.rerun"],
        ["--nnodes=1", "--nproc-per-node=2", "script.py", "-m", "another"],
    ],
)
def test_where_more_or_others_may_be_started_torchrun_starts_them_itself(arguments: list[str]) -> None:
    assert ranks_and_command(arguments, ONE_THREAD) == (0, ())


def test_threads_that_torchrun_would_set_are_left_to_it() -> None:
    assert ranks_and_command(["--nnodes=1", "--nproc-per-node=2", "-m", "asyncrl.learner"], {}) == (0, ())


@pytest.fixture
def torchruns_handler() -> Iterator[None]:
    own = handlers.SubprocessHandler
    yield
    handlers.SubprocessHandler = own


def start(rank: int, command: Sequence[str], output: str | None = None) -> Any:
    """As torchrun starts a rank."""
    told = {"TORCHELASTIC_RUN_ID": "id", "MASTER_PORT": "1", "LOCAL_RANK": str(rank), "ODD": "\udcff=\n"}
    entrypoint, *arguments = command
    return handlers.get_subprocess_handler(entrypoint, tuple(arguments), told, output, None, rank)  # pyright: ignore


@pytest.mark.usefixtures("torchruns_handler")
def test_torchrun_takes_each_rank_that_has_begun_once_and_it_knows_all_that_torchrun_sets(tmp_path: Path) -> None:
    command = (sys.executable, "-c", RANK, f"{tmp_path}/rank")
    begun = Ahead(2, command)
    pids = [process.pid for process in begun._begun.values()]
    take_first(begun)
    first = [start(rank, command) for rank in range(2)]
    assert [handler.proc.pid for handler in first] == pids
    assert [handler.proc.wait(120) for handler in first] == [7, 7]
    for rank, pid in enumerate(pids):
        said = json.loads((tmp_path / f"rank{rank}").read_text())
        assert said["pid"] == pid and said["input"] == "" and "ASYNCRL_AHEAD" not in said
        wanted = {"TORCHELASTIC_RUN_ID": "id", "MASTER_PORT": "1", "LOCAL_RANK": str(rank), "ODD": "\udcff=\n"}
        assert said | wanted == said
    again = start(0, command)  # after a death
    assert again.proc.wait(120) == 7 and again.proc.pid not in pids


@pytest.mark.usefixtures("torchruns_handler")
def test_a_rank_that_torchrun_starts_otherwise_or_that_has_ended_is_started_by_it(tmp_path: Path) -> None:
    command = (sys.executable, "-c", RANK, f"{tmp_path}/rank")
    begun = Ahead(3, command)
    waiting = dict(begun._begun)
    waiting[2].kill()
    waiting[2].wait(120)
    take_first(begun)
    other = start(0, (*command, "more"))
    assert other.proc.wait(120) == 7 and other.proc.pid != waiting[0].pid and waiting[0].poll() is not None
    redirected = start(1, command, f"{tmp_path}/output")
    assert redirected.proc.wait(120) == 7 and redirected.proc.pid != waiting[1].pid and waiting[1].poll() is not None
    ended = start(2, command)
    assert ended.proc.wait(120) == 7 and ended.proc.pid != waiting[2].pid


def test_a_rank_whose_torchrun_ends_before_it_tells_anything_ends_too() -> None:
    code = "import sys; from asyncrl.learner.processes.ahead import Ahead\n"
    code += f"begun = Ahead(1, (sys.executable, '-c', {RANK!r}, ''))\nprint(begun._begun[0].pid, flush=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    # Its standard output is open until it has ended.
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
