"""Findings of `asyncrl doctor` for given measurements; on the real machine it must finish."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.cli import doctor
from asyncrl.cli.doctor import OK, PROBLEM, WARNING, Finding
from asyncrl.cli.main import main

GIB = 1 << 30


def states(found: doctor.Found) -> list[str]:
    return [state for state, _ in found]


def test_packages_are_held_against_the_ranges_that_asyncrl_declares() -> None:
    required = ["torch>=2.11,<2.14", "zmq>=1", "vllm>=0.32,<0.33; extra == 'vllm'"]
    ((state, said),) = doctor.packages(required, {"torch": "2.9.1", "zmq": "1.1"}.get)
    assert state == WARNING and "torch 2.9.1" in said and "pip install 'torch" in said
    assert states(doctor.packages(required, {"torch": "2.12.0", "zmq": "1.1", "vllm": "0.31"}.get)) == [WARNING]
    assert states(doctor.packages(required, {"torch": "2.12.0"}.get)) == [PROBLEM]
    assert states(doctor.packages(required, {"torch": "2.12.0+cpu", "zmq": "1.1"}.get)) == [OK]


def test_a_gpu_that_torch_cannot_use_is_a_problem_and_one_that_is_taken_a_warning() -> None:
    one, taken = "NVIDIA H100, 81559, 4, 550.54\n", "NVIDIA H100, 81559, 40000, 550.54\n"
    assert states(doctor.gpus(None, lambda: "")) == [OK]
    assert states(doctor.gpus(one, lambda: "12.8 1\n")) == [OK]
    assert states(doctor.gpus(one + taken, lambda: "12.8 2\n")) == [OK, WARNING]
    assert states(doctor.gpus(one, lambda: "None 0\n")) == [OK, PROBLEM]
    assert states(doctor.gpus(one, lambda: "")) == [OK, PROBLEM]
    assert states(doctor.gpus("No devices were found\n", lambda: "")) == [PROBLEM]
    assert states(doctor.gpus("NVIDIA, of two names, 81559, 4, 550.54\n", lambda: "12.8 1")) == [OK]


def test_a_driver_that_is_not_loaded_is_a_problem_and_no_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.nvidia_smi() is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    ((state, said),) = doctor.gpus(doctor.nvidia_smi(), lambda: "")
    assert state == PROBLEM and "driver" in said


def test_a_disk_is_judged_by_space_sync_and_kind(tmp_path: Path) -> None:
    assert states(doctor.judge_disk(tmp_path, 99 * GIB, 0.001, 1e9, "ext4")) == [OK]
    assert states(doctor.judge_disk(tmp_path, 5 * GIB, 0.05, 1e9, "nfs4")) == [OK, WARNING, WARNING, WARNING]
    assert states(doctor.judge_disk(tmp_path, GIB // 2, 0.001, 1e9, "")) == [OK, PROBLEM]
    mounts = "/dev/a / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\ntmpfs /data/fast tmpfs rw 0 0\n"
    kinds = [doctor.filesystem_of(Path(at), mounts) for at in ("/home", "/data/runs", "/data/fast/x", "/database")]
    assert kinds == ["ext4", "nfs4", "tmpfs", "ext4"]
    assert states(doctor.disk(tmp_path))[0] == OK and list(tmp_path.iterdir()) == []
    assert states(doctor.disk(Path("/proc"))) == [PROBLEM]


def test_memory_files_ports_names_and_the_clock() -> None:
    assert states(doctor.memory(64 * GIB, 64 << 20)) == [OK, WARNING]
    assert "64.0 GiB, of which this container may use 2.0 GiB" in next(doctor.memory(64 * GIB, GIB, 2 * GIB))[1]
    assert states(doctor.files(1024)) == [WARNING] and states(doctor.files(65536)) == [OK]
    assert states(doctor.ports("32768\t60999")) == [OK] and states(doctor.ports("1024 60999")) == [WARNING]
    assert states(doctor.clock(doctor.TIME_ERROR)) == [WARNING] and states(doctor.clock(None)) == [OK]

    def unknown(name: str) -> str:
        raise OSError("no such name")

    assert states(doctor.host_name("here", unknown)) == [WARNING]


def test_loopback_that_is_down_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address can be bound all the same."""

    def down(address: object, timeout: float) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr("socket.create_connection", down)
    ((state, said),) = doctor.ports("32768 60999")
    assert state == PROBLEM and "ip link set lo up" in said


def test_shared_memory_that_is_taken_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=8 * GIB, free=7))
    assert doctor.shared_memory() == 7


def test_the_command_tells_everything_and_ends_by_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "output_of", lambda *_: None)  # with a GPU torch would be loaded
    monkeypatch.setattr(doctor, "nvidia_smi", lambda: None)
    assert main(["doctor", str(tmp_path), "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    checks = {"machine", "packages", "engines", "GPU", "memory", "open files", "disk", "ports", "host name", "clock"}
    assert {each["check"] for each in found} == checks
    monkeypatch.setattr(doctor, "examine", lambda folder: [Finding("disk", PROBLEM, "full")])
    assert main(["doctor", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 problems, 0 warnings"
    assert main(["doctor", str(tmp_path / "none")]) == 2
