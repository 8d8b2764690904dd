"""Tests of `asyncrl settings`, its page, and settings in files."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.cli import local
from asyncrl.cli.arguments.parser import parser
from asyncrl.cli.arguments.settings_file import with_files
from asyncrl.cli.main import main
from asyncrl.cli.rerun import rerun_config
from asyncrl.cli.settings import SFT_HEAD, as_markdown, catalogue, matching
from asyncrl.config import (
    choice_values,
    config_dir,
    config_from_dict,
    config_keys,
    config_to_dict,
    default_settings,
    load_config,
    read_config,
    read_settings,
    settings_as_used,
    to_yaml,
)
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.settings.loss.meaning import resolve
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import SftConfig
from asyncrl.telemetry.folder.run_folder import RUN_FILE, changes_in, write_config

ROOT = Path(__file__).resolve().parents[2]
GIVEN = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:score"]


def test_every_setting_is_listed_with_its_type_and_meaning() -> None:
    settings = catalogue()
    assert [setting.key for setting in settings] == config_keys()
    assert [setting.key for setting in settings if not setting.meaning or not setting.kind] == []


def test_the_page_of_settings_is_what_the_schema_makes() -> None:
    said = "run: asyncrl settings --markdown > docs/settings.md"
    assert (ROOT / "docs" / "settings.md").read_text() == as_markdown(catalogue()), said


def test_the_settings_of_sft_have_a_page_of_their_own_with_the_meaning_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = catalogue(SftConfig)
    assert [setting.key for setting in settings if not setting.meaning or not setting.kind] == []
    said = "run: asyncrl settings --sft --markdown > docs/sft_settings.md"
    assert (ROOT / "docs" / "sft_settings.md").read_text() == as_markdown(settings, SFT_HEAD), said
    assert main(["settings", "--sft", "rows_per_step"]) == 0
    assert "learner.rows_per_step  (int, default 32; at least 1)" in capsys.readouterr().out
    file = tmp_path / "my.yaml"
    file.write_text("model.path: m\ndata:\n  path: d.jsonl\n  learn: last\nlearner: {lr: 1.0e-5, epochs: 3}\n")
    arguments = with_files([str(file), "learner.epochs=2"], SftConfig)
    assert not any(text.startswith("learner.lr") for text in arguments), "that holds anyway"
    given = load_sft(arguments)
    assert (given.model.path, given.data.learn, given.learner.epochs) == ("m", "last", 2)


def test_the_defaults_are_those_of_a_run_that_gives_nothing_else() -> None:
    config = dataclasses.asdict(load_config(GIVEN))
    for key, value in default_settings().items():
        if value != "???" and "${" not in str(value):
            room, _, name = key.rpartition(".")
            held = config
            for part in room.split(".") if room else []:
                held = held[part]
            assert held[name] == value, key


@pytest.mark.parametrize("experiment", ["lora", "ppo_gae", "gpu_example", "gdpo"])
def test_what_a_choice_is_said_to_change_is_what_it_changes(experiment: str) -> None:
    paths = GIVEN[:2] if experiment != "gpu_example" else GIVEN
    config = load_config([*paths, f"experiment={experiment}", "eval.path=e.jsonl"])
    for key, value in choice_values("experiment", experiment).items():
        held: object = config
        for part in key.split("."):
            held = held[part] if isinstance(held, dict) else getattr(held, part)
        assert held == value, key


def test_words_choose_by_key_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"replay.max_staleness", "replay.pipeline_depth"} <= {setting.key for setting in matching(["staleness"])}
    assert [setting.key for setting in matching(["replay.max", "STALENESS"])] == ["replay.max_staleness"]
    (setting,) = matching(["replay.max_staleness"])
    assert (setting.kind, setting.default, setting.allowed) == ("int", "4", "at least 0")
    assert setting.changed_by == ("replay=sync (0)",)
    assert main(["settings", "replay.max_staleness"]) == 0
    assert "default 4; at least 0" in capsys.readouterr().out
    assert main(["settings", "max_stalenes_"]) == 2
    assert "Did you mean `replay.max_staleness`?" in capsys.readouterr().err


def test_help_shows_the_way_to_the_settings() -> None:
    assert "asyncrl settings" in parser().format_help()


def test_a_file_of_one_s_own_is_overruled_by_what_is_typed_after_it(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "loss: ppo\nlearner: {lr: 2.0e-6, steps: 7}\nrun.name: '12'\n"
        "model:\n  lora_rank: 4\n  path: a b, c\n  lora_targets: [x, y]\n"
        "engine:\n  name: vllm\n  vllm:\n    gpu_memory_utilization: 0.5\nrollout.temperature: 1.0\n"
    )
    arguments = with_files([*GIVEN[1:], "learner.steps=3", str(file), "learner.lr=1e-5"])
    assert not any(text.startswith("rollout.temperature") for text in arguments), "that holds anyway"
    config = load_config(arguments)
    assert (config.loss.preset, config.learner.lr, config.learner.steps) == ("ppo", 1e-5, 7)
    assert (config.run.name, config.model.path, config.model.lora_targets) == ("12", "a b, c", ["x", "y"])
    assert config.engine.vllm == {"gpu_memory_utilization": 0.5}


@pytest.mark.parametrize("once", ["overwrite=true", "resume=auto"])
@pytest.mark.parametrize("kind", [Config, SftConfig])
def test_a_copy_of_a_run_s_settings_neither_overwrites_that_run_nor_goes_on_in_it(
    kind: type, once: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = load_config if kind is Config else load_sft
    needed = GIVEN if kind is Config else ["model.path=m", "data.path=d"]
    file = tmp_path / "my.yaml"
    file.write_text(to_yaml(settings_as_used(load([*needed, "run.name=first", once]))))
    copied = load(with_files([str(file)], kind))
    assert (copied.run.dir, copied.resume, copied.overwrite) == ("runs/first", "never", False)
    assert f"{once.partition('=')[0]}=" in capsys.readouterr().err, "it is said"
    second = load(with_files([str(file), "run.name=second"], kind))
    assert (second.run.name, second.run.dir, second.overwrite) == ("second", "runs/second", False)
    typed = load(with_files([str(file), "resume=auto", "run.dir=x"], kind))
    assert (typed.run.dir, typed.resume, typed.overwrite) == ("x", "auto", False)


@pytest.mark.parametrize("kind", [Config, SftConfig])
def test_of_an_older_run_settings_that_do_nothing_are_passed_over(kind: type, tmp_path: Path) -> None:
    """They were refused nowhere when it began; a resume, an evaluation or an export is not stopped by them."""
    file = tmp_path / "config.yaml"
    file.write_text("model:\n  path: m\n  lora_rank: 0\n  lora_alpha: 64\ndata.path: d.jsonl\n")
    load = load_config if kind is Config else load_sft
    own = [*GIVEN[2:], str(file), "resume=auto"] if kind is Config else [str(file), "resume=auto"]
    with pytest.raises(ConfigError, match="lora_alpha=64 does nothing"):
        load(with_files(own, kind))
    (tmp_path / "run.json").write_text("{}")
    assert load(with_files(own, kind)).model.lora_alpha == 32


def test_a_file_may_lie_in_a_folder_named_after_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "lr=1e-5" / "my.yaml"
    file.parent.mkdir()
    file.write_text("learner.lr: 1.0e-5\n")
    assert load_config(with_files([*GIVEN, str(file)])).learner.lr == 1e-5


def test_a_file_may_have_aliases(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("eval: {every: &often 7}\nlearner: {save_every: *often}\n")
    assert read_settings(tmp_path / "my.yaml") == {"eval.every": 7, "learner.save_every": 7}


def test_a_file_that_is_not_there_or_no_settings_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no settings file .*mine\.yaml"):
        with_files([str(tmp_path / "mine.yaml")])
    many = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    texts = {"broken": "a: [1", "list": "- 1\n", "many": f"a0: &a0 [x]\n{many}", "itself": "a: &a [*a]\n"}
    for name, text in ((f"{name}.yaml", text) for name, text in texts.items()):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"settings file .*{name} cannot be read"):
            with_files([str(tmp_path / name)])
    (tmp_path / "typo.yaml").write_text("learner:\n  lrr: 1\n")
    with pytest.raises(ConfigError, match=r"learner\.lrr"):
        load_config(with_files([*GIVEN, str(tmp_path / "typo.yaml")]))


def finished_run(folder: Path, *settings: str) -> Path:
    """The folder of a run, as far as its `config.yaml` goes."""
    folder.mkdir(parents=True)
    (folder / RUN_FILE).write_text(json.dumps({"run_id": "r"}))
    config = load_config([*GIVEN, f"run.name={folder.name}", f"run.dir={folder}", *settings])
    write_config(config, folder)
    return folder / "config.yaml"


def test_the_config_of_a_run_repeats_it_in_a_new_folder(tmp_path: Path) -> None:
    settings = ["loss=cispo", "loss.ratio_cap=4", "replay=sync", "experiment=gpu_example", "learner.steps=9"]
    file = finished_run(tmp_path / "x", *settings, "replay.address=tcp://127.0.0.1:20001", "resume=auto")
    again, first = load_config(with_files([str(file)])), load_config([*GIVEN, *settings])
    assert Path(again.run.dir) == tmp_path / "x-2" and again.run.name == "x-2"
    assert (again.resume, again.replay.address) == (first.resume, first.replay.address)
    assert resolve(again.loss) == resolve(first.loss)
    for config in (again, first):
        config.run, config.loss = type(config.run)(), type(config.loss)()
    assert again == first
    (tmp_path / "x-2").mkdir()
    assert load_config(with_files([str(file)])).run.name == "x-3"


def test_what_is_typed_after_the_config_of_a_run_wins_groups_too(tmp_path: Path) -> None:
    file = str(finished_run(tmp_path / "x", "loss=cispo", "loss.ratio_cap=4", "replay.max_staleness=8"))
    config = load_config(with_files([file, "loss=ppo", "replay=sync", "run.name=mine"]))
    assert (config.loss.preset, config.loss.ratio_cap) == ("ppo", None)
    assert (config.replay.max_staleness, config.run.dir) == (0, "runs/mine")
    resumed = load_config(with_files([file, "resume=auto"]))
    assert (Path(resumed.run.dir), resumed.resume) == (tmp_path / "x", "auto")


def test_a_secret_that_was_blotted_out_is_not_repeated(tmp_path: Path) -> None:
    secret = "api_key: sesame, keys: [sesame], judges: [{token: sesame}], hub: {secret: sesame, name: n}"
    args = f"{{{secret}, url: u, stop: ['***'], key_env: JUDGE}}"
    file = finished_run(tmp_path / "x", "replay.keys=somewhere", f"reward.args={args}")
    assert "sesame" not in file.read_text()
    assert load_config(with_files([str(file)])).reward.args == {
        "url": "u",
        "hub": {"name": "n"},
        "judges": [{}],
        "stop": ["***"],
        "key_env": "JUDGE",
    }
    assert "'***'" in file.read_text()
    assert [text.count("***") for text in with_files([str(file)]) if "***" in text] == [1], "the stop text"


DOLLARS = ["${", "in ${x}$ or ${oc.env:HOME} a\\\\${b} \\${c} it\\'s {}\\"]


@pytest.mark.parametrize("text", DOLLARS)
def test_a_text_with_a_dollar_and_a_brace_stays_what_it_is_on_all_ways(text: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(to_yaml({"environment": {"args": {"system": text}}}))

    config = load_config(with_files([*GIVEN, str(tmp_path / "my.yaml"), f"run.dir={tmp_path / 'x'}"]))
    (tmp_path / "x").mkdir()
    write_config(config, tmp_path / "x")
    (tmp_path / "x" / RUN_FILE).write_text('{"run_id": "r"}')
    file = tmp_path / "x" / "config.yaml"
    repeated = load_config(with_files([str(file)]))
    again = rerun_config(file.parent, [])

    sent = config_from_dict(config_to_dict(config))
    assert {each.environment.args["system"] for each in (config, sent, read_config(file), repeated, again)} == {text}
    assert changes_in(replace(config, resume="auto")) == []


def test_a_reference_in_the_config_of_a_run_reads_no_variable_of_who_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    file = finished_run(tmp_path / "x")
    file.write_text(file.read_text().replace("path: m\n", "path: ${oc.env:HF_TOKEN}\n"))

    assert read_config(file).model.path == "${oc.env:HF_TOKEN}"


def test_the_command_takes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(local, "main", lambda overrides: given.append(list(overrides)) or 0)
    file = tmp_path / "my.yaml"
    file.write_text("learner.lr: 2.0e-6\n")
    assert main(["local", str(file), "seed=1"]) == 0
    assert given == [["learner.lr=2e-06", "seed=1"]]
    assert config_dir().is_dir()
