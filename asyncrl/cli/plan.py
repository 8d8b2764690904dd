"""`asyncrl plan`: finds the numbers of learner ranks and rollout engines and the pipeline depth, and predicts the
throughput."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Column, Table

from asyncrl.checks.dtypes import recomputed_on, with_dtypes
from asyncrl.checks.machine import check_machine
from asyncrl.checks.parallel import ranks_step
from asyncrl.checks.placement import gpus_of_rewards, placement_of, visible_gpus
from asyncrl.checks.rules.whole import check_config
from asyncrl.cli.arguments.output_file import refuse_no_place
from asyncrl.cli.arguments.settings_file import with_files
from asyncrl.collector import load
from asyncrl.config import config_dir, load_config
from asyncrl.errors import ConfigError, RunFolderError
from asyncrl.memory.fit import PLANNED_GB, taken
from asyncrl.memory.model_size import ModelSize, sizes_of
from asyncrl.memory.nominal import billions_in, billions_of, header_settings, nominal_model
from asyncrl.memory.usage import engine_bytes, size
from asyncrl.placement import WHOLE_SHARE
from asyncrl.planner.calibration import RunMeasured, calibrate, engines_told, read_run
from asyncrl.planner.costs import Costs
from asyncrl.planner.estimated import Workload, assumed, estimated_costs
from asyncrl.planner.given import Given
from asyncrl.planner.search import Effort, Plan, Search, Split, Tried
from asyncrl.planner.simulation import Setup
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.rollout.worker.concurrency import slots_per_worker
from asyncrl.schema import Config
from asyncrl.telemetry.folder.resumed import is_supervised, settings_file
from asyncrl.telemetry.live.console import PlainConsole
from asyncrl.telemetry.reports.summary import read_metrics

GPUS, COST = "gpus", "cost."
PICTURES = (".png", ".svg", ".pdf")
LEARNERS = 24
"""Limit on the different numbers of learner ranks that are tried."""
MANY = 3000
"""Number of sequences in a step above which fewer steps are simulated."""


def main(arguments: Sequence[str], runs: Sequence[Path], picture: Path | None, *, as_json: bool) -> int:
    """Raises ConfigError, RunFolderError."""
    size_given, arguments = size_in(arguments)
    _, given, overrides = sorted_out(arguments)
    planned_for = None if runs else nominal_of(overrides, size_given)
    arguments = planned_for.filled(arguments) if planned_for else arguments
    gpus, given, overrides = sorted_out(arguments)
    if picture is not None:
        refuse_no_place("--picture", picture, PICTURES)
    for run in runs:
        settings_file(run)  # refuses another folder
        if is_supervised(run):
            raise RunFolderError(f"{run} is a run of asyncrl sft, which has no rollouts. Give a run of asyncrl local")
    if runs:
        overrides = [str(settings_file(runs[0])), *overrides]
    config = read_settings(overrides)
    if config.replay.admission != "group":
        raise ConfigError(
            f"replay.admission={config.replay.admission} cannot be simulated: the planner admits whole groups. Plan "
            "with replay.admission=group"
        )
    gpus = gpus or config.placement.gpus or len(visible_gpus() or ())
    if planned_for:
        given = Given.of(planned_for.costs(config, given))
    costs = given.costs(config.rollout.max_new_tokens, measured=bool(runs))
    if runs:
        costs = measured_costs(runs, costs, given)
    if planned_for and not as_json:
        print("\n".join(planned_for.lines), flush=True)
    model = planned_for and planned_for.model
    splits = feasible(config, gpus, given.gpu_gb or (PLANNED_GB if model else 0.0), model)
    here = planned_for is None
    # Before the simulations: settings that cannot start with any split are refused.
    command_of(overrides, splits[0], gpus, here=here)
    # An estimate needs no more steps.
    many = planned_for is not None or config.learner.groups_per_step * config.rollout.group_size > MANY
    effort = Effort(steps=24, warm_up=6, splits=2) if many else Effort(steps=40, warm_up=10, splits=3)
    search = Search(setup_of(config), costs, lambda most, engines: slots_of(config, most, engines), effort)
    plan = search.plan(splits)
    start = command_of(overrides, plan.best.split, gpus, plan.best.pipeline_depth, plan.best.max_in_flight, here=here)
    if picture is not None:
        load("asyncrl.planner.picture").plot_plan(plan, picture, f"{gpus} GPUs")
    if as_json:
        print(json.dumps(as_object(plan, gpus, start), indent=1))
        return 0
    console = PlainConsole(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(cost_line(costs))
    for table in (splits_table(plan), depths_table(plan), sensitivity_table(plan)):
        console.print_whole(table)
    for line in (*said_of(plan.best, gpus), *left_over(config, plan.best.split, gpus)):
        console.print(line)
    console.print(f"start it:  {start}")
    if picture is not None:
        console.print(f"picture: {picture}")
    return 0


def size_in(arguments: Sequence[str]) -> tuple[float, list[str]]:
    """Separate `model=7b`, the size of a model in billions of parameters, from the rest; 0 if it is not given."""
    found, rest = 0.0, list[str]()
    for text in arguments:
        key, _, value = text.partition("=")
        billions = billions_of(value) if key == "model" else None
        if billions is None:
            rest.append(text)
        else:
            found = billions
    return found, rest


@dataclass(slots=True)
class PlannedFor:
    """A plan for a model that is not on this machine."""

    model: ModelSize
    settings: dict[str, str]
    """Settings that were not given, from the head of the recipe, or names that stand for files."""
    lines: list[str] = field(default_factory=list)

    def filled(self, arguments: Sequence[str]) -> list[str]:
        return [*arguments, *(f"{key}={value}" for key, value in self.settings.items())]

    def costs(self, config: Config, given: Given) -> dict[str, str]:
        """Return the costs as they would be given: estimated, except those that are given."""
        length = given.length_mean or config.rollout.max_new_tokens / 2
        work = Workload(
            parameters=self.model.parameters,
            kv_values_per_token=self.model.kv_values_per_token,
            length=length,
            prompt=config.data.max_prompt_tokens / 2,
            tensor_parallel=config.engine.tensor_parallel,
            recomputed=recomputed_on(config.model.activation_checkpointing, "cuda"),
        )
        self.lines.append(assumed(work, given=bool(given.length_mean)))
        self.lines.append("not looked at: data, reward and model, which need not be here. --dry-run looks at them")
        return estimated_costs(work) | given.as_texts()


def nominal_of(overrides: Sequence[str], billions: float) -> PlannedFor | None:
    """Return what to plan for if the model is not here: of the given size, or that in the name of the recipe's model.
    None if the model is a folder here, or of unknown size."""
    given = {key: value for key, _, value in (text.partition("=") for text in overrides if "=" in text)}
    recipe = config_dir() / "experiment" / f"{given.get('experiment', '')}.yaml"
    settings = header_settings(recipe) if recipe.is_file() else {}
    path = given.get("model.path") or settings.get("model.path", "")
    billions = billions or ((billions_in(path) or 0.0) if not Path(path).is_dir() else 0.0)
    if not billions:
        return None
    layout = ("learner.ranks", "rollout.workers")  # which the plan decides
    needed = {"model.path": f"MODEL-{billions:g}B", "data.path": "DATA.jsonl", **settings}
    filled = {key: value for key, value in needed.items() if key not in given and key not in layout}
    if any(key.startswith("data.mixture") for key in (*given, *filled)):
        filled.pop("data.path", None)
    if not any(key in given for key in ("experiment", "reward", "reward.function", "reward.functions")):
        filled["reward.function"] = "REWARD.py:NAME"
    return PlannedFor(nominal_model(billions), filled)


def sorted_out(arguments: Sequence[str]) -> tuple[int, Given, list[str]]:
    """Separate `gpus=`, `cost.*=` and the settings. Raises ConfigError."""
    gpus, costs, settings = 0, dict[str, str](), list[str]()
    for text in arguments:
        key, equals, value = text.partition("=")
        if key == GPUS and equals:
            if not value.isdecimal() or int(value) < 2:
                raise ConfigError(f"gpus={value}: the planner divides 2 or more GPUs. Give gpus=2 or more")
            gpus = int(value)
        elif key.startswith(COST):
            costs[key.removeprefix(COST)] = value
        else:
            settings.append(text)
    return gpus, Given.of(costs), settings


def read_settings(overrides: Sequence[str]) -> Config:
    # Without one of these, a message would name the folder in which a run is repeated, but none is.
    known = any(text.startswith(("resume=", "overwrite=")) for text in overrides)
    return load_config(with_files([*overrides, *([] if known else ["overwrite=true"])]))


def setup_of(config: Config) -> Setup:
    """Return the simulated setup of these settings."""
    return Setup(
        settings=AdmissionSettings.from_config(config),
        engines=config.rollout.workers,
        slots=slots_per_worker(config),
        max_sequences=config.engine.max_sequences,
        ranks=config.learner.ranks,
    )


def slots_of(config: Config, in_flight: int, engines: int) -> int:
    return slots_per_worker(replace(config, rollout=replace(config.rollout, max_in_flight=in_flight, workers=engines)))


def measured_costs(folders: Sequence[Path], costs: Costs, given: Given) -> Costs:
    """Return the costs measured in these runs; costs given by the user take precedence."""
    runs = [run_of(folder) for folder in folders]
    if not (engines_told(runs) or given.tokens_per_s):
        print(
            "note: these runs have no records of their engines' steps (the built-in engine and vLLM write them, in "
            "this version). The duration of a step is therefore fitted to the throughput and is less certain",
            file=sys.stderr,
        )
    found = calibrate(runs, costs)
    if given.tokens_per_s:
        found = replace(found, decode=costs.decode)
    if given.length_mean:
        found = replace(found, lengths=costs.lengths)
    if given.train_tokens_per_s or costs.step_s:
        found = replace(found, step_s=costs.step_s, token_s=costs.token_s, step_sigma=costs.step_sigma)
    return replace(found, sync_s=costs.sync_s or found.sync_s, stall_s=costs.stall_s or found.stall_s)


def run_of(folder: Path) -> RunMeasured:
    """Raises RunFolderError."""
    config = read_settings([str(settings_file(folder))])
    rows = [dict(row) for row in read_metrics(folder)]
    return read_run(folder, setup_of(config), rows)


def feasible(config: Config, gpus: int, gpu_gb: float, known: ModelSize | None = None) -> list[Split]:
    """Return the splits that `--dry-run` would accept.

    Args:
        gpu_gb: memory of a GPU in GB; 0 checks nothing.
        known: size of the model, if it is not on this machine.

    Raises:
        ConfigError: there is none; the message has the problem of the last one tried.
    """
    if gpus < 2:
        raise ConfigError("the number of GPUs is missing. Give it, for example gpus=64")
    learner, width = config.learner, config.engine.tensor_parallel
    unit = ranks_step(learner)
    config = with_dtypes(config, learner="cuda", engine="cuda")
    model = known or (sizes_of(config) if gpu_gb else None)
    if gpu_gb and model is None:
        raise ConfigError(
            f"cost.gpu_gb={gpu_gb:g} needs the size of the model, and model.path={config.model.path} is not a local "
            "folder of safetensors. Leave the cost out, or give a folder"
        )
    sequences = learner.groups_per_step * config.rollout.group_size // learner.updates_per_batch
    useful = max(unit, sequences * learner.sequence_parallel * learner.tensor_parallel)
    most = min(gpus - width, useful) // unit
    step = max(1, most // LEARNERS)
    found, problem = list[Split](), f"{gpus} GPUs are too few for one engine and one learner"
    for ranks in sorted({unit, *range(unit * step, unit * most + 1, unit * step)} if most > 0 else ()):
        engines = min((gpus - ranks - gpus_of_rewards(config)) // width, most_groups(config))
        tried = with_split(config, ranks, engines, gpus)
        problem = why_not(tried, gpus, model, gpu_gb)
        if not problem:
            found.append(Split(ranks=ranks, engines=tried.rollout.workers))
    if not found:
        raise ConfigError(f"no split of {gpus} GPUs can be started: {problem}")
    return found


def most_groups(config: Config) -> int:
    """Return the maximum number of groups in flight at the largest depth; more engines would have no work."""
    return (1 + config.replay.max_staleness) * config.learner.groups_per_step


def left_over(config: Config, split: Split, gpus: int) -> list[str]:
    """Return a message if there are more GPUs than work."""
    idle = gpus - split.ranks - split.engines * config.engine.tensor_parallel - gpus_of_rewards(config)
    if split.engines < most_groups(config) or idle < config.engine.tensor_parallel:
        return []
    return [
        f"{idle} GPUs would be unused: at most {split.engines} groups are in flight, (1 + "
        f"replay.max_staleness={config.replay.max_staleness}) * "
        f"learner.groups_per_step={config.learner.groups_per_step}, and each is made by one engine. Raise "
        "learner.groups_per_step, or use fewer GPUs"
    ]


def with_split(config: Config, ranks: int, engines: int, gpus: int) -> Config:
    return replace(
        config,
        learner=replace(config.learner, ranks=ranks),
        rollout=replace(config.rollout, workers=engines),
        placement=replace(config.placement, gpus=gpus),
    )


def why_not(config: Config, gpus: int, model: ModelSize | None, gpu_gb: float) -> str:
    """Return the problem of a split; empty if there is none."""
    if config.rollout.workers < 1:
        return f"learner.ranks={config.learner.ranks} leaves no GPU for an engine"
    try:
        check_config(config)
        placement = placement_of(config, gpus)
    except ConfigError as error:
        return str(error)
    room = WHOLE_SHARE * gpu_gb * 1e9
    held = 0.0 if model is None else taken(config, model, int(room))
    if held > room:
        return f"with learner.ranks={config.learner.ranks} a rank needs {size(held)} but has {size(room)}"
    each = 0.0 if model is None else engine_bytes(config, model) / config.engine.tensor_parallel
    if each > placement.engine_memory * gpu_gb * 1e9:
        return f"an engine needs {size(each)} per GPU but has {size(placement.engine_memory * gpu_gb * 1e9)}"
    return ""


def command_of(
    overrides: Sequence[str], split: Split, gpus: int, depth: int = 0, in_flight: int = 0, *, here: bool = True
) -> str:
    """Return the command that starts a split; `in_flight=0` leaves depth and groups in flight to the settings.

    Args:
        here: whether model and data are on this machine, and looked at.

    Raises:
        ConfigError: it could not be started.
    """
    found = [*overrides, f"placement.gpus={gpus}", f"learner.ranks={split.ranks}", f"rollout.workers={split.engines}"]
    found += [f"replay.pipeline_depth={depth}", f"rollout.max_in_flight={in_flight}"] if in_flight else []
    config = read_settings(found)
    if here:
        check_machine(config, "local", planned=True)
    return shlex.join(["asyncrl", "local", *found])


def cost_line(costs: Costs) -> str:
    rates = ", ".join(f"{batch / costs.decode.step_s(batch):.4g} at {batch}" for batch in (1, 8, 64, 256))
    said = [
        f"engine: {rates} sequences (tokens/s)",
        f"completions of {costs.lengths.mean:.4g} tokens",
        f"a train step {costs.step_s:.3g} s + {costs.token_s * 1e6:.3g} us per token of a rank",
        f"weights served after {costs.sync_s:.3g} s, stall {costs.stall_s:.3g} s",
        f"environment {costs.environment_s:.3g} s x {costs.turns}",
    ]
    if costs.prompts is not None:
        said.insert(1, f"one prompt {costs.prompts.step_s(1):.3g} s, 8 at once {costs.prompts.step_s(8):.3g} s")
    if costs.handle_s or costs.deliver_s:
        said.append(
            f"a finished group {costs.handle_s:.3g} s, one after the other; an answer of the replay server "
            f"{costs.deliver_s:.3g} s"
        )
    if costs.beside:
        said.insert(1, f"its steps {costs.beside:.0%} longer while the learner trains")
    return "; ".join(said)


COLUMNS = ("tokens/s", "step s", "learner waits", "engines wait", "stale", "max", "goodput")


def cells(tried: Tried) -> list[str]:
    found = tried.outcome
    return [
        f"{found.tokens_per_s:,.0f}",
        f"{found.step_s:.3g}",
        f"{found.learner_idle:.0%}",
        f"{found.rollout_idle:.0%}",
        f"{found.staleness_mean:.2f}",
        str(found.staleness_max),
        f"{found.goodput:.1%}",
    ]


def splits_table(plan: Plan) -> Table:
    """Return a table with the best of each split."""
    table = Table("ranks", "engines", "depth", "in flight", *COLUMNS, title="splits", title_justify="left")
    for split in sorted({each.split for each in plan.tried}, key=lambda each: each.ranks):
        best = load("asyncrl.planner.search").best_of([each for each in plan.tried if each.split == split])
        mark = " *" if best == plan.best else ""
        numbers = [str(best.pipeline_depth), str(best.max_in_flight)]
        table.add_row(f"{split.ranks}{mark}", str(split.engines), *numbers, *cells(best))
    return table


def depths_table(plan: Plan) -> Table:
    table = Table("depth", "in flight", *COLUMNS, title="of the best split", title_justify="left")
    mine = [each for each in plan.tried if each.split == plan.best.split]
    for each in sorted(mine, key=lambda each: (each.pipeline_depth, each.max_in_flight)):
        mark = " *" if each == plan.best else ""
        table.add_row(f"{each.pipeline_depth}{mark}", str(each.max_in_flight), *cells(each))
    return table


def sensitivity_table(plan: Plan) -> Table:
    table = Table(
        Column("if", no_wrap=True), "change", *COLUMNS, title="what the plan depends on", title_justify="left"
    )
    for name, each in plan.sensitivity.items():
        share = each.outcome.tokens_per_s / max(plan.best.outcome.tokens_per_s, 1e-9) - 1
        table.add_row(name, f"{share:+.1%}", *cells(each))
    return table


def said_of(best: Tried, gpus: int) -> list[str]:
    found = best.outcome
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in found.staleness.items())
    return [
        f"{gpus} GPUs: {best.split.ranks} learner rank(s), {best.split.engines} rollout engine(s), "
        f"replay.pipeline_depth={best.pipeline_depth}, rollout.max_in_flight={best.max_in_flight}",
        f"expected: {found.tokens_per_s:,.0f} tokens/s trained, {found.step_s:.3g} s per step; the learner waits "
        f"{found.learner_idle:.0%} of the time, an engine {found.rollout_idle:.0%}; goodput {found.goodput:.1%}",
        f"staleness: {found.staleness_mean:.2f} versions on average, at most {found.staleness_max}; by age {ages}",
    ]


def as_object(plan: Plan, gpus: int, start: str) -> dict[str, object]:
    return {
        "gpus": gpus,
        "best": row_of(plan.best),
        "start": start,
        "tried": [row_of(each) for each in plan.tried],
        "sensitivity": {name: row_of(each) for name, each in plan.sensitivity.items()},
    }


def row_of(tried: Tried) -> dict[str, object]:
    return {
        "ranks": tried.split.ranks,
        "engines": tried.split.engines,
        "pipeline_depth": tried.pipeline_depth,
        "max_in_flight": tried.max_in_flight,
        **tried.outcome.as_object(),
    }
