from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.cli import local, quickstart, verify
from asyncrl.cli.main import COMMANDS, main
from asyncrl.config import config_dir
from asyncrl.memory.model_size import ModelSize, kv_values, model_size, tensor_shapes
from asyncrl.quickstart import prepare as preparing
from asyncrl.quickstart import smoke
from asyncrl.quickstart.recipes import AgentRecipe, WarmupRecipe
from asyncrl.telemetry.live.console import PlainConsole


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name in ("d.jsonl", "e.jsonl"):
        Path(name).write_text('{"prompt": "2 + 2 =", "answer": "4"}\n')
    Path("r.py").write_text("def score(completion, row):\n    return float(completion == row['answer'])\n")
    return ["model.path=org/name", "data.path=d.jsonl", "reward.function=r.py:score", "eval.path=e.jsonl"]


def test_help_and_import_load_no_torch_and_no_ray() -> None:
    code = (
        "import sys, asyncrl\nfrom asyncrl.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("arguments", [["metrics"], ["local", "model.path=m"]])
def test_output_that_nobody_reads_any_more_ends_a_command_quietly_and_a_run_with_a_word(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def says_much(_: object) -> int:
        PlainConsole().print("line\n" * 20000)
        return 0

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        if arguments[0] in COMMANDS:
            monkeypatch.setattr("asyncrl.cli.main.run", says_much)
        assert main(arguments) == 141
    assert ("nothing reads its output" in capsys.readouterr().err) == (arguments[0] in COMMANDS)


def test_a_command_that_was_started_without_a_stdout_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["metrics"]) == 0


EXPERIMENTS = [file.stem for file in config_dir().glob("experiment/*.yaml") if file.stem not in smoke.SMOKES]
ROLES = [name for name in COMMANDS if name not in ("quickstart", "local")]
"""Of an experiment each shows a part of what `local` shows."""


@pytest.mark.parametrize(
    ("command", "experiment"),
    [
        *(("local", experiment) for experiment in ("null", *EXPERIMENTS)),
        *((role, experiment) for role in ROLES for experiment in ("null", "ppo_gae", "tools_quickstart")),
    ],
)
def test_dry_run_works_for_every_command_and_experiment_and_starts_nothing(
    command: str,
    experiment: str,
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    chosen = [] if experiment == "null" else [f"experiment={experiment}"]
    if experiment == "search_quickstart":  # the quickstart makes it
        Path("corpus.jsonl").write_text('{"contents": "one"}\n')
        chosen.append("environment.args.corpus=corpus.jsonl")
    assert main([command, *chosen, *files, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    for part in (
        "processes",
        "learning",
        "loss: preset=",
        "learner.lr=",
        "batch",
        "staleness",
        "memory",
        "a lead of",
        "nothing was started",
    ):
        assert part in plan
    assert not Path("runs").exists()


def test_the_plan_shows_the_arithmetic(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["learner.groups_per_step=4", "rollout.group_size=3", "data.max_prompt_tokens=10"]
    settings += ["rollout.max_new_tokens=20", "learner.max_tokens_per_microbatch=100", "learner.ranks=2"]
    assert main(["local", *files, *settings, "replay.pipeline_depth=1", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "4 groups * 3 = 12 sequences" in plan
    assert "at most 12 * (10 prompt + 20 new) = 360 tokens" in plan
    assert "at most about 3 micro-batches of 100 tokens, 400 in attention, per rank" in plan
    assert "(trained steps + 1 + 1) * 4 groups, so a lead of 8 groups" in plan
    assert "2 rank(s) under torchrun" in plan


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """As `model.path`, for what is counted."""
    header = b'{"model.norm.weight":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "num_hidden_layers": 3, "hidden_size": 64}')
    return f"model.path={tmp_path}"


@pytest.mark.parametrize(
    ("gpus", "told"), [("0,1,2,3,4,5,6,7", []), ("0", []), ("0", ["placement.mode=dedicated"]), ("-1", [])]
)
def test_the_plan_of_one_role_asks_for_no_gpus_of_the_others(
    gpus: str,
    told: list[str],
    files: list[str],
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the numbers of a run whose engines have machines of their own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    settings = [*files, folder, "learner.ranks=8", "rollout.workers=24", *told]
    assert main(["replay", *settings, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "for buckets of weights that are being sent" in said
    if len(gpus) > 1:
        assert main(["learner", *settings, "model.path=org/name", "--dry-run"]) == 0


def test_ranks_are_counted_where_they_are_started(
    files: list[str], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`learner.ranks` is of `asyncrl local`. A torchrun of one's own has its own number, which others do not know."""
    for command, told in (("replay", [folder]), ("rollout", [])):
        assert main([command, *files, *told, "learner.replicas=2", "--dry-run"]) == 0
        assert ("Give learner.ranks" in capsys.readouterr().out) == (command == "replay")
    for command in ("local", "learner"):
        assert main([command, *files, "learner.replicas=2", "--dry-run"]) == 2
        assert "learner.ranks=1 must be a multiple of learner.replicas=2" in capsys.readouterr().err
        assert main([command, *files, "learner.replicas=2", "learner.ranks=4", "--dry-run"]) == 0


def test_the_plan_says_what_is_compiled(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for compiled in (False, True):
        assert main(["local", *files, f"model.compile={str(compiled).lower()}", "--dry-run"]) == 0
        said = "model.compile=true: torch.compile compiles the learner's decoder layers before the first step"
        assert (said in capsys.readouterr().out) == compiled


def test_the_plan_of_one_role_shows_only_its_process(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", *files, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "-m asyncrl.rollout" in plan
    assert "-m asyncrl.learner" not in plan


OWN = (
    "class Own:\n    async def run(self, prompt, size, tools):\n        raise NotImplementedError\n\nclass NoRun: ...\n"
)


def test_the_plan_names_an_environment_of_the_user_and_where_the_reference_is(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(OWN)
    settings = [*files, "environment.name=own.py:Own", "advantage.kl_coef=0.1", "reference.path=rollout"]
    assert main(["local", *settings, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "environment own.py:Own" in plan
    assert "no reference model: its log-probs come with the trajectories" in plan


@pytest.mark.parametrize(
    ("command", "name", "says"),
    [
        (["local"], "own.py:NoRun", "NoRun has no run"),
        (["rollout", "--dry-run"], "own.py:Onw", "own.py has no 'Onw'. It defines: NoRun, Own"),
    ],
)
def test_an_environment_that_could_not_run_is_refused_before_a_start(
    files: list[str], capsys: pytest.CaptureFixture[str], command: list[str], name: str, says: str
) -> None:
    Path("own.py").write_text(OWN)
    assert main([*command, *files, f"environment.name={name}"]) == 2
    said = capsys.readouterr().err
    assert "environment.name=" in said and says in said
    assert not Path("runs").exists()


def test_settings_may_follow_options(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", *files, "--dry-run", "seed=7"]) == 0
    assert "seed 7" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["local", *files, "--seed=7"])
    assert "settings are key=value, without dashes" in capsys.readouterr().err


def test_the_plan_of_one_role_has_the_address_that_the_role_would_take(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *files, "--dry-run"]) == 0
    assert "replay.address=" not in capsys.readouterr().out, "only `local` finds a free port"


def test_a_refused_setting_ends_with_2_and_the_reason(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", *files, "replay.pipeline_depth=9"]) == 2
    assert "replay.pipeline_depth must be between 0" in capsys.readouterr().err


def test_files_that_are_missing_are_named_before_anything_starts(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["local", *files, "data.path=nowhere.jsonl"]) == 2
    assert "data.path=nowhere.jsonl: there is no such file" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_used_run_folder_is_refused_before_anything_starts(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/run").mkdir(parents=True)
    Path("runs/run/run.json").write_text('{"run_id": "earlier"}')
    assert main(["local", *files]) == 2
    assert main(["local", *files, "--dry-run"]) == 2
    assert "resume=auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a/logs"), 2, "'runs/a/logs'. Free space"),
        (OSError(errno.EACCES, "Permission denied", "m/config.json"), 2, "'m/config.json'. Ask its owner to give this"),
    ],
)
def test_ctrl_c_and_a_full_disk_end_a_command_with_one_line(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(_: object) -> int:
        raise raised

    monkeypatch.setattr(local, "main", ends)
    assert main(["local"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_any_other_error_of_the_system_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(_: object) -> int:
        raise ConnectionResetError("of some socket")

    monkeypatch.setattr(local, "main", ends)
    with pytest.raises(ConnectionResetError):
        main(["local"])


@pytest.mark.parametrize("command", ["audit", "rerun", "verify"])
def test_a_run_that_is_not_there_is_said_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "no run")]) == 2
    assert "no run is not a folder here" in capsys.readouterr().err


def test_a_run_that_is_missing_is_not_looked_for_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    asked: list[str] = []
    monkeypatch.setattr(verify, "main", lambda path, _: asked.append(path) or 0)
    for missing in ("runs/none", "elsewhere/none", "none", "some/deep/folder", "./none"):
        assert main(["verify", missing]) == 2
        assert f"{missing} is not a folder here" in capsys.readouterr().err
    assert main(["verify", "first"]) == 2
    assert "Did you mean runs/first?" in capsys.readouterr().err
    assert main(["verify", "runs/first"]) == main(["verify", "org/name"]) == 0
    assert asked == ["runs/first", "org/name"]
    assert "taken as a name on the Hugging Face hub" in capsys.readouterr().err


def test_keys_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path / "keys")]) == 0
    assert (tmp_path / "keys" / "server.key_secret").stat().st_mode & 0o077 == 0
    assert main(["keys", str(tmp_path / "keys")]) == 2


def test_parameters_are_counted_from_the_headers_alone(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert tensor_shapes(tmp_path / "model.safetensors") == {"a": [3, 4]}
    assert model_size(tmp_path) is None, "no config.json: not a model folder"
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "num_hidden_layers": 3, "hidden_size": 64}')
    size = model_size(tmp_path)
    assert size is not None
    assert (size.parameters, size.kv_values_per_token) == (12, 2 * 3 * 2 * 32)


def test_adapters_are_counted_by_the_layers_they_are_for() -> None:
    matrices = {"model.layers.0.mlp.up_proj": (8, 3), "model.layers.0.self_attn.q_proj": (3, 3)}
    size = ModelSize(parameters=100, kv_values_per_token=1, shapes={}, sizes=None, matrices=matrices)
    assert size.trained(2, []) == 2 * (8 + 3) + 2 * (3 + 3)
    assert size.trained(2, ["q_proj"]) == size.trained(1, ["0.self_attn.q_proj"]) * 2 == 12


def test_grouped_query_heads_and_an_explicit_head_dim_are_respected() -> None:
    model = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 4}
    assert kv_values(model) == 2 * 4 * 2 * 128
    assert kv_values({}) == 0


@pytest.mark.parametrize("typed", [[], *([f"experiment={name}"] for name in preparing.AGENT_OF)])
def test_the_quickstart_makes_its_files_once_and_then_starts_with_them(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    made: list[Path] = []

    def fake_warm_up(target: Path, recipe: WarmupRecipe) -> None:
        target.mkdir(parents=True)
        made.append(target)

    monkeypatch.setattr(preparing, "warm_up", fake_warm_up)
    recipe = preparing.recipe_of(typed)
    first = preparing.prepare(recipe)
    assert preparing.prepare(recipe) == first
    assert len(made) == 1
    corpus = {"corpus.jsonl"} if "experiment=search_quickstart" in typed else set[str]()
    assert {path.name for path in first.iterdir()} == {"model", "train.jsonl", "heldout.jsonl"} | corpus
    given = [text for text in preparing.quickstart_overrides(first, typed) if text.startswith("environment.")]
    assert given == [f"environment.args.corpus={first / name}" for name in corpus]
    assert list(tmp_path.iterdir()) == [first], "nothing half-made is left"
    others = [replace(recipe, seed=1), AgentRecipe() if type(recipe) is WarmupRecipe else WarmupRecipe()]
    assert first not in [preparing.cache_folder(other) for other in others]


MAKES = """
import sys
from pathlib import Path
from asyncrl.quickstart.prepare import scratch_beside
with scratch_beside(Path(sys.argv[1])) as made:
    made.mkdir()
    print(made, flush=True)
    input()
"""


def test_what_a_killed_quickstart_left_half_made_is_removed_by_the_next_that_makes_something(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    makers = [subprocess.Popen([sys.executable, "-c", MAKES, str(tmp_path / name)], **pipes) for name in "ab"]
    try:
        killed, used = (Path(maker.stdout.readline().strip()) for maker in makers if maker.stdout)
        makers[0].kill()
        makers[0].wait()
        with preparing.scratch_beside(tmp_path / "c") as made:
            made.mkdir()
        assert not killed.exists() and used.exists()
        makers[1].communicate("\n")
        assert {path.name for path in tmp_path.iterdir()} == {"b", "c"}
    finally:
        for maker in makers:
            maker.kill()
            maker.communicate()


@pytest.mark.parametrize("cache", ["~nobody-of-this-name/x", "d.jsonl/x"])
def test_a_cache_that_cannot_be_made_is_an_error_with_the_variable_to_set(
    cache: str, files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", cache)
    assert main(["quickstart"]) == 2
    assert "Set ASYNCRL_CACHE=DIR" in capsys.readouterr().err


def test_a_warm_up_that_cannot_be_started_is_not_blamed_on_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    assert main(["quickstart"]) == 2
    said = capsys.readouterr().err
    assert "the warm-up cannot be started" in said and "no-python" in said and "ASYNCRL_CACHE" not in said


@pytest.mark.parametrize(
    ("name", "refused"),
    [("quickstart", "run.dir=a/ü"), ("search_quickstart", "loss=custom"), ("reward_model", "seed=x")],
)
def test_the_quickstart_refuses_settings_before_it_makes_a_model(
    name: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(preparing, "prepare", lambda recipe: pytest.fail("made before it was refused"))
    assert main(["quickstart", f"experiment={name}", refused]) == 2
    assert "ConfigError" in capsys.readouterr().err
    with pytest.raises(pytest.fail.Exception, match="made before"):
        main(["quickstart", f"experiment={name}"])


def test_what_the_quickstart_says_to_type_is_what_was_typed() -> None:
    assert quickstart.command_of("/venv/bin/asyncrl") == ("asyncrl", "quickstart")
    assert quickstart.command_of("/checkout/asyncrl/cli/__main__.py") == ("bash", "launchers/quickstart.sh")


@pytest.mark.parametrize("sweep", [["-m", "seed=1,2"], ["--multirun", "seed=1,2"], ["seed=1,2"]])
def test_a_sweep_of_hydra_is_refused_with_what_to_do_instead(
    sweep: list[str], files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["local", *files, *sweep]) == 2
    assert "one run for each value" in capsys.readouterr().err


def test_the_user_s_settings_win_over_the_quickstart_s(tmp_path: Path) -> None:
    overrides = preparing.quickstart_overrides(tmp_path / "a b", ["data.path=mine.jsonl"])
    assert overrides[0] == "experiment=quickstart"
    assert overrides[-1] == "data.path=mine.jsonl"
    assert f"model.path='{tmp_path}/a b/model'" in overrides


def test_a_folder_where_a_file_should_be_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "metrics.jsonl").mkdir()
    assert main(["compare", str(tmp_path)]) == 2
    assert f"{str(tmp_path / 'metrics.jsonl')!r}: this must be a file" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").rmdir()  # the end of the session reads all metrics that tests wrote


@pytest.mark.parametrize("command", [["report", "RUN", "--to"], ["trace", "RUN", "--to"], ["plan", "--picture"]])
def test_where_a_file_has_no_place_is_said_before_it_is_made(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback, or a file beside the folder, after all had been read."""
    for place, said in ((tmp_path / "none" / "x.png", f"no folder {tmp_path / 'none'}"), (tmp_path, "is a folder")):
        assert main([*command, str(place)]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "--picture", str(tmp_path / "x.jpeg2")]) == 2
    assert ".png, .svg, .pdf" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [] and not tmp_path.with_name(f"{tmp_path.name}.tmp").exists()


def test_a_word_that_no_metric_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "goodput", "nonsense"]) == 2
    assert "no metric has goodput and nonsense" in capsys.readouterr().err
