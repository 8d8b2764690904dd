"""What SECURITY.md says of the code as a whole, and that each of its lines has a test."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.learner.backends import factory
from asyncrl.learner.backends.factory import group_interfaces
from asyncrl.rollout.pool.pool import hold_ray_to_loopback

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "SECURITY.md").read_text()
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
EVALUATES = {"eval", "exec", "compile", "__import__"}


def offences(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        found += [f"import {name}" for name in names if name in UNPICKLES]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if called in EVALUATES or (called == "torch.load" and keywords.get("weights_only") != "True"):
            found.append(called)
        found += [
            f"{key}={keywords[key]}"
            for key in ("trust_remote_code", "allow_pickle")
            if keywords.get(key, "False") != "False"
        ]
    return [f"{path}: {each}" for each in found]


def test_no_module_unpickles_evaluates_or_runs_code_of_a_checkpoint() -> None:
    modules = [*(ROOT / "asyncrl").rglob("*.py"), *(ROOT / "launchers").glob("*.py")]
    assert len(modules) > 200
    assert [each for path in modules for each in offences(path)] == []


@pytest.mark.parametrize(
    "line", ["import pickle", "from marshal import loads", "eval('1')", "torch.load('f')", "f(trust_remote_code=flag)"]
)
def test_the_search_for_such_code_would_find_it(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert len(offences(tmp_path / "module.py")) == 1


def test_what_the_user_exported_wins_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "own_address", {"10.0.0.6": "10.0.0.7"}.__getitem__)
    monkeypatch.setattr(factory, "interface_of", {"10.0.0.7": "eth5"}.__getitem__)
    here = {"MASTER_ADDR": "127.0.0.1"}
    assert group_interfaces(here, "127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert group_interfaces(here, "10.0.0.6") == {"GLOO_SOCKET_IFNAME": "lo"}, "nccl carries the weights elsewhere"
    # By its own name a machine may be 127.0.1.1 to itself, where no rank of another one finds it.
    assert group_interfaces({"MASTER_ADDR": "10.0.0.6"}, "10.0.0.6") == {"GLOO_SOCKET_IFNAME": "eth5"}
    assert group_interfaces({"MASTER_ADDR": "10.0.0.6", "GLOO_SOCKET_IFNAME": "eth1"}, "10.0.0.6") == {}
    assert group_interfaces(here | {"GLOO_SOCKET_IFNAME": "eth1"}, "10.0.0.6") == {}
    named = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth2"}
    assert group_interfaces(here, "10.0.0.6", "eth2") == named, "weights.interface"
    required = ["model.path=m", "data.path=d", "reward.function=r.py:f", "rollout.host=ray"]
    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    for settings, exported, held in (([], {}, "0"), ([], {variable: "1"}, "1"), (["ray.address=auto"], {}, None)):
        environment: dict[str, str] = dict(exported)
        hold_ray_to_loopback(load_config([*required, *settings]), environment)
        assert environment.get(variable) == held


def launched(*settings: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`launchers/learner.sh` with a Python that says what it was called with."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME")}
    return subprocess.run(
        ["bash", str(ROOT / "launchers" / "learner.sh"), "learner.steps=1", *settings],
        env=kept | {"PYTHON": "echo"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_learner_s_launcher_takes_the_rendezvous_that_listens_on_one_address() -> None:
    alone = launched().stdout
    assert "asyncrl.learner.torchrun" in alone and "--rdzv-backend=bound --rdzv-endpoint=127.0.0.1:0" in alone
    several = launched(NNODES="2", RDZV_ENDPOINT="10.0.0.6:29400", NODE_RANK="1").stdout
    assert "--rdzv-endpoint=10.0.0.6:29400 --rdzv-conf=rank=1" in several and "--rdzv-backend=bound" in several
    unnumbered = launched(NNODES="2", RDZV_ENDPOINT="10.0.0.6:29400")
    assert unnumbered.returncode == 2 and "NODE_RANK" in unnumbered.stderr
    c10d = {"NNODES": "1:4", "RDZV_ENDPOINT": "10.0.0.6:29400", "RDZV_BACKEND": "c10d"}
    unnamed = launched(**c10d)
    assert unnamed.returncode == 2 and "RUN_ID" in unnamed.stderr
    elastic = launched(**c10d, RUN_ID="mine")
    assert "--rdzv-backend=c10d" in elastic.stdout
    # A machine that leaves is a restart of all: after four of them, in all its life, such a run ended.
    assert "--max-restarts=20 " in elastic.stdout and "--max-restarts=3 " in several


def test_the_learner_s_launcher_starts_no_ranks_for_a_plan() -> None:
    plan = "-m asyncrl learner learner.steps=1 --dry-run"
    assert launched("--dry-run").stdout == f"{plan} learner.ranks=1\n"
    assert launched("--dry-run", NPROC_PER_NODE="8").stdout == f"{plan} learner.ranks=8\n"
    assert launched("--dry-run", NPROC_PER_NODE="8", NNODES="2:4").stdout == f"{plan} learner.ranks=16\n"
    assert launched("--dry-run", NPROC_PER_NODE="gpu").stdout == f"{plan}\n"
    alone = launched("--dry-run", NPROC_PER_NODE="8", NNODES="2", MODULE="asyncrl.sft").stdout
    assert alone == "-m asyncrl sft learner.steps=1 --dry-run learner.ranks=8\n"


def test_every_line_of_the_page_names_a_test_that_is_there() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "`tests/" in line]
    named = [test for *_, tests in rows for test in re.findall(r"`(tests/[\w/]+\.py::\w+)`", tests)]
    assert len(named) >= len(rows) > 10
    for path, _, name in (test.partition("::") for test in named):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), flags=re.MULTILINE), f"{path}: {name}"
    lines = PAGE.partition("## What is protected")[2].partition("## Tested by")[0]
    titles = re.findall(r"^- \*\*([\w ]+)", lines, flags=re.MULTILINE)
    assert len(titles) > 16
    missing = [title for title in titles if not any(row[0].startswith(title.strip()) for row in rows)]
    assert missing == []
