"""Loads datasets of the Hugging Face hub by name, with the library `datasets`, imported with this module.

They are downloaded once into the library's cache. The library no longer runs a dataset's own code.
"""

from __future__ import annotations

import datasets

from asyncrl.data.rows.arrow import ArrowTable
from asyncrl.errors import DataError


def load(spec: str) -> ArrowTable:
    """Load `hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME:CONFIG:SPLIT`; the default split is `train`.

    Raises:
        DataError: loading failed: no network, or no such dataset, configuration or split.
    """
    name, *rest = spec.removeprefix("hf:").split(":")
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) == 2 else None
    if not name or not split or len(rest) > 2:
        raise DataError(f"{spec} is not a name on the hub. Write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    try:
        found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of the library, the hub or the network, which share no class
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{spec} cannot be loaded from the hub ({why:.400}). Without a network: load it once on a machine that has "
            "one, save it with save_to_disk, and give that folder"
        ) from error
    return ArrowTable(found.with_format("arrow")[:], spec)
