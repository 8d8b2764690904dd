"""Settings of the weights' way into the engines."""

from __future__ import annotations

from dataclasses import dataclass

ON_DEVICE = ("nccl", "ipc")
"""Values of `weights.backend` that send out of the memory of the learner's device; the others out of host memory."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    transport: str = "broadcast"
    """How weights reach the workers: `broadcast` (sockets, or nccl between GPUs), or `files` (in the run folder, which
    all must share, or at `weights.url`, so that no common network is needed)."""
    host: str = "127.0.0.1"
    """Address at which workers reach the learner's weight store. On several machines: that of the learner's
    machine."""
    port: int = 0
    """Port of the weight store; 0 takes any that is free. The bytes of a broadcast take other ports: with a firewall
    between learner and workers use `weights=files` with `weights.url`."""
    backend: str = "auto"
    """Backend of the broadcast: `sockets` (anything), `nccl` (GPUs on both sides, none of them shared), `ipc`
    (engines on the learner's machine copy from its memory), or `auto`: nccl where learner and engines have GPUs of
    their own, else sockets."""
    interface: str = ""
    """Network interface for the weights (`eth1`). Empty: that of `GLOO_SOCKET_IFNAME` or
    `NCCL_SOCKET_IFNAME`, else (without nccl) the one that leads to `weights.host`."""
    wire_dtype: str = "auto"
    """Dtype in which weights are sent; `auto` is bfloat16 if the learner computes in it on a GPU, else float32."""
    bucket_mb: int = 64
    """Weights travel in buckets of at most this many MiB."""
    delta: str = "never"
    """Of `files`: write only what changed since the previous version, without loss: `never`, `always`, or
    `auto`, while it halves the bytes. Worth it for bfloat16 on slow links; in float32 nearly every bit changes."""
    url: str = ""
    """Of `files`: URL of any file system that fsspec knows (`s3://bucket/run`), where the learner writes and workers
    read. Empty: the run folder."""
    fetch_url: str = ""
    """Of `files` with `weights.url`: URL at which workers read, if it is not where the learner publishes: a web server
    of that folder, or a cache before a bucket."""
    on_update: str = "keep"
    """What happens to the cached keys of running sequences at an update: `keep` them (cheap), or `recompute` them with
    the new weights."""
    verify_every: int = 10
    """Versions between two canaries, which compare the log-probs of engine and learner on probe tokens. 0: only a
    worker's first version, and the first after each rejoin."""
    timeout_s: float = 60.0
    """Longest wait in seconds for any one peer in any one phase of an update. A tensor larger than 64 MiB has this long
    for every 64 MiB."""
