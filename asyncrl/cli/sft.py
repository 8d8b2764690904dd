"""`asyncrl sft [my.yaml] model.path=DIR data.path=FILE key=value ...`: supervised fine-tuning on this machine.

consumes:     exit code of torchrun; rows of metrics.jsonl, to show them
waits for:    torchrun, whose end is the end of the run
unblocked by: its end, Ctrl-C, SIGTERM or SIGHUP; if torchrun was killed it is restarted and resumes
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from asyncrl.chat.turn_end import described
from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.placement import kind_to_plan
from asyncrl.cli.arguments.settings_file import with_files
from asyncrl.cli.lengths import histogram
from asyncrl.cli.processes.commands import learner_command, with_absolute_run_dir
from asyncrl.cli.processes.ending import Ended, best_line, how_to_go_on, resumed_from
from asyncrl.cli.processes.supervision import supervise
from asyncrl.cli.starting.preflight import refuse_unmeasured
from asyncrl.cli.starting.resuming import nothing_to_do
from asyncrl.memory.fit import fitting_lines, refuse_unfit
from asyncrl.memory.model_size import sizes_of
from asyncrl.memory.usage import learner_memory
from asyncrl.plain_text import plain
from asyncrl.schema import Config
from asyncrl.sft.batches import Course, draws_before
from asyncrl.sft.examples import Encoder, open_encoder
from asyncrl.sft.look import Looked, lines, look, runs
from asyncrl.sft.rules import check_sft_machine, load_sft
from asyncrl.sft.settings import SftConfig, learner_config
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, EXPORT_DIR, proven, trained_in, trained_steps
from asyncrl.telemetry.folder.resumed import load_as_begun
from asyncrl.telemetry.folder.run_folder import (
    changes_in,
    note_steps,
    prepare_run_folder,
    refuse_used_folder,
    said_of_gone,
)
from asyncrl.telemetry.folder.tenants import occupied
from asyncrl.telemetry.live.console import PlainConsole, say
from asyncrl.telemetry.reports.summary import read_metrics, summary

MODULE = "asyncrl.sft"
SHOWN_TOKENS = 600
"""Limit on the tokens shown of the first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is determined before training starts."""

    given: SftConfig
    overrides: list[str]
    encoder: Encoder
    looked: list[Looked]
    course: Course
    begun: Path | None
    """Checkpoint that the run resumes from; None to start from step 0."""


def main(arguments: Sequence[str], *, dry_run: bool = False) -> int:
    """Fine-tune, or with `dry_run` print the plan.

    Returns:
        Exit code: 0; 1 if training failed; 128 + the number of the signal that stopped it.

    Raises:
        ConfigError: a setting or this machine was refused. DataError: a row was refused. RunFolderError: the folder is
            in use.
    """
    given, overrides = load_as_begun(load_sft, with_files(arguments, SftConfig))
    check_sft_machine(given, alone=True)
    refuse_unmeasured(given.learner.keep_best)
    refuse_used_folder(given)
    changes = changes_in(given)
    encoder = open_encoder(given)
    looked = look(given, encoder)
    by, rows = given.learner, sum(each.rows for each in looked[: len(looked) - bool(given.eval.path)])
    console = PlainConsole(highlight=False, soft_wrap=True)
    begun = proven(Path(given.run.dir).resolve(), given.resume, lambda note: say(console, note))
    at = {"step": trained_steps(begun), "draw": draws_before(begun)}
    course = Course.of(rows, by.rows_per_step, by.epochs, by.steps, **at)
    plan = Plan(given=given, overrides=overrides, encoder=encoder, looked=looked, course=course, begun=begun)
    chat = encoder.chat
    end = described(chat.stop_token_ids, chat.stop_texts, chat.decode)
    say(console, *lines(looked, given), end, *(f"this resume changes {change}" for change in changes))
    if dry_run:
        show(plan, console)
        return 0
    say(console, *refuse_unfit(learner_config(given), "learner"))
    with occupied(given):
        return _run(plan, console, ["asyncrl", "sft", *arguments])


def show(plan: Plan, console: PlainConsole) -> None:
    """Print for `--dry-run`: lengths, the first row with the parts that carry loss, and what would be started."""
    given, config = plan.given, learner_config(plan.given)
    by, course, longest = given.learner, plan.course, given.data.max_tokens
    tokens = [count for each in plan.looked for count in each.tokens]
    say(console, *histogram(tokens, longest, of="rows", key="data.max_tokens"))
    console.print(rendered(plan.looked[0], plan.encoder))
    say(
        console,
        f"{course.steps} steps of {by.rows_per_step} rows ({course.draws:,} rows, {course.draws / course.rows:g} "
        f"epochs), at most {by.rows_per_step * longest:,} tokens a step, in micro-batches of "
        f"{by.max_tokens_per_microbatch:,}",
        f"learner.lr={by.lr:g}, {by.schedule}, {by.warmup_steps} steps of warm-up; checkpoints every {by.save_every} "
        f"steps in {Path(given.run.dir) / CHECKPOINT_DIR}, the model in {Path(given.run.dir) / EXPORT_DIR} at the end",
        *memory_of(config),
        str(learner_command(config, plan.overrides, "RUN-ID", MODULE)),
        "dry run: nothing was started",
    )


def memory_of(config: Config) -> list[str]:
    """Estimate the memory of a rank, and say whether it fits its GPU. `auto` is resolved for the GPUs that are here."""
    config = with_dtypes(config, learner=kind_to_plan(config, config.learner.device))
    model = sizes_of(config)
    return [*learner_memory(config, model), *fitting_lines(config, model, "sft")]


def rendered(looked: Looked, encoder: Encoder) -> Text:
    """Render the first row: tokens without loss are dim, tokens with loss are green between marks."""
    text = Text(f"the first row ({plain(looked.first_at)}); dim is given, green between ▶ and ◀ carries loss:\n")
    left = SHOWN_TOKENS
    for ids, learned in runs(looked.first):
        said = plain(encoder.decode(ids[:left], begins=left == SHOWN_TOKENS))
        text.append(f"▶{said}◀" if learned else said, style="bold green" if learned else "dim")
        left -= len(ids)
        if left <= 0:
            return text.append(" ...")
    return text


def _run(plan: Plan, console: PlainConsole, typed: Sequence[str]) -> int:
    given, run_id = plan.given, uuid.uuid4().hex[:12]
    folder = Path(given.run.dir).resolve()
    resumed = plan.course.first_step
    if resumed >= plan.course.steps and trained_in(folder / EXPORT_DIR) == resumed:
        # `learner.steps` takes precedence over `learner.epochs`, also if a settings file gives it.
        longer = (
            f"learner.steps={2 * resumed}" if given.learner.steps else f"learner.epochs={2 * given.learner.epochs:g}"
        )
        say(console, nothing_to_do(folder, f"{resumed} steps are trained", typed, longer))
        return 0
    prepare_run_folder(given, run_id, overrides=plan.overrides, begins=plan.begun)
    note_steps(given, plan.course.steps)
    config = learner_config(given)
    # The folder is prepared only once, here (so no `overwrite`): restarted ranks must find what they saved.
    kept = [text for text in with_absolute_run_dir(config, plan.overrides) if not text.startswith("overwrite=")]
    command = learner_command(config, kept, run_id, MODULE)
    say(console, f"  {command}")
    if given.resume != "never":
        say(console, resumed_from(resumed))
    ended = supervise([command], folder, plan.course.steps, console, resumed=resumed)
    if gone := said_of_gone(run_id, folder):
        say(console, gone)
    else:
        tell(given, folder, console, typed, ended)
    return ended.code


def tell(given: SftConfig, folder: Path, console: PlainConsole, typed: Sequence[str], ended: Ended) -> None:
    """Print the result, and the command to run next."""
    rows = read_metrics(folder)
    said = [f"\n{summary(rows)}", f"run folder: {folder}"]
    if given.learner.keep_best:
        said.append(best_line(given.learner.keep_best, folder, rows))
    if ended.code:
        said.append(how_to_go_on(folder, typed, ended))
    else:
        said += [
            "now try:",
            f"  asyncrl local model.path={folder / EXPORT_DIR} data.path=FILE reward.function=FILE.py:NAME",
        ]
    say(console, *said)
