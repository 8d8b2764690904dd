"""Resolves settings that depend on the device on which a process computes: the dtype `auto`, and whether activations
are recomputed. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.schema import Config

AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16")
KEYS = ("model.dtype", "engine.dtype", "weights.wire_dtype")


def dtype_on(dtype: str, device: str) -> str:
    """Return `float32` or `bfloat16`. `device` is `cuda`, possibly with a number, or `cpu`."""
    if dtype != AUTO:
        return dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def recomputed_on(recomputed: bool | None, device: str) -> bool:
    """Return `model.activation_checkpointing` for this device. On a GPU it is on unless it is turned off: without, the
    activations of 16 k tokens of a model of 4 B parameters take 87 GB."""
    return device.startswith("cuda") if recomputed is None else recomputed


def with_dtypes(config: Config, *, learner: str = "", engine: str = "") -> Config:
    """Return `config` with `auto`, and an unset `model.activation_checkpointing`, resolved for a learner or an engine
    on these devices; empty leaves it unchanged.

    Weights are sent in the learner's dtype.
    """
    settled = replace(config)
    if learner:
        settled.model = replace(
            config.model,
            dtype=dtype_on(config.model.dtype, learner),
            activation_checkpointing=recomputed_on(config.model.activation_checkpointing, learner),
        )
        half = settled.model.dtype == "bfloat16" and learner.startswith("cuda")
        wire = dtype_on(config.weights.wire_dtype, "cuda" if half else "cpu")
        settled.weights = replace(config.weights, wire_dtype=wire)
    if engine:
        settled.engine = replace(config.engine, dtype=dtype_on(config.engine.dtype, engine))
    return settled
