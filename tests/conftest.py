"""Every test leaves what it found: no thread and no process of its own goes on after it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from asyncrl import collector
from asyncrl.storage.lines import read_lines
from asyncrl.telemetry.folder.resumed import CONFIG_FILE
from asyncrl.telemetry.metrics.log import METRICS_FILE
from asyncrl.telemetry.metrics.registry import OF_EVERY_ROW, metric_of

PATIENCE_S = 60.0
"""For what was told to end and has not quite: a thread in its last poll, a process that is closing its sockets."""
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "wandb-core")
"""In the command line of processes that Python, or a package, keeps for as long as it runs."""
FOREIGN = ("tqdm", "wandb", "zmq")
"""Packages whose own threads nobody can end."""
OURS = ("replay-", "weights-", "journal", "lease-", "network")
"""Names of threads, as they begin. Beside vLLM, which keeps threads and processes as it likes, only these count."""

MARKS = ("slow", "unhurried", "long", "gpu")
"""By which `launchers/test.sh` chooses."""

# Whoever starts this in the background of a shell has it ignore Ctrl-C, and all its children with it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that stands still for two seconds says nothing about an example.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# No test asks the Hugging Face hub. Without a network a machine may take its time to say that there is none.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# All modules of the tests are imported one after the other, and stay.
collector.rest()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest -m "not slow"`, and nothing else asked: three processes for two cores, for a quarter of the time is spent
    waiting, by pytest-xdist. Slow tests start processes of their own, and what was asked by its path is looked at in
    one."""
    if (
        not hasattr(config, "workerinput")  # one of these processes, which would start as many again, and they too
        and config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and "not slow" in config.option.markexpr.split(" and ")
        and config.getoption("numprocesses", default=0) is None  # -n 0 is one process; 0: without pytest-xdist
        and not config.option.usepdb
    ):
        config.option.numprocesses, config.option.dist = math.ceil(1.5 * len(os.sched_getaffinity(0))), "loadfile"
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    collector.wake()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m "slow and unhurried and not gpu"`: a file that does not write the first two words, or gives all its tests
    the third, has no test of that kind, and is not imported at all."""
    every = config.getoption("markexpr").split(" and ")
    if not all(mark.removeprefix("not ").isidentifier() for mark in every):  # none at all, or an "or" in it, say
        return None
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    asked = [mark for mark in every if mark.isidentifier()]
    whole = set(re.findall(r"mark\.(\w+)", "".join(re.findall(r"^pytestmark = .*$", text, re.MULTILINE))))
    refused = whole.intersection(mark.removeprefix("not ") for mark in every if not mark.isidentifier())
    return True if refused or any(f"mark.{mark}" not in text for mark in asked) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every mark stands in the file of its test, for `pytest_ignore_collect`; the fast part looks at all of them."""
    texts = {path: path.read_text() for path in {item.path for item in items} if path.suffix == ".py"}
    for item in items:
        lacking = [mark for mark in MARKS if item.get_closest_marker(mark) and f"mark.{mark}" not in texts[item.path]]
        if lacking:
            raise pytest.UsageError(f"{item.nodeid}: write pytest.mark.{lacking[0]} in this file, or it is left out")
        if item.get_closest_marker("long") and not item.get_closest_marker("slow"):
            raise pytest.UsageError(
                f"{item.nodeid} is long: write pytest.mark.slow beside it, or the fast part runs it"
            )


def children() -> set[int]:
    """Process ids of this process's children, and of those of its forkserver (`tests/forked.py`)."""
    server = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    return children_of(os.getpid()) | (set() if server is None else children_of(server))


def children_of(parent: int) -> set[int]:
    """The kernel lists them by the thread that started them."""
    found: set[int] = set()
    for listed in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, listed.read_text().split()))
    return found


def described(pid: int) -> str:
    """Its command line; empty if it is dead or may stay."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        dead = process.status() == psutil.STATUS_ZOMBIE
        own = process.ppid() == os.getpid()  # A child of the forkserver has the forkserver's command line.
    except psutil.Error:
        return ""
    return "" if dead or (own and any(name in command for name in KEPT)) else f"process {pid}: {command[:200]}"


def foreign(thread: threading.Thread) -> bool:
    """By the module of its class, or by its name."""
    return type(thread).__module__.partition(".")[0] in FOREIGN or thread.name.partition("-")[0] in FOREIGN


def left_behind(threads: set[threading.Thread], processes: set[int], beside_vllm: bool) -> list[str]:
    """What is alive and was not there before."""
    new = [thread for thread in set(threading.enumerate()) - threads if not foreign(thread)]
    found = [f"thread {thread.name!r}" for thread in new if not beside_vllm or thread.name.startswith(OURS)]
    return found + [said for pid in children() - processes if not beside_vllm and (said := described(pid))]


@contextlib.contextmanager
def nothing_is_left_behind(beside_vllm: bool) -> Iterator[None]:
    threads, processes = set(threading.enumerate()), children()
    yield
    until = time.monotonic() + PATIENCE_S
    while found := left_behind(threads, processes, beside_vllm):
        if time.monotonic() > until:
            pytest.fail(f"still there {PATIENCE_S:.0f} s after its end: {'; '.join(found)}", pytrace=False)
        time.sleep(0.02)


@pytest.fixture(autouse=True, scope="session")
def _every_run_wrote_metrics_that_are_registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of all run folders that tests have made, in whatever process."""
    yield
    strange: dict[str, str] = {}
    for rows in sorted(tmp_path_factory.getbasetemp().rglob(METRICS_FILE)):
        if (rows.parent / CONFIG_FILE).is_file():
            names = {name for row in read_lines(rows).rows for name in row if name not in OF_EVERY_ROW}
            strange |= {name: str(rows) for name in names if metric_of(name) is None}
    assert strange == {}, "write these into asyncrl/telemetry/metrics/of_steps.py or of_runs.py"


@pytest.fixture(autouse=True)
def _a_test_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if "vllm" in request.node.nodeid:  # One engine serves a whole module, and starts threads when it first needs them.
        yield
        return
    with nothing_is_left_behind(beside_vllm=False):
        yield


@pytest.fixture(autouse=True, scope="module")
def _a_module_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the fixtures of a whole module hold."""
    with nothing_is_left_behind("vllm" in request.node.nodeid):
        yield
