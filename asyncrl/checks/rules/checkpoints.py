"""Rules for checkpoints: exported models, copies, and keeping the best."""

from __future__ import annotations

from asyncrl.checks.evaluations import eval_sets
from asyncrl.checks.hints import nearest
from asyncrl.checks.problem import Problems
from asyncrl.errors import ConfigError
from asyncrl.evaluation.table import figures_for
from asyncrl.schema import Config, RunSettings


def exports_have_checkpoints(config: RunSettings) -> Problems:
    export_every, save_every = config.learner.export_every, config.learner.save_every
    if export_every and save_every and export_every % save_every:
        yield (
            f"learner.export_every={export_every} must be a multiple of learner.save_every={save_every}, because "
            f"models are exported from checkpoints. Set learner.export_every={save_every}, or another multiple"
        )


def copies_last(config: RunSettings) -> Problems:
    copy_to = config.learner.copy_to
    if copy_to.startswith("memory:"):
        yield (
            f"learner.copy_to={copy_to} is the memory of the process that copies, and is lost when it ends. Give a URL "
            "that lasts: s3://bucket/run, file:///backup"
        )


def best_is_measured(config: Config) -> Problems:
    """A metric of an evaluation must belong to an evaluated set, exist, and be measured at the steps that are saved."""
    learner = config.learner
    if not learner.keep_best.startswith("eval/"):
        return
    try:
        sets = {each.name: each.config for each in eval_sets(config)}
    except ConfigError:
        return  # refused by evaluation_has_rows
    _, name, figure = [*learner.keep_best.split("/", 2), ""][:3]
    if name not in sets:
        known = ", ".join(sets) or "none: give eval.path or eval.sets"
        yield f"learner.keep_best={learner.keep_best}: the evaluated sets are {known}.{nearest(name, sets)}"
        return
    own = sets[name]
    figures = [own.reward.metric, *(figures_for(own.eval.samples, votes=own.eval.answer != "none"))]
    if figure not in figures and not figure.endswith("/mean"):  # the mean of a data_source, which the rows name
        yield (
            f"learner.keep_best={learner.keep_best}: {name} is measured by {', '.join(figures)} (see eval.samples, "
            f"reward.metric).{nearest(figure, figures)}"
        )
    if own.eval.every < 1 or learner.save_every % own.eval.every:
        yield (
            f"learner.keep_best={learner.keep_best}: every checkpoint must be evaluated, but "
            f"learner.save_every={learner.save_every} is not a multiple of the {own.eval.every} steps between "
            f"evaluations of {name}. Set eval.every={learner.save_every}, or a divisor of it"
        )
