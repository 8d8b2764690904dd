"""Receipts that prove to the planner that a shard has a payload: sealed with a key that only servers have.

A worker puts a payload at a shard and sends the sealed receipt to the planner with the header. Without the seal a
worker could announce a group that nobody has, and the learner would wait for it. The key of the seal is derived from
the secret CURVE key of the shards, which only the shards and the planner have.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from asyncrl.replay.codec import headers, wire
from asyncrl.replay.net.keyring import key_pair
from asyncrl.types import GroupHeader

_CONTEXT = b"asyncrl receipt"


class Seals:
    """Makes seals. The planner and every shard of a run make the same ones.

    Args:
        keys: `replay.keys`.

    Raises:
        ConfigError: the shards' key is missing or unreadable.
    """

    def __init__(self, keys: str, run_digest: str) -> None:
        secret = key_pair(keys, "shard").secret
        self._key = hashlib.blake2b(secret, key=run_digest.encode()[:64], person=_CONTEXT).digest()

    def receipt(self, run_id: str, shard: int, header: GroupHeader, tag: str) -> str:
        """Seal of the statement that `shard` has checked the payload `tag` against `header` and stored it durably."""
        return self._seal(["stored", run_id, shard, headers.packed_header(header), tag])

    def address(self, shard: int, address: str) -> str:
        """Seal of the statement that shard number `shard` listens at `address`."""
        return self._seal(["listens", shard, address])

    @staticmethod
    def same(one: str, other: str) -> bool:
        """Compare two seals in constant time."""
        return hmac.compare_digest(one.encode(), other.encode())

    def _seal(self, what: list[Any]) -> str:
        return hashlib.blake2b(wire.pack(what), key=self._key, digest_size=16).hexdigest()
