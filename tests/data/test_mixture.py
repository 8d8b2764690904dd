"""Mixtures, filters and order: which rows are drawn and when, and exact resumes."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.checks.sources import sources
from asyncrl.cli.arguments.settings_file import with_files
from asyncrl.config import config_to_dict, load_config
from asyncrl.data.dataset import SourceNames, open_dataset
from asyncrl.data.rows.view import PromptRows
from asyncrl.digests import run_digest
from asyncrl.drawing.order import DrawOrder, epoch_order
from asyncrl.drawing.turns import LONGEST_ROUND, Turns, round_counts, spread
from asyncrl.errors import ConfigError, DataError
from asyncrl.rollout.pool.specs import absolute_paths
from asyncrl.schema import DataConfig
from asyncrl.telemetry.folder.resumed import made_of

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(WEIGHTS)
def test_after_any_number_of_prompts_each_source_has_had_its_share_to_within_one(counts: list[int]) -> None:
    seen = [0] * len(counts)
    for place, source in enumerate(spread(counts), start=1):
        seen[source] += 1
        assert all(abs(had - Fraction(count * place, sum(counts))) < 1 for had, count in zip(seen, counts, strict=True))
    assert seen == counts


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5))
def test_any_weights_make_a_round_whose_shares_are_theirs(weights: list[float]) -> None:
    counts = round_counts(weights)
    assert min(counts) >= 1 and sum(counts) <= LONGEST_ROUND + len(counts)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count / sum(counts) - weight / sum(weights)) <= 2 * len(weights) / LONGEST_ROUND


@given(weights=WEIGHTS, start=st.integers(0, 10**6), seed=st.integers(0, 2**63), data=st.data())
def test_no_row_of_a_source_is_lost_or_comes_twice_in_an_epoch_and_any_cursor_goes_on_exactly(
    weights: list[int], start: int, seed: int, data: st.DataObject
) -> None:
    rows = [data.draw(st.integers(1, 20)) for _ in weights]
    make = lambda: DrawOrder(rows, weights, seed=seed, shuffle=True, ranks=[None] * len(rows))  # noqa: E731
    order, fresh = make(), make()
    drawn = [order[index] for index in range(start, start + 200)]
    assert drawn[150:] == [fresh[start + 150 + n] for n in range(50)]  # as after a resume at that index
    seen: dict[tuple[int, int], list[int]] = {}
    for each in drawn:
        seen.setdefault((each.source, each.epoch), []).append(each.row)
    for (source, epoch), found in seen.items():
        assert len(set(found)) == len(found)
        inside = (source, epoch - 1) in seen and (source, epoch + 1) in seen
        assert not inside or sorted(found) == list(range(rows[source]))


def test_turns_and_orders_never_change_between_versions() -> None:
    assert spread([7, 2, 1]) == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2]
    assert [Turns([0.7, 0.2, 0.1])[index] for index in (0, 3, 9, 13, 10**6)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (1, 2),
        (0, 700_000),
    ]
    order = DrawOrder([5, 5], [1, 1], seed=7, shuffle=True, ranks=[None, None])
    assert [tuple(order[index]) for index in range(4)] == [(0, 0, 4), (1, 0, 2), (0, 0, 1), (1, 0, 1)]
    alone = DrawOrder([10], [1.0], seed=7, shuffle=True, ranks=[None])
    assert [alone[index].row for index in range(30, 40)] == epoch_order(10, 7, 3).tolist()


def test_rows_in_the_order_of_a_column_are_shuffled_among_equals_anew_each_epoch() -> None:
    ranks = np.asarray([2, 0, 1, 0, 0, 2, 1, 1, 0, 2])
    order = DrawOrder([10], [1], seed=1, shuffle=True, ranks=[ranks])
    epochs = [[order[10 * epoch + place].row for place in range(10)] for epoch in range(3)]
    assert all(ranks[rows].tolist() == sorted(ranks.tolist()) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3 and all(sorted(rows) == list(range(10)) for rows in epochs)
    plain = DrawOrder([10], [1], seed=1, shuffle=False, ranks=[ranks])
    assert [plain[place].row for place in range(10)] == [1, 3, 4, 8, 2, 6, 7, 0, 5, 9]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "easy": write(tmp_path / "easy.jsonl", [{"prompt": f"e{n}", "level": n % 5} for n in range(20)]),
        "hard": write(tmp_path / "hard.jsonl", [{"question": f"h{n}", "data_source": "own/name"} for n in range(6)]),
    }


def test_a_mixture_draws_from_each_source_by_its_weight_under_its_name(files: dict[str, str]) -> None:
    mixture = {
        "easy": {"path": files["easy"], "weight": 3},
        "hard": {"path": files["hard"], "prompt_column": "question"},
    }
    data = open_dataset(DataConfig(path="", mixture=mixture))
    assert (len(data), data.starts) == (26, (0, 20, 26))
    assert (data[19]["prompt"], data[20]["prompt"]) == ("e19", "h0")
    assert (data[0]["data_source"], data[20]["data_source"]) == ("easy", "own/name")
    assert data.where(21).endswith("hard.jsonl:2")
    assert [list(cast(PromptRows, part).check()) for part in data.parts] == [["easy"], ["own/name"]]
    names = SourceNames({"easy": 3.0, "hard": 1.0})
    assert Counter(names[index] for index in range(64)) == {"easy": 48, "hard": 16}


@pytest.mark.parametrize(
    ("where", "levels"),
    [
        ({"level": 3}, {3}),
        ({"level": [1, 4]}, {1, 4}),
        ({"level": {"min": 2}}, {2, 3, 4}),
        ({"level": {"min": 2, "max": 3}}, {2, 3}),
        ({"level": [1, 4], "info": {"kind": "odd"}}, {1}),
        ({"tags": "t2"}, {2}),
    ],
)
def test_rows_are_let_through_by_the_values_of_their_columns(
    tmp_path: Path, where: dict[str, Any], levels: set[int]
) -> None:
    rows = [
        {"prompt": "x", "level": n % 5, "info": {"kind": ("even", "odd")[n % 5 % 2]}, "tags": [f"t{n % 5}", "all"]}
        for n in range(25)
    ]
    data = open_dataset(DataConfig(path=write(tmp_path / "rows.jsonl", rows), where=where))
    assert len(data) == 5 * len(levels) and {data[row]["level"] for row in range(len(data))} == levels
    assert data.parts[0].unfiltered == 25
    assert {row["level"] for row in data.parts[0].scan(["level"])} == levels


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"where": {"level": "3"}}, r"data\.where\.level=3 keeps none of the 20 rows; .*easy\.jsonl:1: has level=0"),
        ({"where": {"grade": 3}}, r"no row has a column grade \(columns: prompt, level\)"),
        ({"where": {"prompt": {"min": 3}}}, r"easy\.jsonl:1: data\.where\.prompt\.min=3: 'e0' is not a number"),
        ({"order_by": "grade"}, r"easy\.jsonl:1: data\.order_by=grade .*it has level, prompt\. Fix"),
    ],
)
def test_a_filter_or_an_order_that_fits_no_row_is_refused(
    files: dict[str, str], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        open_dataset(DataConfig(path=files["easy"], **settings))


GIVEN = ["model.path=m", "reward.function=r.py:f"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["data.path=a.jsonl", "data.mixture.a.path=b.jsonl"], "data.path=a.jsonl and data.mixture both"),
        (["data.mixture.a.path=b.jsonl", "data.mixture.a.weight=0"], r"data\.mixture\.a\.weight must be .* above 0"),
        (["data.mixture.a.path=b.jsonl", "data.mixture.a.weight=nan"], "above 0"),
        (["data.mixture.a.path=b.jsonl", "data.mixture.a.wight=2"], r"mixture\.a\.wight: .*Did you mean `weight`"),
        (["data.mixture.a.weight=2"], r"data\.mixture\.a has no path"),
        (["data.mixture={a/b:x.jsonl}"], "must be 1 to 64 letters"),
        (["data.path=[]"], "a list of paths"),
        (["data.path={a:1}"], "a list of paths"),
        (["data.path=a.jsonl", "data.where.level={}"], r"data\.where\.level must be a value"),
        (["data.path=a.jsonl", "data.where.level.min=x"], r"data\.where\.level\.min must be a number"),
        (["data.path=a.jsonl", "data.args.x=1"], r"data\.args are arguments for a class"),
        ([], "data.path"),
    ],
)
def test_a_mixture_that_is_none_is_refused_with_the_settings(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config([*GIVEN, *settings])


def test_a_mixture_of_the_command_line_is_what_it_says_and_part_of_the_run(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    mixture = [
        "data.mixture.easy.path=easy.jsonl",
        "data.mixture.easy.where.level=[3,4]",
        "data.mixture.hard=hard.jsonl",
    ]
    config = load_config([*GIVEN, *mixture, "data.mixture.easy.weight=2"])
    easy, hard = sources(config.data)
    assert (easy.specs, easy.weight, str(easy.where[0])) == (
        ("easy.jsonl",),
        2.0,
        "data.mixture.easy.where.level=[3, 4]",
    )
    assert (hard.name, hard.specs, hard.weight, hard.where) == ("hard", ("hard.jsonl",), 1.0, ())
    assert config.data.path == ""
    other = load_config([*GIVEN, *mixture, "data.mixture.easy.weight=3"])
    assert run_digest(config) != run_digest(other)
    assert made_of(config)["data"] != made_of(other)["data"]
    whole = config_to_dict(config)
    whole["data"]["path"] = ["a.jsonl", "hf:x/y", "d/*.jsonl", "mine.py:Rows", "pkg.mod:Rows"]
    absolute = absolute_paths(whole)
    here = str(tmp_path)
    assert absolute["data"]["path"] == [
        f"{here}/a.jsonl",
        "hf:x/y",
        f"{here}/d/*.jsonl",
        f"{here}/mine.py:Rows",
        "pkg.mod:Rows",
    ]
    assert absolute["data"]["mixture"]["easy"]["path"] == f"{here}/easy.jsonl"
    assert absolute["data"]["mixture"]["hard"] == f"{here}/hard.jsonl"


def test_the_rows_of_one_file_are_known_by_the_fingerprint_they_always_had(tmp_path: Path) -> None:
    """Or a run that was begun before mixtures could not be resumed."""
    file = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    config = load_config([*GIVEN, f"data.path={file}"])
    assert made_of(config)["data"] == "e601cbfac65839ea"
    filtered = load_config([*GIVEN, f"data.path={file}", "data.where.prompt=a"])
    assert made_of(filtered)["data"] != made_of(config)["data"]


def test_the_mixture_of_the_docs_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (tmp_path / "my.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    found = sources(load_config([*GIVEN, *with_files([str(tmp_path / "my.yaml")])]).data)
    assert [(source.name, source.weight, source.prompt_column) for source in found] == [
        ("gsm8k", 2.0, "prompt"),
        ("math", 1.0, "problem"),
        ("mine", 1.0, "prompt"),
    ]
    assert found[1].specs == ("hf:DigitalLearningGmbH/MATH-lighteval:train",)
    assert found[1].where[0].values == ("Level 4", "Level 5")
