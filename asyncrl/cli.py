"""The command `asyncrl`: reads its arguments, then loads the one role that was asked for."""

from __future__ import annotations

import argparse
import errno
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl import __version__
from asyncrl.errors import AsyncRLError, RunFolderError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
PLACES = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""What the user's disk or its owner says, and no program can mend."""

COMMANDS = {
    "local": ("asyncrl.local", "everything on this machine: replay server, rollout workers, learner"),
    "quickstart": ("asyncrl.quickstart", "the same on a task that a CPU learns in a minute"),
    "replay": ("asyncrl.replay.__main__", "the replay server alone"),
    "shard": ("asyncrl.replay.shard", "one shard of the replay alone (replay.shards): its number, then settings"),
    "rollout": ("asyncrl.rollout.__main__", "a pool of rollout workers alone"),
    "learner": ("asyncrl.learner.__main__", "one learner rank; start several with torchrun -m asyncrl.learner"),
}

EPILOG = """\
Settings are key=value, groups are chosen with group=name (files in configs/):
  asyncrl local model.path=DIR data.path=FILE.jsonl reward.function=FILE.py:NAME loss=ppo replay.max_staleness=2
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous off-policy actor-learner training of language models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("overrides", nargs="*", metavar="key=value", help="settings; see configs/")
        command.add_argument("--dry-run", action="store_true", help="print the resolved plan and start nothing")
    text = "does every engine installed here serve this model as the learner computes it?"
    verify = commands.add_parser("verify", help=text, description=text)
    verify.add_argument("path", metavar="RUN|MODEL", help="a run folder, or a Hugging Face model")
    verify.add_argument("overrides", nargs="*", metavar="key=value", help="settings for a model: engine.*, seed")
    text = "does the journal of a run balance? Exit code 0: yes, 1: no, 2: it cannot be read"
    audit = commands.add_parser("audit", help=text, description=text)
    audit.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    audit.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    text = "train the learner of a finished run again on its retained journal, as it was or with other settings"
    rerun = commands.add_parser("rerun", help=text, description=text)
    rerun.add_argument("run", metavar="RUN", type=Path, help="a run folder (replay.journal.retain=all)")
    rerun.add_argument("overrides", nargs="*", metavar="key=value", help="loss, advantage, learner.lr, ...")
    text = "make the keys that a replay server on a network needs (replay.keys=DIR)"
    keys = commands.add_parser("keys", help=text, description=text)
    keys.add_argument("directory", metavar="DIR", type=Path, help="a new folder")
    return top


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Settings and `--dry-run` in any order, which argparse alone does not take."""
    top = parser()
    given, rest = top.parse_known_args(arguments)
    options = [text for text in rest if text.startswith("-")]
    if options or (rest and given.command in ("keys", "audit")):
        top.error(f"unrecognized arguments: {' '.join(options or rest)} (settings are key=value, without dashes)")
    if rest:
        given.overrides += rest
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the role; 2 with the reason when a setting was refused, 130 after Ctrl-C."""
    given = parse(arguments)
    try:
        return run(given)
    except AsyncRLError as error:
        print(f"asyncrl: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("asyncrl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in PLACES:
            raise
        print(f"asyncrl: {error}. Free space, or give a folder that can be written", file=sys.stderr)
        return EXIT_REFUSED


def run(given: argparse.Namespace) -> int:
    # By name, after parsing: a role loads torch or Ray, and `asyncrl --help` must not wait for either.
    if given.command == "keys":
        importlib.import_module("asyncrl.replay.security").make_keys(given.directory)
        print(f"keys in {given.directory}: copy it to the learner's and the workers' machines, and keep it private")
        return 0
    if given.command in ("audit", "rerun") and not given.run.is_dir():
        raise RunFolderError(f"{given.run} is no folder here. Give the folder of a run, such as runs/NAME")
    if given.command == "verify":
        # `org/name` is a name on the hub; anything that starts like a path is meant as one.
        if given.path.startswith(("/", ".", "~")) and not Path(given.path).is_dir():
            raise RunFolderError(f"{given.path} is no folder here. Give a run folder, or a Hugging Face model")
        return importlib.import_module("asyncrl.verify").main(given.path, given.overrides)
    if given.command == "audit":
        return importlib.import_module("asyncrl.replay.audit").main(given.run, as_json=given.json)
    if given.command == "rerun":
        return importlib.import_module("asyncrl.rerun").main(given.run, given.overrides)
    if given.dry_run and given.command != "quickstart":
        return importlib.import_module("asyncrl.dry_run").main(given.command, given.overrides)
    role = importlib.import_module(COMMANDS[given.command][0])
    return role.plan(given.overrides) if given.dry_run else role.main(given.overrides)


if __name__ == "__main__":
    sys.exit(main())
