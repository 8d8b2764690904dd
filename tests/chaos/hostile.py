"""Run hostile programs through the reward `code`, and misbehaving reward functions and tools, the tools in processes of
their own and in an MCP server: `python -m tests.chaos.hostile --count 1000 --seed 0`.

It prints one JSON line, and exits with 1 if any of these counts is not 0:

stalls:   a program, a reward or a tool that took much longer than its deadline
leaked:   processes left behind
failed:   programs for which the sandbox itself failed, so that the completion had no reward; calls of tools likewise
misjudged: honest programs in between that did not get 1, hostile ones that did not get 0, misbehaving reward functions
          that gave a number, honest ones that gave none, calls of honest tools with a wrong result, and calls of
          failing tools that were not reported as errors
escapes:  a secret read, a connection made, a file written outside, a process of ours killed
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from asyncrl.errors import RewardError
from asyncrl.rewards.library import code
from asyncrl.rewards.pool import RewardPool
from asyncrl.sandbox.level import Level
from asyncrl.sandbox.limits import Outcome
from asyncrl.sandbox.running import GRACE_S, run, unavailable
from asyncrl.utils.process_tree import command_of, descendants, is_alive, marked, process_at
from tests.chaos.hostile_tools import misuse_functions, misuse_server
from tests.chaos.verdict import Verdict

TIMEOUT_S = 3.0
"""Deadline of a hostile program in seconds; most end by themselves."""
HONEST_S = 60.0
"""Deadline of an honest program in seconds, longer because a busy machine may delay it."""
SECRET = "the canary sings at dawn"
ATTACK = "ASYNCRL_TEST_ATTACK"
"""Environment variable of everything that an attack starts, by which its orphans are found."""
REWARDS = Path(__file__).parents[1] / "rewards" / "reward_functions.py"
PREAMBLE = "import ctypes, glob, mmap, os, signal, socket, subprocess, sys, threading, time\n"

ANYWHERE = {
    "loops": ["while True: pass", "x = 3\nwhile True: x = x * x % (10 ** 200)", "time.sleep(1000)", "9 ** (9 ** 9)"],
    "takes memory": [
        "x = bytearray(8 << 30)\nx[::4096] = b'x' * len(x[::4096])",
        "x = []\nwhile True: x.append(bytes(1 << 20))",
        "m = mmap.mmap(-1, 8 << 30)\nfor i in range(0, len(m), 4096): m[i] = 1",
        "for n in range(64):\n if os.fork() == 0:\n  x = b'x' * (100 << 20); time.sleep(1000)\ntime.sleep(1000)",
        "with open('/tmp/big', 'wb') as f:\n while True: f.write(bytes(1 << 20))",
    ],
    "forks": [
        "while True: os.fork()",
        "while True:\n if os.fork() == 0: os.setsid()",
        "while True: threading.Thread(target=time.sleep, args=(1000,)).start()",
        "while True: subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])",
        "subprocess.Popen([sys.executable, __file__]); subprocess.Popen([sys.executable, __file__])",
    ],
    "stays": [
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(1000)\n os._exit(0)",
        "for s in {*range(1, 32)} - {9, 19}: signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)",
        "subprocess.Popen(['/bin/sh', '-c', 'trap \"\" TERM HUP; sleep 1000 & sleep 1000'], start_new_session=True)",
        "os.close(0); os.close(1); os.close(2); time.sleep(1000)",
    ],
    "ends": [
        "os._exit(0)",
        "sys.exit(3)",
        "os.abort()",
        "os.kill(os.getpid(), 9)",
        "ctypes.string_at(0)",
        "sys.setrecursionlimit(10 ** 9)\ndef f(): return f()\nf()",
        "raise SystemExit",
        "raise ValueError('no')",
        "print(float('nan'))",
        "while True: print('x' * 10000)",
        "os.write(1, bytes(range(256)) * 100)",
        "def (:",
    ],
}
"""Kind -> programs that every level of isolation has to withstand."""

KEPT_APART = {
    "reaches out": [
        "socket.create_connection(('127.0.0.1', PORT), 1).send(b'x')",
        "s = socket.socket(); s.settimeout(1); s.connect((socket.gethostname(), PORT)); s.send(b'x')",
        "s = socket.socket(socket.AF_INET6); s.settimeout(1); s.connect(('::1', PORT))",
        "s = socket.socket(socket.AF_UNIX); s.connect(UNIX); s.send(b'x')",
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + ABSTRACT); s.send(b'x')",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
        "subprocess.run(['curl', '-m', '1', f'http://127.0.0.1:{PORT}'])",
    ],
    "reads": [
        "print(open('/etc/shadow').read())",
        "print(open(SECRET_FILE).read())",
        "print(open('/proc/1/root' + SECRET_FILE).read())",
        "print(open(f'/proc/{CALLER}/root' + SECRET_FILE).read())",
        "print(open(f'/proc/{CALLER}/environ').read())",
        "print(open('/proc/1/environ').read())",
        "os.symlink(SECRET_FILE, 'link'); print(open('link').read())",
        "os.link(SECRET_FILE, 'link'); print(open('link').read())",
        "print(open('../../../../..' + SECRET_FILE).read())",
        "print(subprocess.run(['cat', SECRET_FILE], capture_output=True, text=True).stdout)",
        "for p in glob.glob('/proc/*/cwd/*'):\n try: print(open(p).read())\n except OSError: pass",
        "for fd in range(256):\n try: print(os.pread(fd, 100, 0))\n except OSError: pass",
        "os.chroot('/'); print(open(SECRET_FILE).read())",
    ],
    "writes": [
        "open(OUTSIDE + '/x', 'w').write('x')",
        "os.makedirs(OUTSIDE); open(OUTSIDE + '/x', 'w').write('x')",
        "open(SECRET_FILE, 'w').write('x')",
        "os.remove(SECRET_FILE)",
        "open('/usr/bin/x', 'w').write('x')",
        "open(f'/proc/{CALLER}/mem', 'r+b').write(b'x')",
        "open(sys.executable, 'ab').write(b'x')",
        "import json; open(json.__file__, 'a').write('x')",
        "open('/dev/shm/' + os.path.basename(OUTSIDE), 'w').write('x')",
        "subprocess.run(['rm', '-rf', OUTSIDE, SECRET_FILE])",
        "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
    ],
    "kills": [
        "if os.getpid() < 100: os.kill(-1, 9)  # which, elsewhere, would be everything of this user",
        "os.kill(os.getppid(), 9)",
        "os.kill(CALLER, 9)",
        "os.kill(1, 9); os.kill(1, 2)",
        "for p in range(2, 100):\n try: p != os.getpid() < 100 and os.kill(p, 9)\n except OSError: pass",
        "os.killpg(0, 9)",
    ],
    "climbs": [
        "l = ctypes.CDLL(None)\nif l.unshare(0x10000000) == 0: print(SECRET_SAYS)",
        "l = ctypes.CDLL(None)\nif l.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0: print(SECRET_SAYS)",
        "l = ctypes.CDLL(None)\nif l.ptrace(16, 1, 0, 0) == 0: print(SECRET_SAYS)",
        "l = ctypes.CDLL(None)\nif l.setns(os.open('/proc/1/ns/user', 0), 0) == 0: print(SECRET_SAYS)",
        "os.setuid(0); print(SECRET_SAYS)",
        "os.mknod('disk', 0o60666, os.makedev(254, 0)); print(SECRET_SAYS)",
        "os.sethostname('x') if hasattr(os, 'sethostname') else socket.sethostname('x'); print(SECRET_SAYS)",
    ],
}
"""Kind -> programs that only namespaces can keep from their target."""


class Outside:
    """What no program may touch: a secret file, a folder, and listening sockets."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)  # the sandbox is tested, not file permissions
        self.secret, self.folder, self.reached = folder / "secret.txt", folder / "outside", 0
        self.secret.write_text(SECRET)
        self.secret.chmod(0o666)
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._sockets[0].getsockname()[1]
        self._sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._sockets[1].bind(("127.0.0.1", self.port))
        self.abstract = f"hostile-{os.getpid()}"
        for address in (str(folder / "unix"), f"\0{self.abstract}"):
            self._sockets.append(socket.socket(socket.AF_UNIX))
            self._sockets[-1].bind(address)
            self._sockets[-1].listen()
        (folder / "unix").chmod(0o666)
        self.unix = str(folder / "unix")
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._wait, args=(each,)) for each in self._sockets]
        for thread in self._threads:
            thread.start()

    def _wait(self, server: socket.socket) -> None:
        """Count connections and datagrams.

        Waits for a connection or a datagram; unblocked by `close`, once what had arrived by then is counted.
        """
        server.settimeout(0.2)
        while True:
            last = self._closing.is_set()
            try:
                server.recv(1) if server.type == socket.SOCK_DGRAM else server.accept()[0].close()
                self.reached += 1
            except TimeoutError:
                if last:
                    return

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def names(self) -> dict[str, Any]:
        return {
            "PORT": self.port,
            "UNIX": self.unix,
            "ABSTRACT": self.abstract,
            "SECRET_FILE": str(self.secret),
            "OUTSIDE": str(self.folder),
            "CALLER": os.getpid(),
        }

    def faults(self) -> Iterator[str]:
        if self.reached:
            yield f"{self.reached} connections"
        if self.folder.exists() or Path("/dev/shm", self.folder.name).exists():
            yield "a file outside"
        if not self.secret.exists() or self.secret.read_text() != SECRET:
            yield "the secret is changed"


def programs(count: int, seed: int, level: Level, names: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield `(kind, what it does, program)`. Every fifth program is honest and prints the expected answer."""
    chosen = random.Random(seed)
    kinds = ANYWHERE | (KEPT_APART if level is Level.NAMESPACES else {})
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    # In halves: otherwise the program's own text, quoted in an error, would be taken for the secret.
    given += f"SECRET_SAYS = {SECRET[:5]!r} + {SECRET[5:]!r}\n"
    for number in range(count):
        if number % 5 == 4:
            yield "honest", "answers", "print(int(input()) * 2)"
            continue
        kind = chosen.choice(sorted(kinds))
        line = chosen.choice(kinds[kind])
        hides = chosen.random() < 0.3 and "def (" not in line
        body = f"try:\n{_indented(line)}\nexcept BaseException as e: print(e)" if hides else line
        yield kind, line, f"{PREAMBLE}{given}{body}\n"


def _indented(text: str) -> str:
    return "\n".join(f" {line}" for line in text.splitlines())


async def judge(verdict: Verdict, kind: str, line: str, program: str, number: int, level: Level) -> None:
    reward = REWARD_OF[level][kind == "honest"]
    row = {"prompt": "p", "tests": {"inputs": [str(number)], "outputs": [str(2 * number)]}}
    what = f"{kind}: {line[:100]!r}"
    started = time.monotonic()
    verdict.kinds[kind] += 1
    verdict.programs += 1
    try:
        score = (await reward(f"```python\n{program}\n```", row))["score"]
    except RewardError as error:
        verdict.failed.append(f"{what}: {error}")
        return
    if time.monotonic() - started > TIMEOUT_S + 2 * GRACE_S:
        verdict.stalls.append(what)
    if score != float(kind == "honest"):
        verdict.misjudged.append(f"{what}: {score}")


REWARD_OF: dict[Level, tuple[code.Code, code.Code]] = {}


async def attack(verdict: Verdict, count: int, seed: int, level: Level, at_once: int, outside: Outside) -> None:
    REWARD_OF[level] = tuple(  # type: ignore[assignment]
        code.Code(isolation=level.value, timeout_s=seconds, memory_mb=256) for seconds in (TIMEOUT_S, HONEST_S)
    )
    slots = asyncio.Semaphore(at_once)

    async def one(number: int, kind: str, line: str, program: str) -> None:
        async with slots:
            await judge(verdict, kind, line, program, number, level)

    given = programs(count, seed, level, outside.names())
    await asyncio.gather(*(one(number, *each) for number, each in enumerate(given)))


async def misbehave(verdict: Verdict, count: int, seed: int) -> None:
    """Call the reward function `by_command`, whose row says how it misbehaves. Every second call is honest."""
    chosen = random.Random(seed)
    bad = ("exit", "sys_exit", "segfault", "raise", "child_process", "return", "hang")
    async with RewardPool(f"{REWARDS}:by_command", workers=1, timeout_s=5.0) as pool:
        for number in range(count):
            do = chosen.choice(bad) if number % 2 == 0 else "fine"
            verdict.rewards += 1
            started = time.monotonic()
            try:
                scores = await asyncio.wait_for(pool.score(["a"], {"do": do, "what": "nan"}), 120)
            except RewardError:
                scores = []
            except TimeoutError:
                verdict.stalls.append(f"reward: {do}")
                continue
            if time.monotonic() - started > 100:
                verdict.stalls.append(f"reward: {do}")
            if bool(scores) != (do == "fine"):
                verdict.misjudged.append(f"reward: {do}: {scores}")


def left(before: set[psutil.Process]) -> list[str]:
    """Return the child processes that are not in `before`, those that were orphaned, and every process with a user id
    that only a sandbox has."""
    started = (descendants(os.getpid()) | marked(os.environ.get(ATTACK, ""), ATTACK)) - {psutil.Process()}
    found = [process for process in started - before if is_alive(process)]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if 1_000_000_000 <= folder.stat().st_uid < 2_000_000_000:
                found.append(process_at(int(folder.name)) or found[0])
    return [f"{process.pid}: {' '.join(command_of(process))[:100]}" for process in found]


def main(count: int, seed: int, level: Level, at_once: int) -> Verdict:
    verdict = Verdict()
    before = descendants(os.getpid())
    os.environ[ATTACK] = uuid.uuid4().hex
    spoken: list[str] = []

    def listening(program: str, **settings: Any) -> Outcome:
        outcome = run(program, **settings)
        spoken.extend(text for text in (outcome.stdout, outcome.stderr) if SECRET in text or "root:" in text)
        return outcome

    with tempfile.TemporaryDirectory() as folder:
        outside = Outside(Path(folder))
        code.run = listening
        try:
            asyncio.run(attack(verdict, count, seed, level, at_once, outside))
            asyncio.run(misbehave(verdict, max(count // 20, 4), seed))
            asyncio.run(misuse_functions(verdict, max(count // 10, 5), seed))
            asyncio.run(misuse_server(verdict, count // 40, seed))
        finally:
            code.run = run
            outside.close()
        verdict.escapes += [*outside.faults(), *(text[:200] for text in spoken)] if level is Level.NAMESPACES else []
    verdict.leaked += left(before)
    return verdict


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=Level, default=Level.NAMESPACES, choices=list(Level))
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if why := unavailable(given.level):
        sys.exit(f"{given.level.value}: {why}")
    began = time.monotonic()
    said = main(given.count, given.seed, given.level, given.at_once)
    faults = said.faults()
    numbers = {name: len(found) for name, found in faults.items()}
    print(
        json.dumps(
            {
                "level": given.level.value,
                "programs": said.programs,
                "rewards": said.rewards,
                "tools": said.tools,
                **numbers,
            }
            | {"kinds": dict(sorted(said.kinds.items())), "seconds": round(time.monotonic() - began, 1)}
        )
    )
    for name, found in faults.items():
        for one in found[:20]:
            print(f"{name}: {one}", file=sys.stderr)
    sys.exit(1 if any(numbers.values()) else 0)
