"""A real server, started on a CPU as docs/servers.md says, in a process and session of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

import httpx

from asyncrl.cli.processes.ports import free_port
from asyncrl.engines.vllm.names import BACKEND, EXTENSION
from asyncrl.engines.vllm.plugin import OWNER_VARIABLE
from tests.waiting import until

START_S = 600.0
"""Limit on the start in seconds. It takes about ten on an otherwise idle machine."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    # Without these it listens for its own processes at whatever address the host name resolves to.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of a server without tensor parallelism, as in `engines.vllm.settings.set_environment`."""
ARGUMENTS = (
    *("--seed", "1", "--enable-scale-out", "--generation-config", "vllm", "--skip-tokenizer-init"),
    *("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION),
    *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
)


class RealServer:
    """Serves the model in `folder` at one loopback port, which it uses again when it is restarted."""

    def __init__(self, folder: Path, log: Path, *, tensor_parallel: int = 1) -> None:
        self._folder, self._log, self._port = folder, log, free_port()
        self._tensor_parallel = tensor_parallel
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def command(self, folder: Path) -> list[str]:
        """Return the command without the options for host and port."""
        raise NotImplementedError

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Start the server and yield it. At the end it is killed, if it has not been before."""
        try:
            self.start()
            yield self
        finally:
            self.kill()

    def start(self) -> None:
        """Start the server.

        Waits for its first answer; unblocked by it, by the end of the process, or after START_S.
        """
        with self._log.open("ab") as log:
            self._process = self._begin(log)
        process = self._process
        until(
            self._answers,
            lambda: f"no server ({process.poll()}): {self._said()}",
            within_s=START_S,
            holds=lambda: process.poll() is None,
        )

    def kill(self) -> None:
        """Send SIGKILL to the server process, then to its process group."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None

    def _begin(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        # An earlier engine in this process left its owner's pid there. The server is not its child and would be ended.
        inherited = {name: value for name, value in os.environ.items() if name != OWNER_VARIABLE}
        return subprocess.Popen(
            [*self.command(self._folder), "--host", "127.0.0.1", "--port", str(self._port)],
            env={**inherited, **ENVIRONMENT, **(ALONE if self._tensor_parallel == 1 else {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=10.0).is_success
        except httpx.HTTPError:
            return False

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


class VllmServer(RealServer):
    def command(self, folder: Path) -> list[str]:
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *ARGUMENTS]
        backend = "uni" if self._tensor_parallel == 1 else "mp"
        serve += ["--tensor-parallel-size", str(self._tensor_parallel), "--distributed-executor-backend", backend]
        return serve
