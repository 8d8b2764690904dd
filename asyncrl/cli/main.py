"""The command `asyncrl`: loads and runs the requested command. Its arguments are in `asyncrl.cli.arguments.parser`."""

from __future__ import annotations

import argparse
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.cli.arguments.parser import parse
from asyncrl.collector import load
from asyncrl.errors import AsyncRLError, RunFolderError
from asyncrl.plain_text import make_streams_plain

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_UNREAD = 128 + signal.SIGPIPE
_ROOM, _RIGHT = "Free space, or give another folder", "Ask its owner to give this user access, or give another place"
PLACES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHT),
    errno.EROFS: "Give a folder that can be written",
}
"""Errors of the disk or of permissions that only the user can fix, with the way out."""
NO_FILES = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
"""Errors if something else is in the place of a file."""

COMMANDS = {
    "local": "asyncrl.cli.local",
    "quickstart": "asyncrl.cli.quickstart",
    "replay": "asyncrl.replay.__main__",
    "rollout": "asyncrl.rollout.__main__",
    "learner": "asyncrl.learner.__main__",
}
"""Modules of the commands that start a role of a run."""

KEYS_MADE = """\
keys in {}, one pair per role. Copy *.key to every machine of the run, but of the secrets only these:
  the replay server's machine      server.key_secret
  the learner's machines           learner.key_secret
  the rollout workers' machines    worker.key_secret"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code; 2 with the reason if a setting was refused, 130 after Ctrl-C, 141 if the
    reader of the output has gone (`| head`)."""
    make_streams_plain()
    given = parse(arguments)
    try:
        code = run(given)
        if sys.stdout is not None:  # it is None with `>&-`
            sys.stdout.flush()  # here, because at exit an error could not be handled
        return code
    except AsyncRLError as error:
        print(f"asyncrl: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("asyncrl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno == errno.EPIPE and sys.stdout is not None and _unread(sys.stdout.fileno()):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard further output
            if given.command in (*COMMANDS, "sft") and not _unread(2):  # stderr may be the same pipe, as with `2>&1`
                print(
                    "asyncrl: ended, because nothing reads its output any more. Redirect the output to a file",
                    file=sys.stderr,
                )
            return EXIT_UNREAD
        if error.errno in NO_FILES:
            print(f"asyncrl: {error}: this must be a file. Restore it from a copy, or move it away", file=sys.stderr)
            return EXIT_REFUSED
        if error.errno not in PLACES:
            raise
        print(f"asyncrl: {error}. {PLACES[error.errno]}", file=sys.stderr)
        return EXIT_REFUSED


def _unread(pipe: int) -> bool:
    """Return whether the pipe's reader has gone."""
    look = select.poll()
    look.register(pipe, 0)
    return any(found & select.POLLERR for _, found in look.poll(0))


def run(given: argparse.Namespace) -> int:
    # Commands are imported by name after parsing: some load torch or Ray, for which `asyncrl --help` must not wait.
    if given.command in ("audit", "rerun", "export") and not given.run.is_dir():
        raise RunFolderError(f"{given.run} is not a folder here. Give the folder of a run, such as runs/NAME")
    if given.command in ("verify", "eval"):
        refuse_missing(given.path)
    return WAYS.get(given.command, _run_role)(given)


def _make_keys(given: argparse.Namespace) -> int:
    load("asyncrl.replay.net.keyring").make_keys(given.directory)
    print(KEYS_MADE.format(given.directory))
    return 0


def _audit(given: argparse.Namespace) -> int:
    if load("asyncrl.telemetry.folder.resumed").is_supervised(given.run):
        raise RunFolderError(
            f"{given.run} is a run of asyncrl sft: it has no journal to audit. Its checkpoints are verified when it "
            "resumes"
        )
    code, unreadable = load("asyncrl.replay.audit.report").main(given.run, as_json=given.json)
    return max(code, load("asyncrl.cli.starting.folder_check").tell(given.run, unreadable))


def _doctor(given: argparse.Namespace) -> int:
    if not given.folder.is_dir():
        raise RunFolderError(
            f"{given.folder} is not a folder on this machine. Give the folder that will contain the run folders"
        )
    return load("asyncrl.cli.doctor").main(given.folder, as_json=given.json)


def _run_role(given: argparse.Namespace) -> int:
    """Run `data`, or a command of COMMANDS."""
    given.overrides = load("asyncrl.cli.arguments.settings_file").with_files(given.overrides)
    if given.command == "local":
        given.overrides = load("asyncrl.quickstart.smoke").filled(given.overrides)
    if given.command == "data":
        return load("asyncrl.cli.data_check").main(given.overrides)
    if given.dry_run and given.command != "quickstart":
        return load("asyncrl.cli.dry_run.command").main(given.command, given.overrides)
    if given.command == "rollout" and not given.dry_run:
        load("asyncrl.cli.starting.preflight").check_start("rollout", given.overrides)
    role = load(COMMANDS[given.command])
    return role.plan(given.overrides) if given.dry_run else role.main(given.overrides)


WAYS: dict[str, Callable[[argparse.Namespace], int]] = {
    "keys": _make_keys,
    "audit": _audit,
    "doctor": _doctor,
    "watch": lambda given: load("asyncrl.cli.watch").main(given.run),
    "report": lambda given: load("asyncrl.cli.report").main(given.runs, given.to),
    "verify": lambda given: load("asyncrl.cli.verify").main(given.path, given.overrides),
    "eval": lambda given: load("asyncrl.cli.eval").main(given.path, given.overrides, dry_run=given.dry_run),
    "export": lambda given: load("asyncrl.cli.export").main(given.run, given.step, given.to, average=given.average),
    "retriever": lambda given: load("asyncrl.environments.search.server").serve(given.corpus, given.host, given.port),
    "settings": lambda given: load("asyncrl.cli.settings").main(given.words, markdown=given.markdown, sft=given.sft),
    "compare": lambda given: load("asyncrl.cli.compare").main(given.runs, as_json=given.json),
    "trace": lambda given: load("asyncrl.cli.trace").main(
        given.run, given.to, group=given.group, version=given.version
    ),
    "alarms": lambda given: load("asyncrl.cli.alarms").main(markdown=given.markdown),
    "metrics": lambda given: load("asyncrl.cli.metrics").main(given.words, markdown=given.markdown),
    "rerun": lambda given: load("asyncrl.cli.rerun").main(given.run, given.overrides),
    "sft": lambda given: load("asyncrl.cli.sft").main(given.overrides, dry_run=given.dry_run),
    "plan": lambda given: load("asyncrl.cli.plan").main(given.overrides, given.runs, given.picture, as_json=given.json),
}
"""Functions of the commands that start no role of a run."""


RUNS = "runs"
"""Default parent of run folders."""


def refuse_missing(path: str) -> None:
    """Refuse a missing folder. `org/name` may be a name on the hub, but a path that is evidently meant as a folder is
    not looked up there, where a missing run would appear as a network error.

    Raises:
        RunFolderError: there is no such folder.
    """
    given = Path(path)
    if given.is_dir():
        return
    of_a_run = Path(RUNS, path)
    first = given.parts[0] if given.parts else ""
    if path.startswith(("/", ".", "~")) or first == RUNS or len(given.parts) != 2 or Path(first).is_dir():
        hint = f" Did you mean {of_a_run}?" if of_a_run.is_dir() else ""
        raise RunFolderError(
            f"{path} is not a folder here. Give a run folder, or a Hugging Face model (a folder, or org/name on the "
            f"hub).{hint}"
        )
    print(f"{path} is not a folder here, so it is taken as a name on the Hugging Face hub", file=sys.stderr)
