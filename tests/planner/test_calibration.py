"""Costs measured in a run, here a simulation that writes the files of a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import RunFolderError
from asyncrl.pace import Pace
from asyncrl.planner.calibration import (
    LENGTHS,
    RunMeasured,
    calibrate,
    lengths_of,
    read_run,
    train_costs,
    with_paces,
)
from asyncrl.planner.costs import Costs, Decode, LogNormal
from asyncrl.planner.outcome import simulate
from asyncrl.planner.simulation import Setup, Simulation
from tests.planner.test_simulation import FIXED, setup

TRUE = Costs(
    decode=Decode(((1, 0.02), (64, 0.08))),
    lengths=LogNormal(200, 0.6, 2000),
    step_s=0.4,
    token_s=0.002,
    sync_s=0.3,
    stall_s=0.05,
)


PACED = replace(TRUE, prompts=Decode(((1, 0.03), (64, 0.345))), handle_s=0.05, deliver_s=1.0)
"""Engines that tell of their steps, and workers whose own work takes time."""


def steps_told(random: np.random.Generator, costs: Costs) -> tuple[Pace, Pace]:
    """Of some decode steps and prefills that take as long as `costs` say, and vary."""
    paces = Pace(), Pace()
    for _ in range(50):
        for pace, speed, most in zip(paces, (costs.decode, costs.prompts), (64, 8), strict=True):
            rows = int(random.integers(1, most + 1))
            pace.add(rows, (speed or costs.decode).step_s(rows) * random.uniform(0.97, 1.03))
    return paces


def write_run(folder: Path, given: Setup, steps: int = 30, true: Costs = TRUE) -> list[dict[str, float]]:
    """Metrics as a learner writes them, of a simulated run."""
    folder.mkdir()
    simulation, rows, before = Simulation(given, true, seed=3), [], 0.0
    random, decoded, prefilled = np.random.default_rng(5), Pace(), Pace()
    for number in range(1, steps + 1):
        simulation.run(number)
        step = simulation.steps[-1]
        seconds, tokens, held = step.ended - before, sum(step.tokens.values()), simulation.held_s
        before = step.ended
        ages = sum(age * count for age, count in step.tokens.items()) / tokens
        more = steps_told(random, true)
        decoded, prefilled = decoded + more[0], prefilled + more[1]
        told = decoded.named("decode") | prefilled.named("prefill")
        rows.append(
            {
                "step": number,
                "time/step": seconds,
                "time/wait_batch": step.waited,
                "time/train": true.token_s * tokens / given.ranks,
                "perf/trained_tokens_per_s": tokens / seconds,
                "staleness/mean": ages,
                "goodput/generated_tokens": simulation.generated,
                "idle/rollout_busy_s": held,
                "idle/rollout_s": simulation.now * given.engines - held,
                **({f"engine/{name}": value for name, value in told.items()} if true.prompts else {}),
                "weights/update_s": TRUE.sync_s,
                "weights/stall_s": TRUE.stall_s,
            }
        )
    drawn = TRUE.lengths.draw(np.random.default_rng(0), 400, 8).ravel()
    counts, edges = np.histogram(drawn, 64)
    line = {"step": 1, LENGTHS: {"edges": edges.tolist(), "counts": counts.tolist()}}
    (folder / "histograms.jsonl").write_text(json.dumps(line) + "\n")
    return rows


def test_costs_of_two_runs_foretell_a_third_one_with_other_settings(tmp_path: Path) -> None:
    runs = []
    for name, in_flight in (("few", 2), ("many", 16)):
        given = setup(2, engines=2, max_in_flight=in_flight)
        runs.append(read_run(tmp_path / name, given, write_run(tmp_path / name, given)))
    found = calibrate(runs, Costs(decode=Decode(((1, 0.5),)), lengths=FIXED), steps=20)
    assert found.lengths.mean == pytest.approx(TRUE.lengths.mean, rel=0.05)
    assert found.sync_s == TRUE.sync_s
    for batch in (2, 16):  # siblings are drawn alone: what their being long together does goes into the speed
        assert found.decode.step_s(batch) == pytest.approx(TRUE.decode.step_s(batch), rel=0.2)
    tokens = 8 * TRUE.lengths.mean
    assert found.train_s(tokens, 1) == pytest.approx(TRUE.train_s(tokens, 1), rel=0.05)
    for other in (setup(0, engines=3), setup(3, engines=1, max_in_flight=8)):
        true, guessed = (simulate(other, costs, steps=60, warm_up=15, seed=9) for costs in (TRUE, found))
        assert guessed.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.1)
        assert guessed.learner_idle == pytest.approx(true.learner_idle, abs=0.1)
        assert guessed.staleness_mean == pytest.approx(true.staleness_mean, abs=0.5)


def test_what_engines_told_of_their_steps_is_their_speed_and_the_rest_is_their_workers(tmp_path: Path) -> None:
    runs = []
    for name, in_flight in (("few", 2), ("many", 24)):
        given = setup(2, engines=2, max_in_flight=in_flight)
        runs.append(read_run(tmp_path / name, given, write_run(tmp_path / name, given, true=PACED)))
    found = calibrate(runs, Costs(decode=Decode(((1, 0.5),)), lengths=FIXED), steps=20)
    assert found.prompts is not None and PACED.prompts is not None
    for batch in (1, 16, 64):
        assert found.decode.step_s(batch) == pytest.approx(PACED.decode.step_s(batch), rel=0.05)
    for prompts in (1, 8):
        assert found.prompts.step_s(prompts) == pytest.approx(PACED.prompts.step_s(prompts), rel=0.05)
    for other in (setup(0, engines=3), setup(3, engines=1, max_in_flight=8), setup(1, engines=1, max_in_flight=1)):
        true, guessed = (simulate(other, costs, steps=60, warm_up=15, seed=9) for costs in (PACED, found))
        assert guessed.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.1)
        assert guessed.learner_idle == pytest.approx(true.learner_idle, abs=0.1)
        assert guessed.rollout_idle == pytest.approx(true.rollout_idle, abs=0.1)
        assert guessed.staleness_mean == pytest.approx(true.staleness_mean, abs=0.5)


@pytest.mark.parametrize(("shares", "found"), [((0.0, 0.9, 0.5), 0.4), ((0.5, 0.6, 0.7), 0.0)])
def test_runs_beside_more_and_less_training_tell_how_much_it_slows_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shares: tuple[float, ...], found: float
) -> None:
    given = setup(2, engines=2)
    runs = [read_run(tmp_path / str(share), given, write_run(tmp_path / str(share), given)) for share in shares]
    random, paces = np.random.default_rng(8), {}
    for run, share in zip(runs, shares, strict=True):
        pace = Pace()
        for rows in random.integers(1, 40, 300).tolist():
            pace.add(rows, TRUE.decode.step_s(rows) * (1 + 0.4 * share) * random.uniform(0.97, 1.03))
        paces[id(run)] = share, pace
    monkeypatch.setattr(RunMeasured, "beside", property(lambda run: paces[id(run)][0]))
    monkeypatch.setattr(RunMeasured, "pace", lambda run, kind: paces[id(run)][1] if kind == "decode" else Pace())
    costs = with_paces(TRUE, runs)
    assert costs.beside == pytest.approx(found, abs=0.03)
    if found:
        assert costs.decode.step_s(20) == pytest.approx(TRUE.decode.step_s(20), rel=0.02)


def test_how_long_engines_worked_beside_a_training_learner_is_read_from_its_run(tmp_path: Path) -> None:
    turns, ahead = (setup(depth, engines=1, max_staleness=4 * depth) for depth in (0, 2))
    runs = [
        read_run(tmp_path / str(n), given, write_run(tmp_path / str(n), given))
        for n, given in enumerate((turns, ahead))
    ]
    assert runs[0].beside < 0.05 and runs[1].beside > 0.15


def test_engines_that_count_their_steps_and_do_not_time_them_told_nothing(tmp_path: Path) -> None:
    given = setup(2, engines=2)
    rows = write_run(tmp_path / "one", given)
    silent = [{name: row[name] for name in row if not name.startswith("engine/")} for row in rows]
    counting = [row | {"engine/decode_steps": 10.0 * row["step"]} for row in silent]
    found = [
        calibrate([read_run(tmp_path / "one", given, each)], Costs(decode=Decode(((1, 0.5),)), lengths=FIXED), steps=10)
        for each in (silent, counting)
    ]
    assert found[0] == found[1]


def test_a_delivery_that_is_given_is_kept(tmp_path: Path) -> None:
    given = setup(2, engines=2)
    run = read_run(tmp_path / "one", given, write_run(tmp_path / "one", given, true=PACED))
    found = calibrate([run], Costs(decode=Decode(((1, 0.5),)), lengths=FIXED, deliver_s=1.0), steps=20)
    assert (found.deliver_s, found.handle_s) == (1.0, 0.0)
    shaped = calibrate([run], TRUE, steps=20)
    assert shaped.prompts is None, "a speed that is given is all that an engine costs"


def test_a_run_whose_replay_server_was_started_again_says_the_same(tmp_path: Path) -> None:
    given = setup(2, engines=2)
    rows = write_run(tmp_path / "one", given, true=PACED)
    whole = read_run(tmp_path / "one", given, rows)
    sums = [name for name in rows[0] if name.startswith(("engine/", "idle/", "goodput/"))]
    later = [row | {name: row[name] - rows[24][name] for name in sums} for row in rows[25:]]
    again = read_run(tmp_path / "one", given, [*rows[:25], *later])
    assert again.generated_per_busy_s == pytest.approx(whole.generated_per_busy_s, rel=1e-9)
    assert again.found().rollout_idle == pytest.approx(whole.found().rollout_idle, rel=1e-9)
    for kind in ("decode", "prefill"):
        assert again.pace(kind).line() == pytest.approx(whole.pace(kind).line(), rel=1e-6)


@pytest.mark.parametrize("late", [0, 1])
def test_a_run_that_stood_still_for_a_while_says_the_same(tmp_path: Path, late: int) -> None:
    """All of its processes; what the engines tell of it may come one step later."""
    given = setup(2, engines=2)
    rows = write_run(tmp_path / "one", given, true=PACED)
    whole = read_run(tmp_path / "one", given, rows)
    told = {"idle/rollout_busy_s": 1200.0, "engine/decode_s": 600.0, "engine/decode_rows_s": 6000.0}
    still = [row | {name: row[name] + stop * (number >= 20 + late) for name, stop in told.items()}
             for number, row in enumerate(rows)]  # fmt: skip
    stopped = rows[20]["time/step"] + 600.0
    share = rows[20]["time/step"] / stopped
    still[20] |= {"time/step": stopped, "perf/trained_tokens_per_s": rows[20]["perf/trained_tokens_per_s"] * share}
    again = read_run(tmp_path / "one", given, still)
    assert again.generated_per_busy_s == pytest.approx(whole.generated_per_busy_s, rel=0.05)
    assert again.found().step_s == pytest.approx(whole.found().step_s, rel=0.05)
    assert again.pace("decode").line() == pytest.approx(whole.pace("decode").line(), rel=0.05)
    assert train_costs([again]) == pytest.approx(train_costs([whole]), rel=0.05)


def test_one_run_scales_the_speed_that_is_given(tmp_path: Path) -> None:
    given = setup(2, engines=2, max_in_flight=16)
    run = read_run(tmp_path / "one", given, write_run(tmp_path / "one", given))
    shape = replace(TRUE, decode=TRUE.decode.scaled(5.0))
    found = calibrate([run], shape)
    assert found.decode.step_s(16) == pytest.approx(TRUE.decode.step_s(16), rel=0.05)
    again = run.found()
    expected = simulate(given, found, steps=40, warm_up=4)
    assert expected.tokens_per_s == pytest.approx(again.tokens_per_s, rel=0.07)
    assert expected.rollout_idle == pytest.approx(again.rollout_idle, abs=0.07)


def test_a_run_that_says_too_little_is_refused(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "short", setup(1), steps=4)
    with pytest.raises(RunFolderError, match="at least 4"):
        read_run(tmp_path / "short", setup(1), rows)
    with pytest.raises(RunFolderError, match="histograms"):
        lengths_of(tmp_path)


def test_every_length_of_a_histogram_of_whole_numbers_counts_once(tmp_path: Path) -> None:
    lengths = [3, 3, 7, 12, 12, 12]
    counts, edges = np.histogram(lengths, 64)
    line = {LENGTHS: {"edges": edges.tolist(), "counts": counts.tolist()}}
    (tmp_path / "histograms.jsonl").write_text(json.dumps(line) + '\n{"histogram/compl')
    found = lengths_of(tmp_path)
    drawn = found.draw(np.random.default_rng(0), 1000, 6)
    assert found.mean == pytest.approx(np.mean(lengths))
    assert set(np.unique(drawn)) == {3, 7, 12}
