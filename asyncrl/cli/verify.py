"""`asyncrl verify RUN|MODEL`: checks that every installed engine serves this model as the learner computes it.

The model is loaded by the learner's code in float32. Each installed engine gets its weights as in a run, in both
dtypes, and scores the same probe tokens. Prints a table; exit code 1 if an engine disagrees.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from asyncrl.config import load_config, read_config
from asyncrl.engines.factory import make_engine
from asyncrl.errors import AsyncRLError, CheckpointError, ConfigError
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.publishing.canary import canary_of
from asyncrl.learner.publishing.probes import probes_of_run
from asyncrl.learner.roles import build_roles
from asyncrl.schema import Config
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, EXPORT_DIR, newest_whole
from asyncrl.telemetry.folder.resumed import is_supervised
from asyncrl.weights.canary import HALF, Canary, Difference, Tolerance, compare

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNUSED = ("data.path=unused.jsonl", "reward.function=unused:unused")
"""Settings that are required for a run, and not used here."""
VERSION = 1
HEADER = f"{'engine':<14}{'dtype':<10}{'max |dlogp|':>12}{'mean':>10}{'allowed max':>13}{'mean':>8}  result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    engine: str
    dtype: str
    allowed: Tolerance
    found: Difference | None
    """Difference of the log-probs; None if the engine failed."""
    why: str = ""

    @property
    def passed(self) -> bool:
        return self.found is not None and self.allowed.admits(self.found)

    def __str__(self) -> str:
        name = f"{self.engine:<14}{self.dtype:<10}"
        if self.found is None:
            return f"{name}{'':>43}  failed: {self.why}"
        allowed = self.allowed
        result = "ok" if self.passed else f"DIFFERS at probe {self.found.probe}, token {self.found.token}"
        numbers = f"{self.found.max:>12.2e}{self.found.mean:>10.1e}{allowed.max:>13g}{allowed.mean:>8.2g}"
        return f"{name}{numbers}  {result}{self._share(self.found)}"

    def _share(self, found: Difference) -> str:
        """Explain what a quantile allows, even to those that pass."""
        allowed = self.allowed
        if allowed.share == 1.0 or (found.max <= allowed.max and allowed.share == HALF.share):
            return ""
        router = ": if a router is nearly undecided, rounding sends a token to other experts"
        return (
            f" ({found.within:.1%} of the tokens within {allowed.max:g}, {allowed.share:.0%} must be"
            f"{router if allowed.share < HALF.share else ''})"
        )


def main(path: str, overrides: Sequence[str]) -> int:
    """Print the table. Returns 0 if every engine agrees, 1 otherwise.

    Raises:
        ConfigError, CheckpointError: there is no model at `path`.
    """
    transformers_logging.disable_progress_bar()
    config, policy = load_policy(path, overrides)
    probes, why_random = probes_of_run(config, policy)
    canary = canary_of(policy, probes, CPU, "float32", "float32", with_noise=True)
    tokens = f"{sum(map(len, probes))} {'random tokens' if why_random else 'tokens of its prompts'}"
    print(f"{path}: {tokens}, learner in float32\n{HEADER}")
    rows = []
    for engine in installed_engines():
        for dtype in DTYPES:
            rows.append(verify_engine(config, policy, engine, dtype, canary))
            print(rows[-1], flush=True)
    return 0 if all(row.passed for row in rows) else 1


def installed_engines() -> Iterator[str]:
    yield "transformers"
    if importlib.util.find_spec("vllm") is not None:
        yield "vllm"


def load_policy(path: str, overrides: Sequence[str]) -> tuple[Config, PolicyModel]:
    """Load the exported model of a run, or otherwise its newest checkpoint; or the Hugging Face model at `path`."""
    if is_supervised(Path(path)):  # its settings have another schema, but its export is a model like any other
        path = str(Path(path) / EXPORT_DIR)
    run, settings = Path(path), Path(path) / "config.yaml"
    if not settings.is_file():
        config = load_config([f"model.path={path}", *UNUSED, *overrides])
        return _in_float32(config), build_model(_in_float32(config), CPU, None)
    if overrides:
        raise ConfigError(f"{path} is a run: its settings are in {settings}. Leave out {' '.join(overrides)}")
    config = _in_float32(read_config(settings))
    if (run / EXPORT_DIR).is_dir():
        config.model = replace(config.model, path=str(run / EXPORT_DIR), lora_rank=0)
        return config, build_model(config, CPU, None)
    checkpoints = Checkpoints(run / "ckpt", rank=0, keep=1)
    newest, _, _ = newest_whole(run / CHECKPOINT_DIR)
    if newest is None:
        raise CheckpointError(f"{path} has neither an exported model (hf/) nor a checkpoint (ckpt/latest) yet")
    roles = build_roles(config, CPU, None)
    checkpoints.load(newest, roles)
    return config, roles.policy


def _in_float32(config: Config) -> Config:
    config.model.dtype = "float32"
    return config


def verify_engine(
    config: Config,
    policy: PolicyModel,
    engine: str,
    dtype: str,
    canary: Canary,
) -> Row:
    """Load `policy` into a new engine, cast to `dtype` as in a run, and compare. A failing engine gets a row, too."""
    settings = replace(config, engine=replace(config.engine, name=engine, dtype=dtype))
    if engine != "vllm":
        settings.engine = replace(settings.engine, tensor_parallel=1, max_model_len=0, kv_cache_mb=0, vllm={})
    canary = replace(canary, wire_dtype=dtype)
    allowed = canary.tolerance(dtype)
    wire = {name: _cast(tensor, DTYPES[dtype]) for name, tensor in policy.named_hf_parameters()}
    try:
        served = make_engine(settings)
        try:
            served.load_weights(VERSION, wire)
            found = compare(canary, served.score(canary.sequences), allowed.max)
        finally:
            asyncio.run(served.close())
    except AsyncRLError as error:
        return Row(engine=engine, dtype=dtype, allowed=allowed, found=None, why=str(error))
    return Row(engine=engine, dtype=dtype, allowed=allowed, found=found)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
