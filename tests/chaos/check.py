"""Judge a chaos run: compare the histories that the clients wrote with the journal."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.replay.audit.report import audit
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.recovery import read_journal

from .learner import train
from .settings import ChaosSettings


@dataclass(slots=True, kw_only=True)
class Verdict:
    invoked: int = 0
    acked: int = 0
    unknown: int = 0
    """Inserts whose answer never arrived: they may or may not have been accepted."""
    late: int = 0
    """Inserts that came too late: refused because the assignment had gone to another worker, or for a closed group."""
    steps: int = 0
    trained: int = 0
    rollbacks: int = 0
    max_staleness: int = 0
    lost: list[int] = field(default_factory=list)
    """Acknowledged groups that are neither trained nor dropped with a reason."""
    twice: list[int] = field(default_factory=list)
    """Groups trained more often than asked for, or from two attempts."""
    trained_in: dict[int, int] = field(default_factory=dict)
    """Number of steps -> number of groups trained in that many steps."""
    retired: int = 0
    """Groups trained in fewer steps than asked for that the audit reports as over-age or left at the end of the run."""
    fenced: list[int] = field(default_factory=list)
    """Groups trained from data that the server had refused."""
    split: list[int] = field(default_factory=list)
    audit: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not (self.lost or self.twice or self.fenced or self.split or self.audit or self.wrong)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file, without a last line that is still being written."""
    return [json.loads(text) for text in path.read_text().split("\n")[:-1]] if path.exists() else []


def surviving(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return step -> the row of its training, in the history that the last learner builds on."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["what"] == "restore":
            steps = {step: what for step, what in steps.items() if step < row["next_step"]}
        elif row["what"] == "trained":
            steps[row["step"]] = row
    return steps


def check(settings: ChaosSettings, ended: bool = True) -> Verdict:
    """Check every promise of the harness; see `Verdict`.

    Args:
        ended: False for a run that goes on: only what must hold at any moment is checked.
    """
    verdict = Verdict()
    learner = lines(settings.root / "history" / "learner.jsonl")
    steps = surviving(learner)
    verdict.steps, verdict.rollbacks = len(steps), sum(row["what"] == "restore" for row in learner) - 1
    trained = [group for what in steps.values() for group in what["groups"]]
    verdict.trained = len({group["group"] for group in trained})
    check_learner(verdict, learner)
    if not ended and not steps:
        return verdict
    check_training(settings, verdict, steps, trained)
    check_staleness(settings, verdict, learner)
    acked, refused, attempts = client_histories(settings, verdict)
    dropped: set[int] = set()
    sealed: dict[int, list[int]] = {}
    for _, event in read_journal(settings.journal):
        if isinstance(event, ev.Dropped):
            dropped.add(event.group_id)
        elif isinstance(event, ev.Sealed):
            sealed[event.step] = list(event.members)
    known = {group["group"] for group in trained} | dropped
    verdict.lost = sorted({group for group, _ in acked} - known) if ended else []
    accepted = {nonce for _, nonce in acked}
    verdict.fenced = [
        g["group"]
        for g in trained
        for nonce in g["nonces"]
        if nonce in refused - accepted or attempts.get(nonce) != g["attempt"]
    ]
    for step, what in steps.items():
        ids = [group["group"] for group in what["groups"]]
        if sealed.get(step) != ids:
            verdict.wrong.append(f"step {step} was trained on {ids}, the journal has {sealed.get(step)}")
    check_books(settings, verdict, ended)
    return verdict


def check_books(settings: ChaosSettings, verdict: Verdict, ended: bool) -> None:
    """Check that the journal has every step acknowledged to the learner as trained.

    At the end of the run it must have no other step, and its audit must balance.
    """
    books = audit(read_journal(settings.journal))
    if ended and not books.balances:
        verdict.audit = "; ".join(books.violations[:3])
    verdict.retired = books.retired
    named = sum(books.trained_in.values()) == books.trained
    if ended and named and books.trained_in != verdict.trained_in:
        verdict.wrong.append(f"the audit has groups by steps {books.trained_in}, the learner {verdict.trained_in}")
    if books.trained_steps < verdict.steps or (
        ended and (books.trained_steps, books.trained) != (verdict.steps, verdict.trained)
    ):
        verdict.wrong.append(f"the audit has {books.trained_steps} steps, the learner {verdict.steps}")


def check_training(
    settings: ChaosSettings, verdict: Verdict, steps: dict[int, dict[str, Any]], trained: list[dict[str, Any]]
) -> None:
    """Check that groups were trained whole, no more often than asked for, and that the weights follow from exactly
    these groups."""
    if sorted(steps) != list(range(len(steps))):
        verdict.wrong.append(f"steps are missing: {sorted(set(range(max(steps))) - set(steps))[:5]}")
    seen: Counter[int] = Counter()
    nonces: dict[int, list[int]] = {}
    for group in trained:
        seen[group["group"]] += 1
        if (
            seen[group["group"]] > settings.uses
            or nonces.setdefault(group["group"], group["nonces"]) != group["nonces"]
        ):
            verdict.twice.append(group["group"])
        whole = group["size"] == settings.group_size and len(group["nonces"]) == 1
        if not whole or group["members"] != sorted(set(group["members"])):
            verdict.split.append(group["group"])
        if group["content"] != [group["group"]]:
            verdict.wrong.append(f"group {group['group']} was trained with the content of {group['content']}")
    if len({nonce for marks in nonces.values() for nonce in marks}) < len(nonces):
        verdict.wrong.append("two groups were trained from one")
    verdict.trained_in = dict(Counter(seen.values()))
    digest = ""
    for step in sorted(steps):
        digest = train(digest, [group["group"] for group in steps[step]["groups"]])
        if digest != steps[step]["digest"]:
            verdict.wrong.append(f"the weights after step {step} are not those of its history")
            return


def check_staleness(settings: ChaosSettings, verdict: Verdict, rows: list[dict[str, Any]]) -> None:
    """Check that staleness is within its bound in every step ever trained, including steps that were undone.

    Staleness is counted along the learner's own line of weights: a step that was trained again on the same groups
    after a crash made the same weights.
    """
    roots: dict[int, tuple[str, ...]] = {}
    """Version -> digests of the weights it descends from, its own included."""
    for row in rows:
        if row["what"] == "restore":
            # The same weights under a new version number: no step was trained.
            roots[row["version"]] = roots.get(row["parent"], ())
        elif row["what"] == "trained":
            current = set(roots[row["parent"]])
            for version in {version for group in row["groups"] for version in group["versions"]}:
                age = len(current.symmetric_difference(roots[version]))
                verdict.max_staleness = max(verdict.max_staleness, age)
            roots[row["version"]] = (*roots[row["parent"]], row["digest"])
    if verdict.max_staleness > settings.max_staleness:
        verdict.wrong.append(f"a token of staleness {verdict.max_staleness} was trained")


def check_learner(verdict: Verdict, rows: list[dict[str, Any]]) -> None:
    """Check that no request of the learner was refused, and that a step leased again had the groups of the first
    time."""
    planned: dict[int, list[int]] = {}
    for row in rows:
        if row["what"] == "error":
            verdict.wrong.append(f"the learner was refused: {row['kind']}: {row['error'][:200]}")
        elif row["what"] == "leased":
            before = planned.get(row["step"], [])
            kept = [group for group in before if group in row["groups"]]
            if row["groups"][: len(kept)] != kept or (before and len(kept) < len(before) and not verdict.rollbacks):
                verdict.wrong.append(f"step {row['step']} was {before}, leased again it is {row['groups']}")
            planned[row["step"]] = row["groups"]


def client_histories(
    settings: ChaosSettings, verdict: Verdict
) -> tuple[set[tuple[int, int]], set[int], dict[int, int]]:
    """Return `(acknowledged (group, nonce) pairs, refused nonces, nonce -> attempt for every nonce sent)`."""
    attempts: dict[int, int] = {}
    acked: set[tuple[int, int]] = set()
    refused: set[int] = set()
    for path in sorted((settings.root / "history").glob("w*.jsonl")):
        open_inserts = 0
        for row in lines(path):
            open_inserts += {"invoke": 1, "ok": -1, "fail": -1}.get(row["what"], 0)
            verdict.invoked += row["what"] == "invoke"
            if "nonce" not in row:
                continue
            attempts[row["nonce"]] = row["attempt"]
            if row["what"] == "ok":
                acked.add((row["group"], row["nonce"]))
            verdict.late += row.get("status") in ("fenced", "closed")
            if row["what"] == "fail":
                refused.add(row["nonce"])
        verdict.unknown += open_inserts
    verdict.acked = len(acked)
    return acked, refused, attempts
