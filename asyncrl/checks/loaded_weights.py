"""Whether a checkpoint and the class that it is loaded into have the same weights: for each model of a run.

transformers makes weights that a checkpoint lacks at random, and drops those that the class does not have. Either way
something else is trained or scored than what was saved, and only a log would say so.
"""

from __future__ import annotations

from collections.abc import Collection

NAMED = 4
"""Number of weights that an error names."""


def refuse_unequal(kind: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Refuse a checkpoint whose weights are not those of the class.

    Args:
        kind: name of the class.
        missing: names of weights that the class has and the checkpoint has not.
        unexpected: names of weights that the checkpoint has and the class has not.

    Raises:
        ValueError: one of the two is not empty.
    """
    if missing:
        raise ValueError(
            f"its checkpoint has no {_some(missing)} ({len(missing)} weights), which would be made at random"
        )
    if unexpected:
        raise ValueError(
            f"its checkpoint has {_some(unexpected)} ({len(unexpected)} weights), which a {kind} has no place for: it "
            "would compute without them. Give a checkpoint that was saved from this class, or correct the "
            "architectures in its config.json; if nothing needs these weights, take them out of its files"
        )


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:NAMED]) + (" ..." if len(names) > NAMED else "")
