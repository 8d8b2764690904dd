"""What workers as child processes leave behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from asyncrl.config import load_config
from asyncrl.rollout.host import WorkerSpec
from asyncrl.rollout.process_host import SOCKETS, make_host

WORKER = """#!/bin/sh
echo "$VLLM_RPC_BASE_PATH" > {said}.new
[ -z "$VLLM_RPC_BASE_PATH" ] || touch "$VLLM_RPC_BASE_PATH/left"
mv {said}.new {said}
exec sleep 60
"""


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_sockets_of_a_worker_s_engine_are_gone_with_it(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM leaves them: thousands lay in /tmp after some days."""
    program, said = tmp_path / "worker", tmp_path / "said"
    program.write_text(WORKER.format(said=said))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    config = load_config(["model.path=m", "data.path=d", "reward.function=r.py:f", f"engine={engine}"])
    with mock.patch.dict(os.environ):
        os.environ.pop(SOCKETS, None)
        host = make_host(config)
        host.start(WorkerSpec(name="w", restart=0, log_path="", run_digest="", config={}))
        deadline = time.monotonic() + 30
        while not said.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        folder = said.read_text().strip()
        assert bool(folder) == (engine == "vllm")
        assert not folder or (Path(folder) / "left").exists()
        host.close()
        assert not folder or not Path(folder).exists()
