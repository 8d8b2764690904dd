"""Checks before anything is started, the same for `--dry-run` and for the start: the form of every row, some prompts as
they will be rendered, and the reward on the first rows. Settings and the machine are checked before.

Loads neither torch nor transformers, so that a run starts at once if all is well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from asyncrl.chat.hub import described_in
from asyncrl.chat.template import without_parsers
from asyncrl.chat.turn_end import described as described_end
from asyncrl.checks.architecture import may_forget
from asyncrl.checks.evaluations import EvalSet, eval_sets
from asyncrl.checks.hints import nearest
from asyncrl.checks.machine import check_machine, ends_of, model_settings
from asyncrl.checks.rewards import MODEL_REWARD, RewardTerm, reward_terms
from asyncrl.checks.rules.settings import ENVIRONMENTS
from asyncrl.checks.servers import SERVERS
from asyncrl.checks.sources import Source, sources
from asyncrl.checks.user_code import learner_code
from asyncrl.cli.starting.reward_models import look_at_reward_model
from asyncrl.collector import load
from asyncrl.config import load_config
from asyncrl.data.probe import look_over, tokenizer_of
from asyncrl.data.survey import Survey
from asyncrl.data.vocabulary import refuse_smaller_vocabulary
from asyncrl.drawing.curriculum import too_many
from asyncrl.environments.first_request import first_requests
from asyncrl.environments.probe import check_environment
from asyncrl.environments.registry import find_environment, is_of_the_user
from asyncrl.errors import ConfigError, DataError, EpisodeError, RewardError
from asyncrl.evaluation.table import OF_SOURCE
from asyncrl.rewards.several import uncovered
from asyncrl.rewards.trial import refuse_silent, refuse_unscored, try_reward
from asyncrl.rollout.groups.evaluated import told_apart
from asyncrl.schema import Config, EnvironmentConfig, ModelConfig
from asyncrl.telemetry.folder.resumed import load_as_begun
from asyncrl.telemetry.folder.run_folder import changes_in, refuse_used_folder
from asyncrl.telemetry.metrics.alarms import Alarms
from asyncrl.telemetry.metrics.registry import METRICS, metric_of
from asyncrl.user_code import try_in_process

ASKED_ROWS = 2
"""Number of the first rows of each source for which the environment is asked for its first request."""
TRIED_ROWS = 3
"""Number of the first rows of each source on which the reward is called."""
PROMPT_SHOWN = 400


@dataclass(frozen=True, slots=True)
class Preflight:
    """The findings."""

    prompts: tuple[str, ...]
    """Lines about the data."""
    reward: tuple[str, ...]
    """Lines about the reward."""
    rows: int
    """Number of rows that are trained on."""


NOTHING_SEEN = Preflight((), (), 0)


def look_ahead(config: Config) -> Preflight:
    """Check data and reward.

    Raises:
        ConfigError, DataError: the run could not work; the message names the row, the server or the model.
    """
    Alarms(config.telemetry.ignore_alarms)  # refuses unknown names of alarms
    refuse_unmeasured(config.learner.keep_best)
    if config.engine.name in SERVERS:
        load("asyncrl.engines.server.look").look_at_servers(config)
    refuse_unbatched(config)
    described = described_in(config.model.path)
    model = str(described or config.model.path)
    train = [look_at(source, config, model, order_by=config.data.order_by) for source in sources(config.data)]
    if config.data.curriculum and (why := too_many(sum(each.rows for each in train))):
        raise ConfigError(why)
    sets = eval_sets(config)
    evaluated = [look_at(each.source, each.config, model) for each in sets]
    found = [*train, *evaluated]
    lines = [line for each in found for line in survey_lines(config, each)]
    if not train[0].tokens:
        why = (
            "has no tokenizer.json"
            if described
            else "is not on this machine and cannot be loaded from the Hugging Face hub at the moment"
        )
        lines.append(f"model.path={config.model.path} {why}, so no prompt was tokenized yet")
    elif described:
        lines.append(turn_end_line(config.model, model))
    for each in train if train[0].tokens else ():
        ending = " ..." if len(each.first_prompt) > PROMPT_SHOWN else ""
        of = f" of {each.title}" if len(train) > 1 else ""
        lines.append(f"the first{of}, {each.tokens[0]} tokens: {each.first_prompt[:PROMPT_SHOWN]!r}{ending}")
    pairs = list(zip(sets, evaluated, strict=True))
    for each, survey in pairs:
        refuse_unknown_source(config.learner.keep_best, each, survey)
    for given, surveys in ((config, train), *((each.config, [survey]) for each, survey in pairs)):
        _refuse_foreign_rows(given.environment, surveys)
    said = _reward_lines(config, train, [survey for each, survey in pairs if each.config.reward == config.reward])
    for each, survey in pairs:
        if each.config.reward != config.reward:
            with said_of(each):
                said += [f"eval {each.name}: {line}" for line in _reward_lines(each.config, [survey])]
    return Preflight(tuple(lines), tuple(said), sum(each.rows for each in train))


def look_at(source: Source, config: Config, model: str, **counts: Any) -> Survey:
    """As `look_over`; where the environment makes its first request itself, that is what is measured and shown.

    Args:
        model: folder of the model.
    """
    name, limit = config.environment.name, config.data.max_prompt_tokens
    if name == ENVIRONMENTS[0]:
        return look_over(source, model, limit=limit, options=config.model.chat, **counts)
    found = look_over(source, model, limit=None, options=config.model.chat, **counts)
    rows = [row for _, row in found.first_rows[:ASKED_ROWS]]
    asked = first_requests(config.environment, config.model, [*rows, found.longest_row]) if found.tokens else []
    if not asked:
        return found
    lengths = [length for length, _ in asked]
    more = lengths[0] - found.tokens[0]  # of a system message and tools: the same for each row
    same = more == lengths[-1] - found.longest
    tokens = tuple(length + more for length in found.tokens) if same else tuple(lengths)
    return replace(
        found, first_prompt=asked[0][1], tokens=tokens, overlong=sum(each > limit for each in tokens), asked=name
    )


def turn_end_line(given: ModelConfig, folder: str) -> str:
    """The line about what ends a turn, as the workers find it: by the chat template and the files of the model."""
    local = tokenizer_of(folder)
    ids, texts = local.stops(without_parsers(given.chat)) if local else (set[int](), ())
    said = described_end(sorted(ids | ends_of(folder)), texts, local.decode) if local else ""
    return said or (
        f"model.path={given.path} names no token that ends a completion (a marker in the chat template, eos_token in "
        "tokenizer_config.json, eos_token_id in generation_config.json), so each completion will have "
        "rollout.max_new_tokens tokens"
    )


def refuse_unmeasured(keep_best: str) -> None:
    """Raises ConfigError: there is no such metric, so no checkpoint would ever be the best. Metrics of evaluations are
    checked with the settings."""
    if keep_best and not keep_best.startswith("eval/") and metric_of(keep_best) is None:
        hint = nearest(keep_best, [metric.name for metric in METRICS])
        raise ConfigError(f"learner.keep_best={keep_best} is not a metric.{hint} `asyncrl metrics` lists them")


def refuse_unknown_source(keep_best: str, given: EvalSet, found: Survey) -> None:
    """Raises ConfigError: it is the mean of a `data_source` that no row of the set has, so no checkpoint would ever be
    the best. Not known for a set of which only the first rows are evaluated."""
    place = f"eval/{given.name}/"
    if not (keep_best.startswith(place) and keep_best.endswith(OF_SOURCE)) or found.rows > given.config.eval.rows:
        return
    measured = [f"{place}{name}{OF_SOURCE}" for name in told_apart(found.data_sources, 0)]
    if keep_best not in measured:
        known = ", ".join(measured) or f"none: its rows have {len(found.data_sources)} different `data_source`"
        raise ConfigError(
            f"learner.keep_best={keep_best}: the means by data_source of {given.name} are {known}."
            f"{nearest(keep_best, measured)}"
        )


def refuse_unbatched(config: Config) -> None:
    """Raises ConfigError: the built-in engine cannot batch the model, which its worker would otherwise only find out
    when loading it."""
    folder, path = described_in(config.model.path), config.model.path
    if config.engine.name == "transformers" and folder is not None and may_forget(model_settings(path)):
        settings = {"path": path, "folder": str(folder)}
        try_in_process("asyncrl.engines.hf.trial", settings, f"the config of model.path={path}")


def _refuse_foreign_rows(config: EnvironmentConfig, found: Sequence[Survey]) -> None:
    """Check rows for a built-in environment that reads its own columns. Raises DataError: a first row lacks them."""
    check = None if is_of_the_user(config.name) else getattr(find_environment(config), "check_row", None)
    if check is None:
        return
    for where, row in itertools.chain.from_iterable(each.first_rows for each in found):
        try:
            check(row)
        except (RewardError, EpisodeError) as error:
            raise DataError(f"environment.name={config.name}: {where}: {error}") from error


@contextmanager
def said_of(given: EvalSet) -> Iterator[None]:
    """Prefix a ConfigError raised inside with the set's key."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{given.key}: {error}") from error


def check_environments(config: Config) -> None:
    """Check the training environment, and those of evaluated sets that differ from it. Raises ConfigError."""
    checked = [config.environment]
    check_environment(config.environment, config.model, overlong=config.data.overlong)
    for each in eval_sets(config):
        if each.config.environment not in checked:
            checked.append(each.config.environment)
            with said_of(each):
                check_environment(each.config.environment, config.model, overlong=config.data.overlong)


def check_learner_code(config: Config) -> None:
    """Try a user's own loss, advantages and hook, in a process that loads torch. Raises ConfigError."""
    named = ", ".join(f"{key}={spec}" for key, spec in learner_code(config).items())
    if named:
        settings = {"loss": asdict(config.loss), "advantage": asdict(config.advantage)}
        try_in_process("asyncrl.learner.user_code_trial", settings | {"learner": asdict(config.learner)}, named)


def check_start(
    command: str, overrides: Sequence[str], *, planned: bool = False
) -> tuple[Config, list[str], Preflight]:
    """Make the checks of a start, which are the same if it is only `planned`.

    Args:
        command: `local`, `learner`, `rollout` or `replay`.

    Returns:
        The settings, the overrides for every process, and what was found.

    Raises:
        ConfigError, DataError: see `look_ahead`. RunFolderError: the folder cannot be used.
    """
    if command == "replay":  # nothing of it depends on a dtype
        config, given, found = load_config(overrides), [*overrides], NOTHING_SEEN
    else:
        (config, given), found = load_as_begun(load_config, overrides), NOTHING_SEEN
    check_machine(config, command, planned=planned)
    if command in ("local", "rollout"):
        check_environments(config)
    if command in ("local", "learner"):
        check_learner_code(config)
        refuse_smaller_vocabulary(config)
        refuse_used_folder(config)
        changes_in(config)  # a folder that cannot be resumed is refused before the rows are read
    if command in ("local", "rollout"):
        found = look_ahead(config)
    if command == "local" and config.learner.epochs > 0:
        steps = max(1, math.ceil(config.learner.epochs * found.rows / config.learner.groups_per_step))
        given += [f"learner.steps={steps}", "learner.epochs=0"]
        config = load_config(given)
    return config, given, found


def survey_lines(config: Config, found: Survey) -> list[str]:
    kept = f" of {found.unfiltered:,}" if found.rows < found.unfiltered else ""
    filtered = " let through by data.where" if kept else ""
    of = f"first requests of environment={found.asked}" if found.asked else "prompts"
    lines = [f"{found.title}: {found.rows:,}{kept} rows{filtered}, all of a form that can be used"]
    if found.tokens:
        lines[0] += f"; of {len(found.tokens):,} {of} the longest has {found.longest:,} tokens"
    if not found.overlong:
        return lines
    said = (
        f"{found.title}: {found.overlong} of {len(found.tokens)} {of} looked at have more than "
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} (the longest: {found.longest_at}, {found.longest:,})"
    )
    if found.overlong == len(found.tokens):
        raise DataError(f"{said}. Raise data.max_prompt_tokens")
    if config.data.overlong == "error":
        cuts = " or truncate_left" if config.environment.name == ENVIRONMENTS[0] and not found.rendered_at else ""
        raise DataError(f"{said}. Raise data.max_prompt_tokens, remove the rows, or set data.overlong=drop{cuts}")
    if config.data.overlong.startswith("truncate_") and found.rendered_at:
        raise DataError(
            f"{said}. data.overlong={config.data.overlong} cuts the user's text, which cannot be told apart in "
            f"{found.rendered_at}: it was rendered beforehand. Give it as messages, raise data.max_prompt_tokens, or "
            "set data.overlong=drop"
        )
    return [*lines, f"{said}: data.overlong={config.data.overlong}"]


def _reward_lines(config: Config, found: Sequence[Survey], beside: Sequence[Survey] = ()) -> list[str]:
    """Call the reward on the first rows of `found`; rows of `beside` must only be covered by a term."""
    rows = [row for each in found for row in each.first_rows[:TRIED_ROWS]]
    terms = reward_terms(config.reward)
    if not terms:
        return ["none; the environment scores by itself"]
    refuse_uncovered(terms, [*found, *beside])
    lines = [line for term in terms for line in _untried(term, found)]
    terms = [term for term in terms if not term.model]
    outcomes = try_reward(terms, rows, timeout_s=config.reward.timeout_s) if terms else []
    for each in found:  # per source of a mixture: if one has no scores, all of its groups would be dropped
        own = {where for where, _ in each.first_rows}
        refuse_unscored(terms, [outcome for outcome in outcomes if outcome[0] in own])
        lines += refuse_silent(terms, each.first_rows[:TRIED_ROWS], timeout_s=config.reward.timeout_s)
    if not outcomes:
        return lines
    failed = [(where, outcome) for where, outcome in outcomes if isinstance(outcome, RewardError)]
    scores = [f"{outcome.value:g}" for _, outcome in outcomes if not isinstance(outcome, RewardError)]
    called = " + ".join(term.name or term.function for term in terms if not term.remote)
    lines += [f"{called}: called on the first rows with made-up completions, it gave {', '.join(scores)}"]
    # If only some failed, the reward may rightly refuse completions that the policy never writes. If failures continue,
    # the run reports them.
    return lines + [
        f"it failed for {len(failed)} of {len(outcomes)}; {where}: {' '.join(str(error).split()):.300}"
        for where, error in itertools.islice(failed, 1)
    ]


def _untried(term: RewardTerm, found: Sequence[Survey]) -> list[str]:
    if term.model:
        rows = [row for each in found for row in each.first_rows]
        seen = look_at_reward_model(term, rows) if term.function == MODEL_REWARD else []
        return [f"{term.said} of {term.model}: not loaded before the start", *seen]
    return [f"{term.said}: not called before the start, because it needs its server"] if term.remote else []


def refuse_uncovered(terms: Sequence[RewardTerm], found: Sequence[Survey]) -> None:
    """Raises ConfigError: the `data_source` of a row has no reward."""
    for each in found:
        for data_source, where in each.data_sources.items():
            if not any(term.covers({"data_source": data_source}) for term in terms):
                raise ConfigError(f"{where}: {uncovered(data_source, terms)}")
