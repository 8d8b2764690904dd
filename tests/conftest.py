"""Settings and fixtures of all tests. They check that no test leaves a thread or process of its own behind."""

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
"""Seconds for threads and processes that were told to end: one may be in its last poll or closing its sockets."""
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "wandb-core")
"""Parts of the command lines of processes that Python, or a package, keeps for its whole life."""
FOREIGN = ("tqdm", "wandb", "zmq")
"""Packages whose own threads cannot be ended."""
OURS = ("replay-", "weights-", "journal", "lease-", "network")
"""Prefixes of thread names. In tests with vLLM, which keeps threads and processes of its own, only these count."""

MARKS = ("slow", "unhurried", "long", "gpu")
"""The marks by which `launchers/test.sh` selects tests."""

# A shell makes a background job ignore Ctrl-C, and its children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a machine that stalls for two seconds says nothing about an example.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# No test asks the Hugging Face hub: without a network a request may take long to fail.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The modules of the tests are all imported in one go and stay: no collection is needed meanwhile.
collector.rest()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run `pytest -m "not slow"`, without paths, by pytest-xdist with three processes for two cores, since a quarter of
    the time is spent waiting. Slow tests start processes of their own, and tests given by path run in one process."""
    if (
        not hasattr(config, "workerinput")  # not in a process of pytest-xdist, which would start as many again
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
    """Ignore files without a selected test, so that they are not imported. With `-m "slow and unhurried and not gpu"`
    these are the files that lack one of the first two marks, or give all their tests the third."""
    every = str(config.getoption("markexpr")).split(" and ")
    if not all(mark.removeprefix("not ").isidentifier() for mark in every):  # none, or one with an "or", say
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
    """Check that every mark is written in the file of its test, which `pytest_ignore_collect` needs, and that every
    long test is also slow. The fast part checks all files."""
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
    """Return the pids of the children of this process and of its forkserver (`tests/forked.py`)."""
    server = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    return children_of(os.getpid()) | (set() if server is None else children_of(server))


def children_of(parent: int) -> set[int]:
    """Return the pids of the children of `parent`. The kernel lists them by the thread that started them."""
    found: set[int] = set()
    for listed in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, listed.read_text().split()))
    return found


def described(pid: int) -> str:
    """Return the pid and command line of a process; empty if it is dead or may stay."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        dead = process.status() == psutil.STATUS_ZOMBIE
        own = process.ppid() == os.getpid()  # A child of the forkserver has the forkserver's command line.
    except psutil.Error:
        return ""
    return "" if dead or (own and any(name in command for name in KEPT)) else f"process {pid}: {command[:200]}"


def foreign(thread: threading.Thread) -> bool:
    """Return whether a thread is one of `FOREIGN`, by the module of its class or by its name."""
    return type(thread).__module__.partition(".")[0] in FOREIGN or thread.name.partition("-")[0] in FOREIGN


def left_behind(threads: set[threading.Thread], processes: set[int], beside_vllm: bool) -> list[str]:
    """Return descriptions of the threads and processes that are alive and were not there before."""
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
    """Check the metric names in all run folders that the tests have made, in any process."""
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
    """Check what the fixtures of a whole module leave behind."""
    with nothing_is_left_behind("vllm" in request.node.nodeid):
        yield
