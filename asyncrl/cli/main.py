"""The command `asyncrl`: reads its arguments, then loads the one role that was asked for."""

from __future__ import annotations

import argparse
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl import __version__
from asyncrl.collector import load
from asyncrl.errors import AsyncRLError, ConfigError, RunFolderError
from asyncrl.plain_text import make_streams_plain

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_UNREAD = 128 + signal.SIGPIPE
_ROOM, _RIGHT = "Free space, or give another folder", "Have its owner let this user in, or name another place"
PLACES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHT),
    errno.EROFS: "Give a folder that can be written",
}
"""What the user's disk or its owner says, and no program can mend; with the way out."""
NO_FILES = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
"""Where a file is expected."""

COMMANDS = {
    "local": ("asyncrl.cli.local", "everything on this machine: replay server, rollout workers, learner"),
    "quickstart": ("asyncrl.cli.quickstart", "the same on a task that a CPU learns in a minute"),
    "replay": ("asyncrl.replay.__main__", "the replay server alone"),
    "shard": (
        "asyncrl.replay.shards.__main__",
        "one shard of the replay alone: its number, then settings",
    ),
    "rollout": ("asyncrl.rollout.__main__", "a pool of rollout workers alone"),
    "learner": ("asyncrl.learner.__main__", "one learner rank; several: launchers/learner.sh"),
}

SETTLED = (
    "keys", "audit", "settings", "metrics", "alarms", "doctor", "compare", "report", "watch", "trace", "retriever",
    "export",
)  # fmt: skip
"""Commands that take no settings."""
HELP = "settings, or a YAML file of them; `asyncrl settings` lists them"

KEYS_MADE = """\
keys in {}, one pair per role. Copy *.key to every machine of the run, and of the secrets only these:
  the replay server's machine      server.key_secret and shard.key_secret
  machines of shards, if any       shard.key_secret
  the learner's machines           learner.key_secret
  the rollout workers' machines    worker.key_secret
  who watches from afar            viewer.key_secret (with server.key and viewer.key alone): sees counts"""

EPILOG = """\
Settings are key=value, groups are chosen with group=name (files in configs/):
  asyncrl local model.path=DIR data.path=FILE.jsonl reward.function=FILE.py:NAME loss=ppo replay.max_staleness=2
`asyncrl settings` lists every setting with its meaning, `asyncrl settings staleness` those about staleness (also in
docs/settings.md). Settings can stand in a YAML file too: asyncrl local my.yaml learner.lr=2e-6; a run's own is
runs/NAME/config.yaml, which repeats it.
"""


PLAN_EPILOG = """\
  asyncrl plan --from runs/short gpus=64
  asyncrl plan experiment=NAME model.path=DIR data.path=FILE.jsonl gpus=64 cost.tokens_per_s=1:60,32:1500,256:6000 \\
      cost.length_mean=900 cost.train_tokens_per_s=20000 cost.sync_s=3
docs/planning.md says what each cost is.
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
    _add_training(commands)
    _add_looking(commands)
    _add_models_and_data(commands)
    return top


def _add_training(commands: Any) -> None:
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("overrides", nargs="*", metavar="key=value", help=HELP)
        command.add_argument("--dry-run", action="store_true", help="print the resolved plan and start nothing")
    text = "supervised fine-tuning on this machine, alone or before reinforcement learning"
    sft = commands.add_parser("sft", help=text, description=text)
    sft.add_argument("overrides", nargs="*", metavar="key=value", help="as `asyncrl settings --sft` lists them")
    sft.add_argument("--dry-run", action="store_true", help="rows, lengths, a row with its loss, and start nothing")


def _add_looking(commands: Any) -> None:
    text = "every setting with type, default, range and meaning"
    settings = commands.add_parser("settings", help=text, description=text)
    settings.add_argument("words", nargs="*", metavar="WORD", help="only those whose key or meaning has it")
    settings.add_argument("--sft", action="store_true", help="those of `asyncrl sft`")
    settings.add_argument(
        "--markdown", action="store_true", help="as the pages docs/settings.md and docs/sft_settings.md"
    )
    text = "what of this machine a run would stumble over. Exit code 0: nothing, 1: something will not work"
    doctor = commands.add_parser("doctor", help=text, description=text)
    doctor.add_argument("folder", nargs="?", type=Path, default=Path("."), metavar="DIR", help="for run folders")
    doctor.add_argument("--json", action="store_true", help="a list of objects instead of lines")
    text = "runs side by side: settings that differ, where their curves end, and whether seeds tell them apart"
    compare = commands.add_parser("compare", help=text, description=text)
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    compare.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    text = "how to divide GPUs between learner and rollouts, how deep, and what to expect: a simulation. Starts nothing"
    plan = commands.add_parser("plan", help=text, description=text, epilog=PLAN_EPILOG)
    plan.formatter_class = argparse.RawDescriptionHelpFormatter
    plan.add_argument("overrides", nargs="*", metavar="key=value", help=f"gpus=N, cost.NAME=VALUE; {HELP}")
    plan.add_argument("--from", dest="runs", action="append", type=Path, default=[], metavar="RUN",
                      help="measure the costs in this run; of several the engines' speed by batch too")  # fmt: skip
    plan.add_argument("--picture", type=Path, metavar="FILE", help="draw it: a .png, .svg or .pdf")
    plan.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    text = "a run that goes on: steps, evaluations, who is in it, who waits for whom since when, alarms, samples"
    watch = commands.add_parser("watch", help=text, description=text)
    watch.add_argument("run", metavar="RUN|ADDRESS", help="a run folder of this machine, or the replay server's "
                       "address (tcp://HOST:PORT): what it knows, with the viewer's key")  # fmt: skip
    watch.add_argument(
        "--keys", default="", metavar="DIR", help="of ADDRESS: server.key, viewer.key, viewer.key_secret"
    )
    text = "what every process of a run did when, as one file for Perfetto (telemetry.trace=true)"
    trace = commands.add_parser("trace", help=text, description=text)
    trace.add_argument("run", metavar="RUN", type=Path, help="a run folder, of a run that goes on too")
    trace.add_argument("--to", type=Path, metavar="FILE", help="trace.pftrace in the run folder unless given")
    trace.add_argument("--group", type=int, metavar="ID", help="instead print what happened to this group")
    trace.add_argument("--version", type=int, metavar="V", help="instead print what happened to this policy version")
    text = "runs side by side as one HTML file that needs no network: curves, tables, alarms, samples"
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    target = report.add_mutually_exclusive_group()
    target.add_argument("--to", type=Path, metavar="FILE", help="report.html of the first run unless given")
    target.add_argument("--serve", action="store_true",
                        help="serve it on loopback instead, at a secret address, current until Ctrl-C")  # fmt: skip
    text = "every alarm with what it means and what to do"
    alarms = commands.add_parser("alarms", help=text, description=text)
    alarms.add_argument("--markdown", action="store_true", help="as the page docs/alarms.md")
    text = "every metric with its unit, meaning and which way is better"
    metrics = commands.add_parser("metrics", help=text, description=text)
    metrics.add_argument("words", nargs="*", metavar="WORD", help="only those whose name or meaning has it")
    metrics.add_argument("--markdown", action="store_true", help="as the page docs/metrics.md")


def _add_models_and_data(commands: Any) -> None:
    text = "does every engine installed here serve this model as the learner computes it?"
    verify = commands.add_parser("verify", help=text, description=text)
    verify.add_argument("path", metavar="RUN|MODEL", help="a run folder, or a Hugging Face model")
    verify.add_argument("overrides", nargs="*", metavar="key=value", help="settings for a model: engine.*, seed")
    text = "a model on a dataset, alone: pass@k, majority votes, a table per data_source; goes on where it was stopped"
    evaluate = commands.add_parser("eval", help=text, description=text)
    evaluate.add_argument("path", metavar="MODEL|RUN", help="a Hugging Face model, or a run folder")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help=HELP)
    evaluate.add_argument("--dry-run", action="store_true", help="look at settings, data and reward, start nothing")
    text = "does the journal of a run balance? Exit code 0: yes, 1: no, 2: it cannot be read"
    audit = commands.add_parser("audit", help=text, description=text)
    audit.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    audit.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    text = "train the learner of a finished run again on its retained journal, as it was or with other settings"
    rerun = commands.add_parser("rerun", help=text, description=text)
    rerun.add_argument("run", metavar="RUN", type=Path, help="a run folder (replay.journal.retain=all)")
    rerun.add_argument("overrides", nargs="*", metavar="key=value", help="loss, advantage, learner.lr, ...")
    text = "a checkpoint of a run as a Hugging Face model, while it trains or after; on the CPU, alone"
    export = commands.add_parser("export", help=text, description=text)
    export.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    export.add_argument("--step", type=int, help="of ckpt/step_N; left out it is the newest that is whole")
    export.add_argument("--to", type=Path, metavar="DIR", help="RUN/exports/step_N/hf unless given")
    export.add_argument("--average", action="store_true", help="the averaged policy (learner.proximal_ema)")
    text = "make the keys of a run over a network, one pair per role (replay.keys=DIR)"
    keys = commands.add_parser("keys", help=text, description=text)
    keys.add_argument("directory", metavar="DIR", type=Path, help="a new folder")
    text = "the rows as a run would use them: filters, lengths, a rendered prompt, the reward of each row's own answer"
    data = commands.add_parser("data", help=text, description=text)
    data.add_argument("what", choices=("check",))
    data.add_argument("overrides", nargs="*", metavar="key=value", help=HELP)
    text = "a small retriever for environment=search: BM25 over a file of passages, on loopback"
    retriever = commands.add_parser("retriever", help=text, description=text)
    retriever.add_argument("corpus", metavar="CORPUS.jsonl", help="a passage per line: contents, or title and text")
    retriever.add_argument("--host", default="127.0.0.1", help="other than loopback lets others read the corpus")
    retriever.add_argument("--port", type=int, default=8000, help="0 is any that is free")
    text = "what the settings of verl or TRL are here, as a settings file, with what has no equivalent and why"
    migrate = commands.add_parser("migrate", help=text, description=text)
    migrate.add_argument("framework", choices=("verl", "trl"))
    migrate.add_argument("arguments", nargs=argparse.REMAINDER, metavar="key=value|FILE.yaml", help="as they take them")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Settings and `--dry-run` in any order, which argparse alone does not take."""
    top = parser()
    given, rest = top.parse_known_args(arguments)
    options = [text for text in rest if text.startswith("-")]
    if options or (rest and given.command in SETTLED):
        top.error(f"unrecognized arguments: {' '.join(options or rest)} (settings are key=value, without dashes)")
    if rest:
        given.overrides += rest
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the role; 2 with the reason when a setting was refused, 130 after Ctrl-C, 141 where `| head` had
    enough."""
    make_streams_plain()
    given = parse(arguments)
    try:
        code = run(given)
        if sys.stdout is not None:  # as with `>&-`
            sys.stdout.flush()  # here, or Python itself fails at it when all is over
        return code
    except AsyncRLError as error:
        print(f"asyncrl: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("asyncrl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno == errno.EPIPE and sys.stdout is not None and _unread(sys.stdout.fileno()):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to say goes nowhere
            if given.command in (*COMMANDS, "sft") and not _unread(2):  # as with `2>&1`
                print("asyncrl: ended, because nobody reads its output any more. Send it to a file", file=sys.stderr)
            return EXIT_UNREAD
        if error.errno in NO_FILES:
            print(f"asyncrl: {error}: this must be a file. Restore it from a copy, or move it away", file=sys.stderr)
            return EXIT_REFUSED
        if error.errno not in PLACES:
            raise
        print(f"asyncrl: {error}. {PLACES[error.errno]}", file=sys.stderr)
        return EXIT_REFUSED


def _unread(pipe: int) -> bool:
    """Whether its reader has gone."""
    look = select.poll()
    look.register(pipe, 0)
    return any(found & select.POLLERR for _, found in look.poll(0))


def run(given: argparse.Namespace) -> int:
    # By name, after parsing: a role loads torch or Ray, and `asyncrl --help` must not wait for either.
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
            f"{given.run} is a run of asyncrl sft: it has no journal to balance. Its checkpoints are proven "
            "when it resumes"
        )
    code, unreadable = load("asyncrl.replay.audit.report").main(given.run, as_json=given.json)
    return max(code, load("asyncrl.cli.starting.folder_check").tell(given.run, unreadable))


def _doctor(given: argparse.Namespace) -> int:
    if not given.folder.is_dir():
        raise RunFolderError(
            f"{given.folder} is not a folder on this machine. Give the one that run folders will be in"
        )
    return load("asyncrl.cli.doctor").main(given.folder, as_json=given.json)


def _watch(given: argparse.Namespace) -> int:
    if "://" in given.run:
        return load("asyncrl.cli.watch_address").main(given.run, given.keys)
    if given.keys:
        raise ConfigError(
            f"--keys belongs to the address of a run, but {given.run} is a folder. Leave one of the two out"
        )
    return load("asyncrl.cli.watch").main(Path(given.run))


def _report(given: argparse.Namespace) -> int:
    if given.serve:
        return load("asyncrl.cli.report_server").serve(given.runs)
    return load("asyncrl.cli.report").main(given.runs, given.to)


def _run_role(given: argparse.Namespace) -> int:
    """`data`, and those of COMMANDS."""
    given.overrides = load("asyncrl.cli.arguments.settings_file").with_files(given.overrides)
    if given.command == "local":
        given.overrides = load("asyncrl.cli.smoke").filled(given.overrides)
    if given.command == "data":
        return load("asyncrl.cli.data_check").main(given.overrides)
    if given.dry_run and given.command != "quickstart":
        return load("asyncrl.cli.dry_run.command").main(given.command, given.overrides)
    if given.command == "rollout" and not given.dry_run:
        load("asyncrl.cli.starting.preflight").check_rollout(given.overrides)
    role = load(COMMANDS[given.command][0])
    return role.plan(given.overrides) if given.dry_run else role.main(given.overrides)


WAYS: dict[str, Callable[[argparse.Namespace], int]] = {
    "keys": _make_keys,
    "audit": _audit,
    "doctor": _doctor,
    "watch": _watch,
    "report": _report,
    "verify": lambda given: load("asyncrl.cli.verify").main(given.path, given.overrides),
    "eval": lambda given: load("asyncrl.cli.eval").main(given.path, given.overrides, dry_run=given.dry_run),
    "export": lambda given: load("asyncrl.cli.export").main(given.run, given.step, given.to, average=given.average),
    "retriever": lambda given: load("asyncrl.environments.search.server").serve(given.corpus, given.host, given.port),
    "migrate": lambda given: load("asyncrl.cli.migrate.command").main(given.framework, given.arguments),
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
"""Of the commands that start no role of a run."""


RUNS = "runs"
"""Where the folders of runs are unless `run.dir` says otherwise."""


def refuse_missing(path: str) -> None:
    """`org/name` may be a name on the hub. What is a folder here, or by all signs was meant as one, is not looked for
    there: a run that is missing would be an error of the network.

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
    print(f"{path} is not a folder here: taken for a name on the Hugging Face hub", file=sys.stderr)
