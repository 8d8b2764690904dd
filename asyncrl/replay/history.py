"""`ledger.jsonl` in the run folder: what became of every group, one JSON line per event, for eyes and for audits.

A record, not a journal: nothing is recovered from it. Payloads are not in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.replay import events as ev

LEDGER_FILE = "ledger.jsonl"


class LedgerFile:
    """Call it with every event of the core. Lines reach the file when the learner restores and with each trained step.

    Nothing is made before that: until the learner is there the run folder is not prepared, and a folder with a strange
    file in it would be refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._members: dict[int, tuple[int, ...]] = {}
        """Step -> groups, from its sealing until it is trained: the event of training names no members."""

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Sealed):
            self._members[event.step] = event.members
        line = self._line(event)
        if line is not None:
            self._lines.append(json.dumps(line) + "\n")
        if isinstance(event, ev.Trained | ev.Restored | ev.Finished):
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
        self._lines.clear()

    def _line(self, event: ev.Event) -> dict[str, Any] | None:
        match event:
            case ev.Published(policy_version=version, parent=parent):
                return {"event": "published", "policy_version": version, "parent": parent}
            case ev.Issued():
                issued = {"event": "issued", "group": event.group_id, "prompt": event.prompt_index}
                return issued | {"attempt": event.attempt, "worker": event.worker}
            case ev.Returned(group_id=group):
                return {"event": "returned", "group": group}
            case ev.Inserted(header=header):
                return {"event": "inserted", "group": header.group_id, "worker": header.worker}
            case ev.Dropped(group_id=group, reason=reason):
                return {"event": "dropped", "group": group, "reason": reason.value}
            case ev.Sealed(step=step, members=members):
                return {"event": "leased", "step": step, "groups": members}
            case ev.Trained(step=step, policy_version=version):
                groups = self._members.pop(step, ())  # a restore seals the step again before it is trained again
                return {"event": "trained", "step": step, "policy_version": version, "groups": groups}
            case ev.Committed(step=step):
                return {"event": "committed", "step": step}
            case ev.Restored(step=step):
                return {"event": "restore", "next_step": step + 1}
            case ev.Finished():
                return {"event": "finished"}
            case _:
                return None
