"""The arguments of the command `asyncrl`, and the texts of `--help`. Does not import the commands."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl import __version__
from asyncrl.checks.hints import NO_SWEEP

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Train": {
        "quickstart": "train a tiny model on this machine; a CPU needs about a minute",
        "local": "train on this machine: replay server, rollout workers and learner",
        "sft": "supervised fine-tuning on this machine, by itself or before reinforcement learning",
    },
    "Train on several machines, one role each (docs/cluster.md)": {
        "replay": "start the replay server",
        "rollout": "start a pool of rollout workers",
        "learner": "start one learner rank; launchers/learner.sh starts several",
        "keys": "make the keys that protect a run over a network",
    },
    "Before a run": {
        "settings": "list settings with type, default, range and meaning",
        "doctor": "check this machine for what would make a run fail",
        "data": "check rows, prompts and rewards as a run would use them",
        "plan": "simulate how to divide GPUs between learner and rollouts",
        "retriever": "serve a small search engine for environment=search",
    },
    "Look at runs": {
        "watch": "show a run in progress: steps, processes, who waits for whom, alarms, samples",
        "report": "write runs side by side into one HTML file: curves, tables, alarms, samples",
        "compare": "print runs side by side: settings that differ, final metrics, differences between seeds",
        "trace": "show what every process of a run did when, as a file for Perfetto",
        "metrics": "list metrics with unit and meaning",
        "alarms": "list alarms with meaning and advice",
    },
    "Use and check the results": {
        "eval": "evaluate a model or a run on a dataset: pass@k, majority votes, intervals",
        "export": "write a checkpoint of a run as a Hugging Face model",
        "audit": "check from the journal of a run that every group is accounted for",
        "rerun": "train a run's learner again on its recorded data, with the same or other settings",
        "verify": "check that the engines installed here compute what the learner computes",
    },
}
"""Every command with its line in `asyncrl --help`, grouped by purpose."""

ROLES = ("local", "quickstart", "replay", "rollout", "learner")
WIDTH = 80
HELP = "settings, or YAML files with settings; later ones override earlier ones. `asyncrl settings` lists them"

EPILOG = """\
Settings are key=value; group=name chooses a file of configs/:
  asyncrl local model.path=DIR data.path=FILE.jsonl reward.function=FILE.py:NAME loss=ppo replay.max_staleness=2
They can also be in YAML files: asyncrl local my.yaml learner.lr=2e-6. runs/NAME/config.yaml repeats a run.
`asyncrl settings` lists all settings, `asyncrl settings staleness` those about staleness (also in docs/settings.md).
`asyncrl COMMAND --help` says more about a command. A refused setting gives exit code 2, with what to do.
"""

DESCRIPTIONS = {
    "quickstart": "Train a tiny model, made here, on a task that a CPU learns in about a minute, with the whole "
    "system: replay server, rollout workers and learner. experiment=NAME takes another of its tasks or methods.",
    "local": "Train on this machine: start replay server, rollout workers and learner, restart what dies, and show "
    "the progress. Ctrl-C saves a checkpoint; resume=auto continues from it.",
    "sft": "Supervised fine-tuning on this machine, on conversations or on prompts with completions. The exported "
    "model is RUN/hf.",
    "replay": "Start the replay server, which admits, stores and hands out groups, on this machine.",
    "rollout": "Start a pool of rollout workers. It may join a run that is already going on, and leave it by Ctrl-C.",
    "learner": "Start one rank of the learner. launchers/learner.sh starts several, on one machine or more.",
    "keys": "Make a folder of keys, one pair per role, for replay.keys=DIR, and say which files go to which machine.",
    "settings": "List settings with type, default, range and meaning: all of them, or those that have every WORD.",
    "doctor": "Check packages, GPUs, memory, disk, ports, host name and clock of this machine. Exit code 0 if a run "
    "would work, 1 if something will not.",
    "data": "Show the rows as a run would use them: what filters leave, lengths, a rendered prompt, and whether the "
    "reward recognises each row's own answer (exit code 1 if not).",
    "plan": "Simulate runs to find how to divide GPUs between learner and rollouts, how far rollouts should run ahead, "
    "and what to expect. Starts nothing.",
    "retriever": "Serve BM25 search over a file of passages, for environment=search.",
    "watch": "Show a run in progress: steps, evaluations, its processes, who waits for whom since when, alarms, "
    "samples. Of a run that has ended it shows how it ended.",
    "report": "Write runs side by side into one HTML file that needs no network: curves, tables, alarms, samples.",
    "compare": "Print runs side by side: settings that differ, where metrics ended, and between settings with several "
    "seeds, how likely chance explains the difference.",
    "trace": "Write what every process of a run did when into one file for Perfetto (https://ui.perfetto.dev). The run "
    "needs telemetry.trace=true.",
    "metrics": "List metrics with unit, meaning and which way is better: all of them, or those that have every WORD.",
    "alarms": "List alarms: what each means and what to do about it.",
    "eval": "Evaluate a model, or the exported model of a run, on a dataset: pass@k, majority votes, 95 % intervals, a "
    "row per data_source. The same command continues where it was stopped.",
    "export": "Write a checkpoint of a run as a Hugging Face model, during the run or after it. Needs no GPU.",
    "audit": "Check from a run's journal that every group is accounted for, none was trained too often and no token "
    "was over the bound, and that the files of the run agree. Exit code 0 if so, 1 if not, 2 if a file cannot be read.",
    "rerun": "Train the learner of a run again on its recorded data: bit for bit as it was (on CPUs), or with another "
    "loss, advantage, learning rate or staleness bound. Writes RUN/rerun-NAME/.",
    "verify": "Compare the log-probs of every engine installed here with the learner's, for one model. Exit "
    "code 1 if one disagrees.",
}  # fmt: skip

EXAMPLES = {
    "quickstart": "asyncrl quickstart\nasyncrl quickstart experiment=ppo_gae engine=vllm",
    "local": "asyncrl local model.path=DIR data.path=my.jsonl reward.function=my_reward.py:score --dry-run\n"
    "asyncrl local experiment=smoke/gsm8k_grpo",
    "sft": "asyncrl sft model.path=DIR data.path=chats.jsonl learner.epochs=2",
    "settings": "asyncrl settings staleness\nasyncrl settings --sft overlong",
    "data": "asyncrl data check model.path=DIR data.path=my.jsonl reward.function=my_reward.py:score",
    "plan": "asyncrl plan experiment=gsm8k_grpo gpus=64\n"
    "asyncrl plan model=7b rollout.max_new_tokens=4096 cost.length_mean=1500 gpus=64\n"
    "asyncrl plan --from runs/short gpus=64\n"
    "asyncrl plan experiment=NAME model.path=DIR data.path=FILE.jsonl gpus=64 \\\n"
    "    cost.tokens_per_s=1:60,32:1500,256:6000 cost.length_mean=900 cost.train_tokens_per_s=20000 cost.sync_s=3\n"
    "docs/planning.md explains each cost.",
    "eval": "asyncrl eval runs/first eval.samples=8 eval.temperature=1\n"
    "asyncrl eval MODEL data.path=heldout.jsonl reward.function=my_reward.py:score",
    "rerun": "asyncrl rerun runs/first\nasyncrl rerun runs/first loss=ppo",
    "verify": "asyncrl verify runs/first\nasyncrl verify MODEL engine.max_model_len=4096",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    lines = [f"{title}:\n" + "\n".join(f"  {name:<12}{text}" for name, text in of_it.items())
             for title, of_it in GROUPS.items()]  # fmt: skip
    top = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous reinforcement learning of language models.\n\n" + "\n\n".join(lines),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", help="one of those above")
    _add_training(commands)
    _add_preparing(commands)
    _add_looking(commands)
    _add_results(commands)
    return top


def _add(commands: Any, name: str, usage: str | None = None) -> argparse.ArgumentParser:
    examples = EXAMPLES.get(name)
    return commands.add_parser(
        name,
        usage=usage,
        description=textwrap.fill(DESCRIPTIONS[name], WIDTH),
        epilog=examples and "examples:\n" + textwrap.indent(examples, "  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_training(commands: Any) -> None:
    for name in ROLES:
        command = _add(commands, name)
        command.add_argument("overrides", nargs="*", metavar="key=value", help=HELP)
        command.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    sft = _add(commands, "sft")
    sft.add_argument("overrides", nargs="*", metavar="key=value", help=HELP.replace("settings`", "settings --sft`"))
    sft.add_argument(
        "--dry-run", action="store_true", help="check everything, print the plan and a row with its loss, start nothing"
    )
    keys = _add(commands, "keys")
    keys.add_argument("directory", metavar="DIR", type=Path, help="a folder that does not exist yet")


def _add_preparing(commands: Any) -> None:
    settings = _add(commands, "settings")
    settings.add_argument("words", nargs="*", metavar="WORD", help="in the name or the meaning of a setting")
    settings.add_argument("--sft", action="store_true", help="the settings of `asyncrl sft`")
    settings.add_argument(
        "--markdown", action="store_true", help="print the page docs/settings.md (docs/sft_settings.md)"
    )
    doctor = _add(commands, "doctor")
    doctor.add_argument("folder", nargs="?", type=Path, default=Path("."), metavar="DIR",
                        help="where run folders will be; by default this folder")  # fmt: skip
    doctor.add_argument("--json", action="store_true", help="print JSON, an object per check, instead of lines")
    data = _add(commands, "data")
    data.add_argument("what", choices=("check",), help="the only choice")
    data.add_argument("overrides", nargs="*", metavar="key=value", help=HELP)
    plan = _add(commands, "plan")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help=f"gpus=N, cost.NAME=VALUE; {HELP}")
    plan.add_argument("--from", dest="runs", action="append", type=Path, default=[], metavar="RUN",
                      help="measure costs in this run; may be given several times, which is more exact")  # fmt: skip
    plan.add_argument("--picture", type=Path, metavar="FILE", help="also draw the plan into a .png, .svg or .pdf")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    retriever = _add(commands, "retriever")
    retriever.add_argument(
        "corpus", metavar="CORPUS.jsonl", help="a passage per line: `contents`, or `title` and `text`"
    )
    retriever.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1); any other lets the "
                           "network read the corpus")  # fmt: skip
    retriever.add_argument("--port", type=int, default=8000, help="port to listen on (8000); 0 takes any that is free")


def _add_looking(commands: Any) -> None:
    watch = _add(commands, "watch")
    watch.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    report = _add(commands, "report")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    report.add_argument(
        "--to", type=Path, metavar="FILE", help="where to write it; by default report.html in the first run"
    )
    compare = _add(commands, "compare")
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    compare.add_argument("--json", action="store_true", help="print JSON instead of tables")
    trace = _add(commands, "trace")
    trace.add_argument("run", metavar="RUN", type=Path, help="a run folder; the run may still be going on")
    trace.add_argument(
        "--to", type=Path, metavar="FILE", help="where to write it; by default trace.json in the run folder"
    )
    trace.add_argument("--group", type=int, metavar="ID", help="print what happened to this group instead")
    trace.add_argument("--version", type=int, metavar="V", help="print what happened to this policy version instead")
    metrics = _add(commands, "metrics")
    metrics.add_argument("words", nargs="*", metavar="WORD", help="in the name or the meaning of a metric")
    metrics.add_argument("--markdown", action="store_true", help="print the page docs/metrics.md")
    alarms = _add(commands, "alarms")
    alarms.add_argument("--markdown", action="store_true", help="print the page docs/alarms.md")


def _add_results(commands: Any) -> None:
    evaluate = _add(commands, "eval")
    evaluate.add_argument("path", metavar="MODEL|RUN", help="a Hugging Face model (folder or hub name), or a run "
                          "folder, whose settings are then the defaults")  # fmt: skip
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help=HELP)
    evaluate.add_argument("--dry-run", action="store_true", help="check settings, data and reward, start nothing")
    export = _add(commands, "export")
    export.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    export.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step; by default the newest whole one"
    )
    export.add_argument("--to", type=Path, metavar="DIR", help="where to write it; by default RUN/exports/step_N/hf")
    export.add_argument("--average", action="store_true", help="write the averaged policy (learner.proximal_ema)")
    audit = _add(commands, "audit")
    audit.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    audit.add_argument("--json", action="store_true", help="print JSON instead of a table")
    rerun = _add(commands, "rerun")
    rerun.add_argument("run", metavar="RUN", type=Path, help="a run folder; the run needs replay.journal.retain=all")
    rerun.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings to change: loss=NAME, learner.lr=..., ..."
    )
    verify = _add(commands, "verify")
    verify.add_argument("path", metavar="RUN|MODEL", help="a run folder, or a Hugging Face model (folder or hub name)")
    verify.add_argument("overrides", nargs="*", metavar="key=value", help="with MODEL: seed, and settings of engine.*")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments, with settings and `--dry-run` in any order, which argparse alone does not support."""
    top = parser()
    given, rest = top.parse_known_args(arguments)
    options = [text for text in rest if text.startswith("-")]
    if options or (rest and not hasattr(given, "overrides")):
        why = NO_SWEEP if {"-m", "--multirun"} & set(options) else "settings are key=value, without dashes"
        top.error(f"unrecognized arguments: {' '.join(options or rest)} ({why})")
    if rest:
        given.overrides += rest
    return given
