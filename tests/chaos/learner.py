"""A learner that can be verified: its weights are a hash of everything it was trained on, in order."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from asyncrl.errors import AsyncRLError
from asyncrl.replay.client.client import LearnerClient
from asyncrl.replay.protocol import Lease
from asyncrl.types import NO_VERSION

from .settings import DIGEST, ChaosSettings, History


@dataclass(slots=True, kw_only=True)
class Weights:
    step: int | None = None
    """Last step trained; None before the first."""
    version: int = NO_VERSION
    digest: str = ""
    snapshot: dict[str, Any] = field(default_factory=dict)


def train(digest: str, group_ids: list[int]) -> str:
    """Return the weights after a step. The order within a batch is that of arrival, so it has no effect."""
    return hashlib.sha256(f"{digest}/{sorted(group_ids)}".encode()).hexdigest()[:16]


def load(path: Path) -> Weights:
    return Weights(**msgpack.unpackb(path.read_bytes(), strict_map_key=False)) if path.exists() else Weights()


def save(path: Path, weights: Weights) -> None:
    aside = path.with_suffix(".tmp")
    with aside.open("wb") as file:
        file.write(msgpack.packb(asdict(weights)))
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def groups_of(lease: Lease) -> list[dict[str, Any]]:
    """Return the history row of each group: among others its id, nonces, members and the versions of its trained
    tokens."""
    rows = []
    for place, header in enumerate(lease.plan.groups):
        found = [t for (group, _), t in sorted(lease.trajectories.items()) if group == place]
        versions = {v for t in header.trajectories for v, _ in t.version_tokens}
        rows.append(
            {
                "group": header.group_id,
                "attempt": header.attempt,
                "size": len(header.trajectories),
                "content": sorted({int(t.token_ids[2]) for t in found}),
                "nonces": sorted({int(nonce) for t in found for nonce in (t.token_ids[0], *t.extras["nonce"].flat)}),
                "members": [int(t.token_ids[1]) for t in found],
                "versions": sorted(v for v in versions if lease.plan.staleness[v] <= lease.plan.max_staleness),
            }
        )
    return rows


def run(settings: ChaosSettings) -> None:
    history = History(settings.root / "history" / "learner.jsonl")
    client = LearnerClient(settings.address, rank=0, run_digest=DIGEST, config=settings.replay())
    weights = load(settings.root / "checkpoint")
    snapshot = weights.snapshot or None
    restored = client.restore(step=weights.step, policy_version=weights.version, snapshot=snapshot)
    version = restored.next_version
    history.note(
        "restore", next_step=restored.next_step, version=version, parent=weights.version, digest=weights.digest
    )
    client.publish(policy_version=version, parent=weights.version)
    client.announce({"version": version})
    step = restored.next_step
    while not _over(settings, step):
        lease = client.lease(step=step, rank=0, world=1, wait_s=120.0)
        rows = groups_of(lease)
        history.note("leased", step=step, groups=[row["group"] for row in rows])
        digest = train(weights.digest, [row["group"] for row in rows])
        version += 1
        client.trained(step=step, policy_version=version)
        history.note("trained", step=step, version=version, parent=version - 1, groups=rows, digest=digest)
        client.announce({"version": version})
        weights = Weights(step=step, version=version, digest=digest)
        step += 1
        if step % settings.save_every == 0:
            _checkpoint(settings, client, weights)
    _checkpoint(settings, client, weights)
    client.finish()
    history.note("finished", step=step, digest=weights.digest)
    client.close()


def _checkpoint(settings: ChaosSettings, client: LearnerClient, weights: Weights) -> None:
    if weights.step is not None:
        weights.snapshot = client.snapshot()
        save(settings.root / "checkpoint", weights)
        client.commit(step=weights.step)


def _over(settings: ChaosSettings, step: int) -> bool:
    return step >= settings.steps if settings.steps else (settings.root / "stop").exists()


if __name__ == "__main__":
    here = ChaosSettings.load(sys.argv[1])
    try:
        run(here)
    except AsyncRLError as error:
        History(here.root / "history" / "learner.jsonl").note("error", kind=type(error).__name__, error=str(error))
        print(f"learner: {type(error).__name__}: {error}", flush=True)
        sys.exit(1)
