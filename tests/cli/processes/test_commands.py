"""The command lines of the roles."""

from __future__ import annotations

from pathlib import Path

from asyncrl.cli.processes.commands import learner_command, local_commands, tell_commands
from asyncrl.config import load_config

REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"]


def test_every_role_gets_the_overrides_unchanged_plus_address_and_run_folder(tmp_path: Path) -> None:
    overrides = [*REQUIRED, "run.name='x'", f"run.dir={tmp_path}/a b"]
    commands = local_commands(load_config(overrides), overrides, "id")
    assert [command.role for command in commands] == ["replay", "rollout", "learner"]
    settings = [command.arguments[-len(overrides) - 1 :] for command in commands]
    assert settings[0] == settings[1] == settings[2]
    assert list(settings[0][: len(overrides) - 1]) == overrides[:-1]
    composed = load_config(settings[0])
    assert composed.run.dir == f"{tmp_path}/a b"
    assert composed.replay.address.startswith("tcp://127.0.0.1:")


def test_two_local_runs_get_different_ports() -> None:
    addresses = {local_commands(load_config(REQUIRED), REQUIRED, "id")[0].arguments[-1] for _ in range(5)}
    assert len(addresses) > 1


def test_an_address_the_user_named_is_kept() -> None:
    overrides = [*REQUIRED, "replay.address=tcp://127.0.0.1:5577"]
    command = local_commands(load_config(overrides), overrides, "id")[0]
    assert [text for text in command.arguments if text.startswith("replay.address=")] == overrides[-1:]


def test_the_learner_runs_under_torchrun_with_restarts_and_a_rendezvous_on_loopback() -> None:
    config = load_config([*REQUIRED, "learner.ranks=2", "learner.max_restarts=5"])
    shown = str(learner_command(config, REQUIRED, "id7"))
    for part in (
        "python -m asyncrl.learner.torchrun",
        "--nproc-per-node=2",
        "--max-restarts=5",
        "--rdzv-id=id7",
        "--rdzv-backend=bound --rdzv-endpoint=127.0.0.1:0",
        "-m asyncrl.learner model.path=m",
    ):
        assert part in shown


def test_the_start_shows_each_role_without_what_all_have_and_keeps_the_whole(tmp_path: Path) -> None:
    overrides = [*REQUIRED[::2], f"data.path={'x' * 700}.jsonl", f"run.dir={tmp_path}/run"]
    commands = local_commands(load_config(overrides), overrides, "id")
    lines = tell_commands(commands, ["asyncrl", "local", "mine.yaml", "seed=3"], tmp_path / "logs")
    assert lines[:3] == [
        "replay: python -m asyncrl.replay",
        "rollout: python -m asyncrl.rollout",
        "learner: python -m asyncrl.learner.torchrun --nproc-per-node=1 -m asyncrl.learner",
    ]
    assert lines[3] == "each with the settings mine.yaml seed=3" and max(map(len, lines)) < 100 + len(str(tmp_path))
    whole = (tmp_path / "logs" / "commands.txt").read_text().splitlines()
    assert whole == [f"{command.role}: {command}" for command in commands]
