"""`auto` among the kinds of numbers: what a process takes, by what it computes on. No torch."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.schema import Config

AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16")
KEYS = ("model.dtype", "engine.dtype", "weights.wire_dtype")


def dtype_on(dtype: str, device: str) -> str:
    """`float32` or `bfloat16`. `device` is its kind: `cuda`, also with a number, or `cpu`."""
    if dtype != AUTO:
        return dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def with_dtypes(config: Config, *, learner: str = "", engine: str = "") -> Config:
    """`config` with what `auto` is for a learner, or an engine, that computes on this device; empty: left as it is.

    On the wire go the learner's numbers. Where both sides are to compute the same bits it is float32 everywhere.
    """
    settled = replace(config)
    if learner:
        kind = "cpu" if config.engine.exact else learner
        settled.model = replace(config.model, dtype=dtype_on(config.model.dtype, kind))
        half = settled.model.dtype == "bfloat16" and kind.startswith("cuda")
        wire = dtype_on(config.weights.wire_dtype, "cuda" if half else "cpu")
        settled.weights = replace(config.weights, wire_dtype=wire)
    if engine:
        kind = "cpu" if config.engine.exact else engine
        settled.engine = replace(config.engine, dtype=dtype_on(config.engine.dtype, kind))
    return settled
