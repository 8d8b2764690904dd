"""Run with workers in another network namespace, behind a link that is slow and loses packets.

    unshare -rn python -m tests.integration.far FOLDER SETTING=VALUE ...      prints the result as JSON

The kernel need not support `netem`: this process is the link. It carries each packet from one tun device to the other
with a delay of 50 ms, and drops one in a hundred. TCP above it retransmits as usual.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from asyncrl.cli.processes.ports import free_port

DELAY_S, LOSS = 0.050, 0.01
HERE, THERE = "10.99.0.1", "10.99.0.2"
TUNSETIFF, IFF_TUN_WITHOUT_HEADER, CLONE_NEWNET = 0x400454CA, 0x1001, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def enter(network: int) -> None:
    if _libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def other_network() -> int:
    """Create a network namespace and return its descriptor."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    if _libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    there = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    enter(here)
    os.close(here)
    return there


def tun(address: str, peer: str) -> int:
    """Create a tun device in this thread's namespace and return its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"far0", IFF_TUN_WITHOUT_HEADER))
    for command in ("link set lo up", f"addr add {address} peer {peer} dev far0", "link set far0 up"):
        subprocess.run(["ip", *command.split()], check=True)
    return device


class Link(threading.Thread):
    """Carries packets between two tun devices, for the life of this process."""

    def __init__(self, ends: tuple[int, int]) -> None:
        super().__init__(name="link", daemon=True)
        self._ends, self._random = ends, random.Random(0)
        self.carried = self.lost = 0
        self.nbytes = 0

    def run(self) -> None:
        due: list[tuple[float, int, int, bytes]] = []
        while True:
            wait = max(due[0][0] - time.monotonic(), 0.0) if due else None
            for end in select.select(self._ends, (), (), wait)[0]:
                packet = os.read(end, 65536)
                if self._random.random() < LOSS:
                    self.lost += 1
                    continue
                self.carried += 1
                self.nbytes += len(packet)
                target = self._ends[1 - self._ends.index(end)]
                heapq.heappush(due, (time.monotonic() + DELAY_S, self.carried, target, packet))
            while due and due[0][0] <= time.monotonic():
                os.write(due[0][2], heapq.heappop(due)[3])


def role(folder: Path, name: str, arguments: list[str], network: int | None = None) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=None if network is None else lambda: enter(network),
        )


def kill_child(parent: subprocess.Popen[bytes], word: bytes) -> list[int]:
    """Kill the first child of `parent` with `word` in its command line. Return its pid, or nothing if there is none."""
    found = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    pids = [int(pid) for pid in found if word in Path(f"/proc/{pid}/cmdline").read_bytes()][:1]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def rows(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def main(folder: Path, given: list[str]) -> int:
    there = other_network()
    near = tun(HERE, THERE)
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    enter(there)
    far = tun(THERE, HERE)
    enter(here)
    link = Link((near, far))
    link.start()
    run, keys = folder / "run", folder / "keys"
    subprocess.run([sys.executable, "-m", "asyncrl", "keys", str(keys)], check=True, stdout=sys.stderr)
    settings = [*given, f"run.dir={run}", f"replay.keys={keys}", f"replay.address=tcp://{HERE}:{free_port()}"]
    # The workers share a disk with the server, and must not connect through its unix sockets.
    settings += ["replay.local_sockets=false", f"weights.host={HERE}", "rollout.host=process"]
    published, port = folder / "published", free_port()
    published.mkdir()
    settings += ["weights=files", "weights.delta=auto", f"weights.url=file://{published}"]
    settings += [f"weights.fetch_url=http://{HERE}:{port}"]
    web = [sys.executable, "-m", "http.server", "--bind", HERE, "--directory", str(published), str(port)]
    server = subprocess.Popen(web, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    learner = ["asyncrl.learner.torchrun", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=bound"]
    learner += ["--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=far", "-m", "asyncrl.learner"]
    roles = [
        role(folder, "replay", ["asyncrl.replay", *settings]),
        role(folder, "learner", [*learner, *settings]),
        role(folder, "rollout", ["asyncrl", "rollout", *settings], there),
    ]
    try:
        return follow(folder, run, roles, link)
    finally:
        server.kill()
        for process in roles:
            process.terminate()
        for process in roles:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def follow(folder: Path, run: Path, roles: list[subprocess.Popen[bytes]], link: Link) -> int:
    """Wait until the learner is done and print the findings. On the way kill a worker, and later the learner."""
    started, killed = time.monotonic(), []
    deadline = started + 1500
    while roles[1].poll() is None and time.monotonic() < deadline:
        steps = [row["step"] for row in rows(run)]
        if not killed and steps and steps[-1] >= 3:
            killed = kill_child(roles[2], b"--worker")
        elif len(killed) == 1 and steps[-1] >= 6:
            killed += kill_child(roles[1], b"asyncrl.learner")
        time.sleep(0.2)
    found = {"code": roles[1].poll(), "killed": killed, "seconds": time.monotonic() - started}
    found |= {"carried": link.carried, "lost": link.lost, "bytes": link.nbytes, "rows": rows(run)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
