"""Every metric that is written is registered, and every registered one is written."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.cli.main import main
from asyncrl.cli.metrics import as_markdown
from asyncrl.evaluation.orders import EvalSummary
from asyncrl.learner.model.flops import speed
from asyncrl.learner.publishing.canary import ProvingPublisher
from asyncrl.learner.reporting.step_row import evaluation_metrics
from asyncrl.learner.step.counterfactual import SUMS, estimates
from asyncrl.learner.step.metrics import Measured, MicroBatchMetrics
from asyncrl.losses import PRESETS, policy_loss
from asyncrl.losses.kept import first_pass
from asyncrl.replay.core.live.workers import KEPT
from asyncrl.schema import AdvantageConfig, Config, LearnerConfig, ModelConfig, RunConfig
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import needs_first_pass, resolve
from asyncrl.sft.batches import Drawn
from asyncrl.sft.train import TRAINED_TOKENS, step_row
from asyncrl.telemetry.metrics.registry import METRICS, OF_EVERY_ROW, metric_of, pattern_of
from asyncrl.types import DropReason
from asyncrl.weights.broadcast.publisher import _STATS, REPORTED
from asyncrl.weights.files.sender import _STATS as FILE_STATS
from tests.learner.alone import train_alone
from tests.learner.fed_replay import FedReplay, KeptWeights
from tests.learner.feed import tiny_checkpoint
from tests.losses.batches import random_batch, to_inputs
from tests.replay.play import Play

ROOT = Path(__file__).resolve().parents[3]
ROOMS = {metric.room for metric in METRICS}
PART = re.compile(r"/(offset|offset_square|log_square|seq_square|ess_weight|ess_square)$")
"""Of sums that `summarize` makes metrics of."""
PARTS = ("perf/trained_tokens", "perf/operations", "perf/packed_tokens", "eval/step")
"""Taken out of a row before it is written; and the axis that W&B draws evaluations over."""
FIGURES = {f"{name}{end}": 0.5 for name in ("pass@2", "gsm8k/mean") for end in ("", "_low", "_high")}
SUMMARY = EvalSummary(
    job_id=0, step=0, policy_version=0, eval_set="heldout", mean=0.5, low=0.5, high=0.5, count=1, failed=0,
    version_min=0, version_max=0, superseded=0, figures=FIGURES,
)  # fmt: skip
DRAWN = Drawn(rows=1, dropped=0, cut=0, tokens=1, epoch=0.5, digest="")


def test_every_metric_says_what_it_is_once() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert [metric.name for metric in METRICS if not (metric.unit and metric.meaning and "/" in metric.name)] == []
    shown = [metric_of(name) for name in ("staleness/hist_3", "checkpoint/copies_failed", "rewards/right/acc")]
    names = [metric and metric.name for metric in shown]
    assert names[1:] == ["checkpoint/<errand>_failed", "rewards/<name>"]
    assert shown[0] is not None and shown[0].unit == "share"
    assert metric_of("eval/a/b/accuracy") is None


def test_the_page_is_what_the_registry_makes(capsys: pytest.CaptureFixture[str]) -> None:
    said = "run: asyncrl metrics --markdown > docs/metrics.md"
    assert (ROOT / "docs" / "metrics.md").read_text() == as_markdown(), said
    assert main(["metrics", "goodput", "evaluations"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "goodput/generated_tokens  (tokens, total)"


def written(path: Path) -> Iterator[str]:
    """Texts that look like the name of a metric, with `\\0` for what an f-string fills in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        else:
            continue
        room, _, rest = text.partition("/")
        if room in ROOMS and re.fullmatch(r"[a-zA-Z0-9_@/\0]+", rest) and not rest.endswith(("/", "_")):
            yield text


def known(text: str) -> bool:
    holes = re.compile("[^/]+".join(map(re.escape, text.split("\0"))) + "(/.*)?")  # the beginning of one, perhaps
    return any(
        pattern_of(metric.name).fullmatch(text.replace("\0", "x")) or holes.fullmatch(metric.name) for metric in METRICS
    )


def test_every_name_in_the_code_is_registered() -> None:
    code, apart = ROOT / "asyncrl", ("telemetry", "cli")
    makers = [path for path in sorted(code.rglob("*.py")) if path.relative_to(code).parts[0] not in apart]
    found = {text: path for path in makers for text in written(path)}
    assert len(found) > 100
    strange = {
        text: str(path.relative_to(ROOT))
        for text, path in found.items()
        if not (known(text) or PART.search(text) or text in PARTS)
    }
    assert strange == {}, "write these into asyncrl/telemetry/metrics/of_steps.py or of_runs.py"


def of_losses() -> Iterator[str]:
    """Every named loss with what can be added to it."""
    for change in ({}, {"kl_coef": 0.1}, {"behavior_kl": 0.1}, {"entropy_coef": 0.1}, {"sat_quantile": 0.9}):
        for preset in PRESETS if "sat_quantile" not in change else ("ppo",):
            inputs = to_inputs(random_batch(1), ref=True)
            inputs = dataclasses.replace(inputs, entropy=inputs.learner_logprobs.detach().abs())
            config = resolve(LossConfig(preset=preset, **change))
            kept = first_pass([inputs], config) if needs_first_pass(config) else None
            out = policy_loss(inputs, config, kept=kept)
            yield from Measured.of(MicroBatchMetrics(out.sums, out.parts)).row()


def of_a_run(folder: Path) -> Iterator[str]:
    """The learner's loop on a tiny model, with a critic."""
    config = Config(
        run=RunConfig(dir=str(folder / "run")),
        model=ModelConfig(path=str(tiny_checkpoint(folder / "model"))),
        advantage=AdvantageConfig(estimator="gae"),
        learner=LearnerConfig(steps=2, save_every=1, skip_spikes=2.0),
    )
    parts, kept = train_alone(config, FedReplay(), KeptWeights())
    yield from parts.checkpoints.timings()
    proving = ProvingPublisher(KeptWeights(), config, parts.roles.policy, torch.device("cpu"))
    proving.publish(1, parts.roles.policy.named_hf_parameters())
    yield from proving.stats()
    for row in (*kept.rows, *kept.binned):
        yield from row


def of_the_replay() -> Iterator[str]:
    """A core that waits, drops, filters and loses tokens in every way."""
    play = Play(groups_per_step=1)
    for order, reason in zip(play.acquire(), (DropReason.FILTERED, DropReason.INCOMPLETE), strict=False):
        play.core.fail("w", "a", order.group_id, order.attempt, reason, "short: why")
    play.core.heartbeat("w", "a", dict.fromkeys(KEPT, 3.0) | {"generated_tokens": 9e9})
    play.core.lease(0)
    play.clock.now += 60
    play.whole_step()
    for order in play.acquire():
        play.insert(order)
    yield from play.core.run.metrics()
    play.core.goodbye("w", "a")
    yield from play.train()[1].metrics


def of_pieces(folder: Path) -> Iterator[str]:
    """What stands in a row only in runs of some kind, from the code that makes it there."""
    yield from evaluation_metrics(SUMMARY, "accuracy")
    yield from evaluation_metrics(SUMMARY, "reward")
    yield from step_row(Measured(totals={TRAINED_TOKENS: 1.0}), DRAWN, {"time/step": 1.0})
    yield from estimates(torch.ones(len(SUMS)))
    yield from speed(1.0, 1.0, 1.0, 1, peak=1.0)
    yield from (f"weights/{name}" for name in {*_STATS, *REPORTED, *FILE_STATS})


ELSEWHERE = {
    "tests/integration/test_sft.py": ("eval/heldout/loss", "eval/heldout/token_accuracy"),
    "tests/learner/reporting/test_collective_clock.py": ("perf/gather_s", "perf/reduce_s"),
    "tests/learner/test_memory_plan.py": ("memory/peak_gb", "memory/planned_gb"),
    "tests/learner/checkpoints/test_errands.py": ("checkpoint/copies", "checkpoint/copies_failed"),
    "tests/learner/step/test_centering.py": ("centering/covered", "centering/removed"),
    "tests/learner/step/test_custom.py": ("hook/",),
    "tests/learner/model/test_routing.py": ("router/changed",),
    "tests/learner/checkpoints/test_saving.py": ("checkpoint/copy_wait_s",),
    "tests/learner/test_roles.py": ("kl/coef", "kl/in_reward", "kl/of_policy"),
    "tests/learner/step/test_turn_rewards.py": ("reward/turn_mean", "reward/turn_std", "reward/turns"),
    "tests/losses/test_custom.py": ("custom/",),
    "tests/replay/core/test_curriculum.py": (
        "data/pass_rate_above", "data/pass_rate_below", "data/pass_rate_mean", "data/pass_rate_measured",
        "data/passed_over",
    ),
    "tests/weights/test_files.py": ("weights/sent_version",),
    "tests/weights/test_version.py": ("weights/wait_s",),
    "tests/integration/test_loop.py": ("idle/replay", "machine/memory_free", "machine/clock_skew_s"),
    "tests/integration/test_truncated_sampling.py": ("completion/support_mean",),
}  # fmt: skip
"""Tests that see those which it would take a run to make here."""


def test_every_registered_metric_is_made(tmp_path: Path) -> None:
    found = {"eval/heldout/perplexity", "eval/heldout/tokens"}  # of `evaluate` in tests/sft/test_train.py, by its key
    made = found | {*of_losses(), *of_a_run(tmp_path), *of_the_replay(), *of_pieces(tmp_path)} - {*OF_EVERY_ROW, *PARTS}
    assert [name for name in made if metric_of(name) is None] == []
    for path, names in ELSEWHERE.items():
        text = (ROOT / path).read_text()
        assert [name for name in names if name not in text] == [], path
        made |= {f"{name}x" if name.endswith("/") else name for name in names}  # what comes after is the user's
    assert [m.name for m in METRICS if not any(pattern_of(m.name).fullmatch(name) for name in made)] == []
