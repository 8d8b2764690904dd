"""Settings of the weights' way into the engines."""

from __future__ import annotations

from dataclasses import dataclass

ON_DEVICE = ("nccl", "ipc")
"""Values of `weights.backend` that send out of the memory of the learner's device; the others out of host memory."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    transport: str = "broadcast"
    """How weights reach the workers: `broadcast` (sockets, or nccl between GPUs), `files` (in the run folder, which
    all must share), or `pull` (over HTTP, or from `weights.url`, so that no common network is needed)."""
    host: str = "127.0.0.1"
    """Address at which workers reach the learner's weight store, or the server of `pull`. On several machines: that of
    the learner's machine."""
    port: int = 0
    """Port of the weight store or server; 0 takes any that is free. With a firewall between learner and workers, set
    one that it lets through, and use `weights=pull`: the bytes of a broadcast take other ports."""
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
    copies: str = "two"
    """Copies of its weights that the learner keeps for sending: `two`, so that training goes on while one is sent; or
    `none` (broadcast only), which saves their memory, and the optimizer waits until the weights are sent."""
    delta: str = "never"
    """Of `files` and `pull`: write only what changed since the previous version, without loss: `never`, `always`, or
    `auto`, while it halves the bytes. Worth it for bfloat16 on slow links; in float32 nearly every bit changes."""
    url: str = ""
    """Of `pull`: URL of any file system that fsspec knows (`s3://bucket/run`), where the learner writes and workers
    read. Empty: the learner serves its run folder over HTTP at `weights.host`."""
    fetch_url: str = ""
    """Of `pull`: URL at which workers read, if it is not where the learner publishes: a proxy with TLS, or a cache
    before a bucket."""
    on_update: str = "keep"
    """What happens to the cached keys of running sequences at an update: `keep` them (cheap), or `recompute` them with
    the new weights."""
    verify_every: int = 10
    """Versions between two canaries, which compare the log-probs of engine and learner on probe tokens. 0: only a
    worker's first version, and the first after each rejoin."""
    timeout_s: float = 60.0
    """Longest wait in seconds for any one peer in any one phase of an update. A tensor larger than 64 MiB has this long
    for every 64 MiB."""
