"""`run(program)` runs a program in the sandbox. It blocks; from asyncio use `asyncio.to_thread(run, program)`.

consumes:     a program, its input, its limits
waits for:    the end of the program and of all processes that it started
unblocked by: that, or the deadline in its limits plus the time to kill it
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.sandbox.level import Level, Reason
from asyncrl.sandbox.limits import Limits, Outcome

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
WATCHER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from asyncrl.sandbox.watcher import main; "
    "main(*map(int, sys.argv[2:]))"
)
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    # One thread per core for each matrix product would exhaust the process limit.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Printing an integer of more than 4300 digits would raise; older Pythons, with which data sets were made, print it.
    "PYTHONINTMAXSTRDIGITS": "0",
}
"""The program's whole environment. It gets none of the caller's variables, which may contain keys."""
GRACE_S = 30.0
"""Seconds past the deadline, for the watcher to start on a busy machine and to kill the program."""
CHUNK = 1 << 16


def run(
    program: str | Sequence[str],
    *,
    stdin: str = "",
    limits: Limits | None = None,
    level: Level = Level.NAMESPACES,
    files: Mapping[str, str] | None = None,
    readable: Sequence[str] = (),
) -> Outcome:
    """Run `program` without anything of the caller's: no variables, no open files, an empty working folder.

    Args:
        program: Python source, run by this interpreter with its packages; or a command (a path) and its arguments.
        files: relative name -> text, files to put into its folder.
        readable: further paths that it may read, besides the interpreter and the system's libraries. Programs started
            by root run as another user, so the paths must be readable for all. With `RLIMITS` it can read what you can.

    Raises:
        SandboxError: the program could not be run, or did not end. Errors of the program itself are an outcome.
    """
    limits = limits or Limits()
    files = dict(files or {})
    if isinstance(program, str):
        files["main.py"] = program
        program = [sys.executable, "-B", "-s", "main.py"]
    wrong = [name for name in files if name.startswith("/") or ".." in Path(name).parts]
    if wrong:
        raise SandboxError(f"files of a sandbox are named relative to its folder; got {wrong[0]!r}")
    with contextlib.ExitStack() as stack:
        folder = ""
        if level is Level.RLIMITS:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True))
        spec = {
            "level": level,
            "command": list(program),
            "files": files,
            "folder": folder,
            "limits": asdict(limits),
            "environment": ENVIRONMENT,
            "readable": [*interpreter_folders(), *readable],
            "beside": _processes_of_user() if level is Level.RLIMITS else 1,
        }
        return _Run(spec, limits).outcome(stdin.encode(errors="surrogatepass"))


@functools.cache
def unavailable(level: Level = Level.NAMESPACES) -> str:
    """Why this machine cannot run programs at `level`, found by running one; empty if it can."""
    try:
        outcome = run("print(6 * 7)", level=level, limits=Limits(wall_s=60.0, cpu_s=30))
    except SandboxError as error:
        return str(error)
    return "" if outcome.stdout == "42\n" else f"a program that prints 42 gave {outcome.stdout!r}, {outcome.told()}"


def chosen_level(isolation: str, who: str, setting: str) -> Level:
    """Return the level that a setting names.

    Args:
        who: what wants to run programs, for the error.

    Raises:
        ConfigError: there is no such level, or this machine does not support it.
    """
    if isolation not in [level.value for level in Level]:
        raise ConfigError(
            f"{who}: isolation must be namespaces or rlimits; got {isolation!r}. Programs never run without any"
        )
    level = Level(isolation)
    if why := unavailable(level):
        raise ConfigError(
            f"{who}: this machine cannot keep programs apart by {isolation}: {why}. Allow user namespaces (in a "
            f"container: --security-opt seccomp=unconfined, or the capability SYS_ADMIN). Or {setting}=rlimits: "
            "programs that the model writes then run as you, with your files and your network"
        )
    return level


@functools.cache
def interpreter_folders() -> tuple[str, ...]:
    """Folders of this interpreter, including the packages of its environment."""
    real = Path(sys.executable).resolve().parent.parent
    return tuple(dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, str(real))))


class _Run:
    def __init__(self, spec: dict[str, Any], limits: Limits) -> None:
        self._spec, self._limits = spec, limits
        self._taken: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._flooded = False

    def outcome(self, stdin: bytes) -> Outcome:
        with tempfile.TemporaryFile("w+") as spec, tempfile.TemporaryFile("r") as status:
            json.dump(self._spec, spec)
            spec.flush()
            spec.seek(0)
            fds = (spec.fileno(), status.fileno())
            watcher = self._start(fds)
            deadline = time.monotonic() + self._limits.wall_s + GRACE_S
            try:
                self._talk(watcher, stdin, deadline)
                watcher.wait(max(deadline - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                raise SandboxError(
                    f"the sandbox's watcher did not end within {GRACE_S:.0f} s of its deadline"
                ) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    watcher.kill()
                watcher.wait()
                for pipe in _pipes(watcher):
                    pipe.close()
            status.seek(0)
            return self._told(status.read(), watcher.returncode)

    def _start(self, fds: tuple[int, int]) -> subprocess.Popen[bytes]:
        arguments = (PACKAGE_PARENT, *map(str, fds), str(os.getpid()))
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", WATCHER, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=fds,
                env=ENVIRONMENT,
                # Signals to the caller's group are for the caller only; the watcher ends by its parent-death signal.
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"the sandbox's watcher cannot be started: {error}") from error

    def _talk(self, watcher: subprocess.Popen[bytes], stdin: bytes, deadline: float) -> None:
        """Write the input and read the output until both output streams end."""
        assert watcher.stdin and watcher.stdout and watcher.stderr
        left = memoryview(stdin)
        with selectors.DefaultSelector() as selector:
            for name, pipe in (("stdout", watcher.stdout), ("stderr", watcher.stderr)):
                selector.register(pipe, selectors.EVENT_READ, name)
            into = watcher.stdin.fileno()
            os.set_blocking(into, False)
            selector.register(watcher.stdin, selectors.EVENT_WRITE, "stdin")
            while selector.get_map().keys() - {into} and time.monotonic() < deadline:
                for key, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                    if key.data != "stdin":
                        if not self._take(watcher, key.fd, key.data):
                            selector.unregister(key.fileobj)
                        continue
                    with contextlib.suppress(BlockingIOError, BrokenPipeError):
                        left = left[os.write(key.fd, left[:CHUNK]) :] if left else left
                    if not left:
                        selector.unregister(watcher.stdin)
                        watcher.stdin.close()

    def _take(self, watcher: subprocess.Popen[bytes], fd: int, name: str) -> bool:
        """Read from one stream. Returns False at its end."""
        data, taken = os.read(fd, CHUNK), self._taken[name]
        most = self._limits.output_kb << 10
        taken += data[: most - len(taken)]
        if len(data) and len(taken) == most and not self._flooded:
            self._flooded = True
            watcher.terminate()
        return bool(data)

    def _told(self, status: str, watcher_code: int) -> Outcome:
        if not status:
            raise SandboxError(f"the sandbox's watcher was ended (code {watcher_code}): {self._text('stderr')[-400:]}")
        said = json.loads(status)
        if "failed" in said:
            level = self._spec["level"].value
            raise SandboxError(f"{self._spec['command'][0]} was not run at level {level}: {said['failed']}")
        ended = said.get("status")
        number = os.WTERMSIG(ended) if ended is not None and os.WIFSIGNALED(ended) else 0
        reason = Reason.OUTPUT if self._flooded else said["reason"]
        if reason is None:
            raise SandboxError("the sandbox was ended from outside")
        if reason == Reason.SIGNALLED and number == signal.SIGXCPU:
            reason = Reason.TIMED_OUT
        return Outcome(
            stdout=self._text("stdout"),
            stderr=self._text("stderr"),
            exit=os.WEXITSTATUS(ended) if reason == Reason.EXITED and ended is not None else None,
            signal=number,
            reason=Reason(reason),
        )

    def _text(self, name: str) -> str:
        return self._taken[name].decode(errors="replace")


def _pipes(process: subprocess.Popen[bytes]) -> Iterator[IO[bytes]]:
    return (pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe is not None)


def _processes_of_user() -> int:
    """Number of threads that run as this user now: outside of a user namespace the process limit counts them all."""
    count = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and folder.stat().st_uid == os.geteuid():
                count += len(os.listdir(folder / "task"))
    return count
