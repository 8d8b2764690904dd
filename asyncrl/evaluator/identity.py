"""What identifies an evaluation: the settings that its samples depend on, and the contents of the files they name.

Samples of different evaluations must never be mixed. Settings that only affect how samples are counted (`eval.answer`,
`eval.pass_score`) may change between two starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.checks.sources import places, sources
from asyncrl.config import by_key, config_to_dict
from asyncrl.schema import Config

ROOMS = ("model.", "data.", "environment.", "reward.")
"""Prefixes of the settings that count, except for those below."""
ALONE = ("seed", "engine.name", "engine.dtype", "rollout.max_new_tokens", "eval.samples", "eval.temperature")
LATER = {"eval.top_p": 1.0, "eval.top_k": 0, "eval.min_p": 0.0, "model.fp32_head": False}
"""Settings that count only if they differ from these values, so that evaluations begun before they existed continue."""
NOT_OF_A_SAMPLE = (
    *("model.dtype", "model.activation_checkpointing", "model.checkpoint_every", "model.checkpoint_keep"),
    *("model.lora_rank", "model.lora_alpha", "model.lora_targets", "model.fp32_head"),
    "model.compile",
    *("data.shuffle", "reward.workers", "reward.host", "reward.gpus", "reward.max_failure_share"),
)
FOLDERS = ("model.path", "data.path", "reward.model")
"""Settings that may name a folder. In any other, a value that happens to be a folder's name means something else."""
WHOLE_BYTES = 64 << 20
"""Larger files are identified by length and both ends. That suffices: training changes every tensor of a model."""
END_BYTES = 1 << 20
LONGEST_PATH = 1024
"""A longer text is not a path: the file system would raise an error."""


def identity(config: Config, rows: int) -> dict[str, Any]:
    """The values of all settings that count, by dotted key, and digests of the files that they name.

    Args:
        rows: number of dataset rows that are evaluated.

    Raises:
        DataError: the data cannot be found.
    """
    settings = json.loads(json.dumps(by_key(config_to_dict(config)), default=str))
    kept = {
        key: value
        for key, value in settings.items()
        if key in ALONE or (key.startswith(ROOMS) and key not in NOT_OF_A_SAMPLE) or value != LATER.get(key, value)
    }
    held = {f"{key} (what its files hold)": content for key in kept if (content := _content(key, kept[key]))}
    content = _content("data.path", [place.path for source in sources(config.data) for place in places(source)])
    held |= {"data.path (what its files hold)": content} if content else {}
    return {**kept, **held, "eval.rows": rows}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: old -> new`, sorted."""
    keys = sorted({*before, *now})
    return [
        f"{key}: {before.get(key, '(none)')} -> {now.get(key, '(none)')}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def digest(made_of: Mapping[str, Any]) -> str:
    """8 hex digits."""
    return xxhash.xxh3_64(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:8]


def _content(key: str, given: Any) -> str:
    """Hash of the files at a path, of code by its path (`file.py:name`), or of all that a list or the arguments of
    something name; empty where none is here."""
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list):
        return " ".join(filter(None, (_content(key, one) for one in given)))
    if not isinstance(given, str) or not given or len(given) > LONGEST_PATH:
        return ""
    place = given.rpartition(":")[0]
    path = Path(place if place.endswith(".py") else given)
    if path.is_file():
        return _hash([path])
    if key not in FOLDERS or not path.is_dir():
        return ""
    return _hash(sorted(file for file in path.rglob("*") if file.is_file()))


def _hash(files: Iterable[Path]) -> str:
    found = xxhash.xxh3_64()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                while part := file.read(END_BYTES):
                    found.update(part)
            else:
                found.update(file.read(END_BYTES))
                file.seek(-END_BYTES, 2)
                found.update(file.read(END_BYTES))
    return found.hexdigest()
