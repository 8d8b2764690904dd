"""`asyncrl doctor [DIR]`: finds what on this machine would make a run fail, before one is started.

Each check measures or reads one thing and explains the consequences. Nothing is changed; the files written into DIR
are deleted.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from asyncrl import __version__
from asyncrl.checks.installed_vllm import version_of
from asyncrl.checks.programs import nvidia_smi, output_of
from asyncrl.cli.processes.ports import PORTS
from asyncrl.storage.memory import container_bytes

OK, WARNING, PROBLEM = "ok", "warning", "problem"
FREE_LOW, FREE_LEAST = 10 << 30, 1 << 30
FSYNC_SLOW_S = 0.02
"""Duration of a sync in seconds that counts as slow. An insert is answered once its bytes are synced: at 20 ms a server
answers fifty times a second."""
FSYNCS, WRITTEN = 16, 32 << 20
FILES_LEAST = 4096
SHM_LEAST = 1 << 30
ANSWERED_S = 2.0
"""Timeout of a connection from this machine to itself, in seconds."""
TIME_ERROR = 5
"""Return value of adjtimex if nothing synchronizes the clock."""
NETWORK_FILES = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "beegfs", "glusterfs")
ENGINES = {"transformers": "built in", "vllm": "asyncrl[vllm]"}
"""Package of each engine, and how it is installed."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    state: str
    """`ok`, `warning` (a run works, with this cost) or `problem` (something will not work)."""
    said: str
    """What was found and, if it is not well, the consequences and what to do."""


Found = Iterator[tuple[str, str]]
"""State and text of findings, see `Finding`."""


def packages(required: Sequence[str], installed: Callable[[str], str | None]) -> Found:
    """Check versions against the ranges that asyncrl declares; a missing extra is not a finding."""
    fine = True
    for wanted in map(Requirement, required):
        version = installed(wanted.name)
        if version is None and wanted.marker is None:
            fine = False
            yield PROBLEM, f"{wanted.name} is not installed: pip install asyncrl"
        elif version is not None and not wanted.specifier.contains(version, prereleases=True):
            fine = False
            said = f"{wanted.name} {version} is outside {wanted.specifier}, the versions that asyncrl supports"
            yield WARNING, f"{said}: pip install '{wanted.name}{wanted.specifier}'"
    if fine:
        yield OK, f"asyncrl {__version__}: every package has a supported version"


def engines(installed: Callable[[str], str | None]) -> Found:
    """Report which engines are available here."""
    versions = {name: installed(name) or installed(f"{name}-cpu") for name in ENGINES}
    there = ", ".join(f"{name} {version} ({ENGINES[name]})" for name, version in versions.items() if version)
    yield OK, there if versions["vllm"] else f"{there}; engine=vllm needs pip install 'asyncrl[vllm]'"


def gpus(told: str | None, torch_sees: Callable[[], str]) -> Found:
    """Check the GPUs.

    Args:
        told: output of nvidia-smi, `name, total MiB, used MiB, driver`, a line per GPU; None if there is none.
        torch_sees: returns `CUDA version that torch was built for, number of GPUs that it can use`; called if there is
            a GPU.
    """
    if told is None:
        yield OK, "none (no nvidia-smi): learner and engines compute on the CPU"
        return
    lines = told.strip().splitlines()
    for number, line in enumerate(lines):
        if line.count(",") < 3:
            yield PROBLEM, f"nvidia-smi says of its GPUs: {line}"
            return
        name, total, used, driver = (part.strip() for part in line.rsplit(",", 3))
        said = f"{number}: {name}, {total} MiB, {used} MiB in use, driver {driver}"
        taken = used.isdecimal() and total.isdecimal() and int(used) > int(total) // 20
        more = ". Another process uses it, so the memory that a run needs may not be free" if taken else ""
        yield WARNING if taken else OK, said + more
    built_for, _, usable = torch_sees().strip().partition(" ")
    if usable != str(len(lines)):
        yield (
            PROBLEM,
            f"torch (for CUDA {built_for}) can use {usable or 0} of {len(lines)} GPUs: it was built without CUDA, the "
            "driver is older than its CUDA, or CUDA_VISIBLE_DEVICES hides them",
        )


def memory(total: int, shared: int, container: int | None = None) -> Found:
    """Check the memory, the free part of /dev/shm, and the limit of this container, in bytes."""
    bound = "" if container is None else f", of which this container may use {container / 2**30:.1f} GiB"
    yield OK, f"{total / 2**30:.1f} GiB{bound}, {len(os.sched_getaffinity(0))} CPU cores"
    if shared < SHM_LEAST:
        yield (
            WARNING,
            f"/dev/shm has {shared / 2**20:.0f} MiB left. With so little, Ray puts its objects into /tmp, and NCCL and "
            "vLLM with several GPUs fail. Delete the files that killed vLLM engines left there (vllm_dist_*, psm_*, "
            "while no engine runs), or start the container with --shm-size=8g",
        )


def files(soft: int) -> Found:
    """Check the limit on open files of a process: each connection is one."""
    few = soft < FILES_LEAST
    more = ". With hundreds of workers the replay server needs more: run ulimit -n 65536" if few else ""
    yield WARNING if few else OK, f"a process may open {soft}{more}"


def disk(folder: Path) -> Found:
    """Return the findings of `judge_disk`, or that nothing can be written there."""
    try:
        sync_s, rate = measured(folder)
    except OSError as error:
        return iter([(PROBLEM, f"{folder} cannot be written: {error}. Give a run.dir that can be written")])
    mounts = Path("/proc/mounts").read_text() if Path("/proc/mounts").exists() else ""
    free = shutil.disk_usage(folder).free
    return judge_disk(folder, free, sync_s, rate, filesystem_of(folder.resolve(), mounts))


def measured(folder: Path) -> tuple[float, float]:
    """Write and sync in `folder` as the journal does. Returns seconds per sync and bytes per second. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
        block, took = os.urandom(4096), []
        with (Path(place) / "synced").open("wb") as file:
            for _ in range(FSYNCS):
                file.write(block)
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                took.append(time.perf_counter() - began)
        began = time.perf_counter()
        with (Path(place) / "written").open("wb") as file:
            file.write(os.urandom(1 << 20) * (WRITTEN >> 20))
            file.flush()
            os.fsync(file.fileno())
        return statistics.median(took), WRITTEN / (time.perf_counter() - began)


def judge_disk(folder: Path, free: int, sync_s: float, rate: float, kind: str) -> Found:
    said = f"{folder}: {free / 2**30:.1f} GiB free, a sync takes {sync_s * 1e3:.1f} ms, {rate / 2**20:.0f} MiB/s"
    yield OK, f"{said}{f', {kind}' if kind else ''}"
    if free < FREE_LEAST:
        yield PROBLEM, f"less than 1 GiB is free in {folder}. A run would wait for space and then end"
    elif free < FREE_LOW:
        yield WARNING, f"less than 10 GiB is free in {folder}. A checkpoint takes 12 bytes per parameter"
    if sync_s > FSYNC_SLOW_S:
        yield WARNING, "each insert waits for a sync, so rollouts will wait. Give a run.dir on a local disk"
    if kind in NETWORK_FILES:
        yield (
            WARNING,
            f"{folder} is on {kind}, where locks and syncs may not be reliable. Give a run.dir on a local disk, and "
            "learner.copy_to here",
        )


def filesystem_of(folder: Path, mounts: str) -> str:
    """Return the type of the file system, by the longest mount point above `folder`; empty if unknown."""
    rows = [line.split() for line in mounts.splitlines()]
    above = [row for row in rows if len(row) > 2 and folder.is_relative_to(row[1])]
    return max(above, key=lambda row: len(row[1]), default=["", "", ""])[2]


def ports(kernel: str) -> Found:
    """Check loopback, and the range of ports that the kernel assigns to processes that ask for any.

    Args:
        kernel: content of /proc/sys/net/ipv4/ip_local_port_range; empty if there is none.
    """
    ours = f"asyncrl chooses from {PORTS.start} to {PORTS.stop - 1}"
    first = int(kernel.split()[0]) if kernel.split() else PORTS.stop
    try:
        with socket.create_server(("127.0.0.1", 0)) as bound:
            socket.create_connection(bound.getsockname(), ANSWERED_S).close()
    except OSError as error:
        yield (
            PROBLEM,
            f"127.0.0.1 cannot be reached ({error}), so no process could reach another. Run ip link set lo up",
        )
    else:
        if first < PORTS.stop:
            yield (
                WARNING,
                f"the kernel assigns ports from {first} on, and {ours}: now and then one is already taken and a start "
                "must be repeated. Change it with sysctl net.ipv4.ip_local_port_range",
            )
        else:
            yield OK, f"127.0.0.1 answers; {ours}"


def host_name(name: str, resolve: Callable[[str], str]) -> Found:
    """Check whether this machine's name resolves: torchrun and Ray pass it to other machines."""
    try:
        yield OK, f"{name} is {resolve(name)}"
    except OSError as error:
        said = f"{name} cannot be resolved ({error}). On one machine this does not matter; for several, add it to"
        yield WARNING, f"{said} /etc/hosts"


def clock(state: int | None) -> Found:
    """Check whether the clock is synchronized.

    Args:
        state: return value of adjtimex(2); None if it is not permitted.
    """
    now, free = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), state == TIME_ERROR
    alone = ", and nothing synchronises it. On one machine this does not matter; for several, start chrony or ntpd"
    yield WARNING if free else OK, now + (alone if free else "" if state is None else ", synchronised")


def clock_state() -> int | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes=0 only reads
    except (OSError, AttributeError):
        return None
    return None if found < 0 else found


def torch_sees() -> str:
    """Ask torch in a separate process: the doctor does not load torch, and a hanging driver must not block it."""
    return output_of(sys.executable, "-c", "import torch; print(torch.version.cuda, torch.cuda.device_count())") or ""


def shared_memory() -> int:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def examine(folder: Path) -> list[Finding]:
    """Return all findings, in the order in which they are shown."""
    port_range = Path("/proc/sys/net/ipv4/ip_local_port_range")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    checks: dict[str, Found] = {
        "machine": iter([(OK, f"{platform.platform()}, Python {platform.python_version()}")]),
        "packages": packages(metadata.requires("asyncrl") or [], version_of),
        "engines": engines(version_of),
        "GPU": gpus(nvidia_smi(), torch_sees),
        "memory": memory(whole, shared_memory(), container_bytes()),
        "open files": files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "disk": disk(folder),
        "ports": ports(port_range.read_text() if port_range.exists() else ""),
        "host name": host_name(socket.gethostname(), socket.gethostbyname),
        "clock": clock(clock_state()),
    }
    return [Finding(check, state, said) for check, found in checks.items() for state, said in found]


def main(folder: Path, *, as_json: bool) -> int:
    """Print the findings. Returns 1 if something will not work."""
    found = examine(folder)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    else:
        for each in found:
            print(f"{each.state:>8}  {each.check:<10}  {each.said}")
        counts = {state: sum(each.state == state for each in found) for state in (PROBLEM, WARNING)}
        print(f"{counts[PROBLEM]} problems, {counts[WARNING]} warnings")
    return int(any(each.state == PROBLEM for each in found))
