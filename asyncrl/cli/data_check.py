"""`asyncrl data check SETTINGS`: show the rows as a run would use them, and check that the reward accepts each row's
own right answer.

Exit code 0: nothing is wrong; 1: a row is wrong, and is named; 2: settings or data are refused, as at a start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from asyncrl.chat.hub import described_in
from asyncrl.checks.evaluations import eval_sets
from asyncrl.checks.machine import check_data
from asyncrl.checks.rewards import reward_terms
from asyncrl.checks.sources import sources
from asyncrl.cli.lengths import histogram
from asyncrl.cli.starting.preflight import look_at, survey_lines
from asyncrl.config import load_config
from asyncrl.data.dataset import source_names
from asyncrl.data.rows.base import Row
from asyncrl.data.survey import Survey
from asyncrl.errors import RewardError
from asyncrl.plain_text import plain
from asyncrl.rewards.reference_answers import SEARCHED, reference_completions, reference_text
from asyncrl.rewards.score import Outcome
from asyncrl.rewards.trial import score_texts
from asyncrl.schema import Config, RewardConfig
from asyncrl.telemetry.live.console import PlainConsole, say

COUNTED = 4096
"""Number of prompts of each source that are tokenized, in addition to the first and the longest."""
SCORED = 8
"""Number of first rows of each source whose own answer is scored."""
UNUSED = "reward.function=unused:unused"
"""Added if no reward is given, so that the settings are accepted. It is never called."""
SHOWN = 2000
"""Limit on the characters shown of the first prompt."""


def main(overrides: Sequence[str]) -> int:
    """Print what was found; return the exit code. Raises ConfigError and DataError as the start of a run would."""
    rewarded = any(text.startswith(("reward=", "reward.", "experiment=")) for text in overrides)
    config = load_config([*overrides, *([] if rewarded else [UNUSED])])
    check_data(config)
    console = PlainConsole(highlight=False, soft_wrap=True)
    limit = config.data.max_prompt_tokens
    train = sources(config.data)
    sets = eval_sets(config)
    model = str(described_in(config.model.path) or config.model.path)
    found = [
        look_at(source, of, model, counted=COUNTED, first=SCORED, order_by=order_by)
        for source, of, order_by in (
            *((source, config, config.data.order_by) for source in train),
            *((each.source, each.config, "") for each in sets),
        )
    ]
    say(console, *_shares(config), *(line for each in found for line in survey_lines(config, each)))
    tokens = [count for each in found for count in each.tokens]
    untold = "there is no tokenizer.json in model.path here, so nothing was tokenized"
    say(console, *(histogram(tokens, limit) if tokens else [untold]))
    console.print(_rendered(found[0], _columns(config.reward)))
    if not rewarded:
        console.print(
            "no reward was given. Give reward.function=FILE.py:NAME or reward=NAME to score each row's own answer"
        )
        return 0
    if not config.reward.function and not config.reward.functions:
        console.print("the environment scores by itself, so no reward was called")
        return 0
    rewards = [config.reward] * len(train) + [each.config.reward for each in sets]
    mended = True
    for place, reward in enumerate(rewards):
        if reward in rewards[:place] or not (reward.function or reward.functions):
            continue
        rows = [row for mine, each in zip(rewards, found, strict=True) if mine == reward for row in each.first_rows]
        said, wrong = judged(reward, rows)
        mended = mended and not wrong
        for line in [*said, *wrong]:
            console.print(line, markup=False, style="bold red" if line in wrong else None)
    return 0 if mended else 1


def _shares(config: Config) -> Iterator[str]:
    names = source_names(config.data)
    if names is not None:
        drawn = Counter(names[index] for index in range(1000))
        yield "of 1,000 prompts: " + ", ".join(f"{count} of {name}" for name, count in drawn.items())


def _columns(reward: RewardConfig) -> tuple[str, ...]:
    """Return the columns of the right answer that the reward was told of."""
    told = [term.args.get("column") for term in reward_terms(reward)]
    return tuple(column for column in told if isinstance(column, str) and column)


def _rendered(found: Survey, columns: Sequence[str]) -> Text:
    """Render the first prompt, dim, and in green the part that is sampled. Only sampled tokens are in the loss."""
    where, row = found.first_rows[0]
    what = f"first request of environment={found.asked}" if found.asked else "first prompt"
    text = Text(f"the {what} ({plain(where)}); dim is given, green is sampled and alone in the loss:\n")
    prompt = found.first_prompt or str(row["prompt"])
    text.append(plain(prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]} ..."), style="dim")
    truth = reference_text(row, columns)
    return text.append(f"▶{plain(truth) if truth is not None else '...'}◀", style="bold green")


def judged(reward: RewardConfig, rows: Sequence[tuple[str, Row]]) -> tuple[list[str], list[str]]:
    """Score each row's own right answer and an empty answer.

    Returns:
        Lines for the screen, and the lines about wrong rows.

    Raises:
        ConfigError: the reward cannot be loaded or called.
    """
    terms = reward_terms(reward)
    forms = {where: found for where, row in rows if (found := reference_completions(terms, row))}
    known = [(where, row) for where, row in rows if where in forms]
    if not known:
        return _unanswered(reward, rows)
    outcomes = score_texts(reward, [(row, ["", *(text for _, text in forms[where])]) for where, row in known])
    scores = [[_value(each) for each in found] for found in outcomes]
    best = [max(found[1:]) for found in scores]
    top = max(best)
    if top == -np.inf:
        return [], [f"{known[0][0]}: no form of the row's own answer got a score: {_reason(outcomes[0])}"]
    first = best.index(top)
    form = forms[known[first][0]][scores[first][1:].index(top)][0]
    empty = sorted({found[0] for found in scores})
    said = [
        f"the reward of {len(known)} rows' own answers: {_span(best)}, best as {form.format('ANSWER')!r}; of an empty "
        f"answer: {_span(empty)}"
    ]
    if without := [where for where, _ in rows if where not in forms]:
        said.append(f"{len(without)} of the {len(rows)} rows looked at have no right answer, {without[0]} first")
    wrong: list[str] = []
    for (where, row), found, mine, each in zip(known, scores, best, outcomes, strict=True):
        own = f"{where}: its own answer {reference_text(row, _columns(reward)) or 'in code'!r:.80} scores {_said(mine)}"
        if mine == -np.inf:
            wrong.append(f"{own}: {_reason(each)}")
        elif mine <= found[0]:
            wrong.append(f"{own}, and an empty answer {_said(found[0])}. Fix the reward, or the row")
        elif mine < top:
            wrong.append(f"{own}, and an answer of another row {_said(top)}. Fix the row, or the reward")
    return said, wrong


def _unanswered(reward: RewardConfig, rows: Sequence[tuple[str, Row]]) -> tuple[list[str], list[str]]:
    """Lines about rows of which none has a right answer to try; what the reward refuses in them is wrong."""
    refused = [
        f"{where}: {_reason(found)}"
        for (where, _), found in zip(rows, score_texts(reward, [(row, [""]) for _, row in rows]), strict=True)
        if all(isinstance(outcome, RewardError) for outcome in found)
    ]
    return [f"no row has a right answer to try, in one of the columns {', '.join(SEARCHED)}"], refused


def _reason(outcomes: Sequence[Outcome]) -> str:
    """Why the first of them has no score."""
    error = next(outcome for outcome in outcomes if isinstance(outcome, RewardError))
    return " ".join(str(error).split())


def _value(outcome: Outcome) -> float:
    """The score; minus infinity if the reward failed, so that any score is larger."""
    return -np.inf if isinstance(outcome, RewardError) else outcome.value


def _said(value: float) -> str:
    return "none" if value == -np.inf else f"{value:g}"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return _said(low) if low == high else f"{_said(low)} to {_said(high)}"
