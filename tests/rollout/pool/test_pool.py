from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config import config_from_dict, config_to_dict
from asyncrl.errors import ConfigError
from asyncrl.rollout import host as host_module
from asyncrl.rollout.host import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, WorkerExit, WorkerSpec, run_worker_here
from asyncrl.rollout.pool import pool as pool_module
from asyncrl.rollout.pool.log_tail import last_line
from asyncrl.rollout.pool.pool import RolloutPool, pool_number, restart_delay_s, run_pool
from asyncrl.rollout.pool.specs import worker_specs
from asyncrl.rollout.worker import process
from asyncrl.rollout.worker.watchdog import EndWatch
from asyncrl.schema import Config, DataConfig, EvalConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig
from asyncrl.utils.restart_policy import Restarts

pytestmark = pytest.mark.timeout(400)


class ScriptedHost:
    """Each start of a worker ends with the next code of its script; after the last one it runs on."""

    def __init__(self, scripts: dict[str, list[int]]) -> None:
        self.scripts = scripts
        self.starts: list[tuple[str, int]] = []
        self.ended: list[WorkerExit] = []
        self.closed = False

    said, elsewhere = "", False
    log: tuple[str, ...] = ()

    def start(self, spec: WorkerSpec) -> None:
        self.starts.append((spec.name, spec.restart))
        if self.scripts[spec.name]:
            code = self.scripts[spec.name].pop(0)
            self.ended.append(
                WorkerExit(
                    name=spec.name, code=code, how="as scripted", said=self.said, log=self.log, elsewhere=self.elsewhere
                )
            )

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        time.sleep(0.001)
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        self.closed = True


def spec(name: str, log_path: str = "/nowhere/worker.log") -> WorkerSpec:
    return WorkerSpec(name=name, restart=0, log_path=log_path, run_digest="d", config={})


def run(scripts: dict[str, list[int]], max_restarts: int = 3) -> tuple[int, ScriptedHost]:
    host = ScriptedHost(scripts)
    return RolloutPool([spec(name) for name in scripts], host, max_restarts=max_restarts).run(), host


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_DELAY_S", 0.01)


def test_the_pool_ends_well_when_all_workers_stopped_and_says_before_where_each_writes(capfd):
    code, host = run({"a": [EXIT_STOPPED], "b": [EXIT_STOPPED]})
    assert (code, host.closed) == (0, True)
    said = [f"worker {name} is starting; its log: /nowhere/worker.log" for name in "ab"]
    assert capfd.readouterr().err.splitlines() == said


def test_a_dead_worker_is_started_again_as_a_fresh_one_and_named(capfd):
    code, host = run({"a": [EXIT_FAILED, EXIT_FAILED, EXIT_STOPPED], "b": [EXIT_STOPPED]})
    assert code == 0
    assert [restart for name, restart in host.starts if name == "a"] == [0, 1, 2]
    said = capfd.readouterr().err
    assert "worker a died" in said and "as scripted" in said and "Restart 2 of at most 3" in said


def test_a_worker_that_dies_too_often_fails_the_run_and_the_others_are_stopped(capfd):
    code, host = run({"a": [EXIT_FAILED] * 3, "b": []}, max_restarts=2)
    assert (code, host.closed) == (1, True)
    assert "rollout.max_worker_restarts=2" in capfd.readouterr().err


def test_a_refusal_fails_the_run_at_once(capfd):
    code, host = run({"a": [EXIT_REFUSED], "b": []})
    assert (code, len(host.starts)) == (1, 2)
    assert "A restart cannot help" in capfd.readouterr().err


def test_a_signal_ends_the_pool_and_closes_the_host():
    host = ScriptedHost({"a": []})
    pool = RolloutPool([spec("a")], host, max_restarts=3)
    pool.stop(signal.SIGTERM)
    assert (pool.run(), host.closed) == (128 + signal.SIGTERM, True)


def test_what_died_an_hour_ago_counts_no_more(monkeypatch, capfd):
    at = iter(range(0, 40_000, 1000))  # a clock that is asked three times for each restart
    monkeypatch.setattr(pool_module, "Restarts", lambda limit: Restarts(limit, clock=lambda: next(at)))
    code, host = run({"a": [*[EXIT_FAILED] * 5, EXIT_STOPPED]}, max_restarts=2)
    assert (code, len(host.starts)) == (0, 6)
    assert host.starts[-1] == ("a", 5), "and each start has a number of its own"


def test_what_a_worker_on_another_machine_said_last_is_told_here(capfd, monkeypatch):
    monkeypatch.setattr(ScriptedHost, "elsewhere", True)
    run({"a": [EXIT_FAILED], "b": [EXIT_FAILED] * 9}, max_restarts=0)
    assert "(as scripted): its log could not be read" in capfd.readouterr().err
    monkeypatch.setattr(ScriptedHost, "said", "ConfigError: model.path=/models/m is not here")
    run({"a": [EXIT_FAILED]}, max_restarts=0)
    assert "(as scripted): ConfigError: model.path=/models/m is not here" in capfd.readouterr().err


def test_a_worker_that_dies_young_waits_longer_each_time_and_an_old_one_not_at_all(monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_DELAY_S", 10.0)
    young = [restart_delay_s(restarts, 1.0) for restarts in range(8)]
    assert young == sorted(young) and young[0] <= 0.5 and young[-1] == 10.0
    assert restart_delay_s(5, 3600.0) == 0.0


def test_the_last_line_of_a_log_is_the_last_that_says_something(tmp_path):
    log = tmp_path / "worker.log"
    log.write_bytes(b"first\nWireError: \xff broken\n\n  \n")
    assert last_line(str(log)).startswith("WireError:")
    assert last_line("/nowhere/worker.log") == "it ended before it opened its log"
    assert last_line(str(log), log.stat().st_size) == "it ended before it wrote a line"
    assert "cannot be read: Is a directory" in last_line(str(tmp_path))


def test_a_worker_that_is_killed_before_its_log_opens_does_not_end_with_the_words_of_the_one_before(tmp_path, capfd):
    """It read `no log on this machine`, or, after a restart, the error of its predecessor."""
    log = tmp_path / "worker.log"
    RolloutPool([spec("a", str(log))], ScriptedHost({"a": [EXIT_FAILED]}), max_restarts=0).run()
    assert "(as scripted): it ended before it opened its log" in capfd.readouterr().err
    log.write_text("WireError: of another worker\n")
    RolloutPool([spec("a", str(log))], ScriptedHost({"a": [EXIT_FAILED]}), max_restarts=0).run()
    assert "(as scripted): it ended before it wrote a line" in capfd.readouterr().err


def test_the_end_of_a_log_on_another_machine_is_told_with_the_death(capfd):
    host = ScriptedHost({"a": [EXIT_REFUSED]})
    host.said, host.log = "ConfigError: no", ("first", "ConfigError: no")
    assert RolloutPool([spec("a")], host, max_restarts=3).run() == 1
    said = capfd.readouterr().err
    assert "pool: The end of its log, there:\npool:     first\npool:     ConfigError: no\n" in said


def make_config(tmp_path: Path, **rollout) -> Config:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a>", "answer": "a"}\n')
    return Config(
        run=RunConfig(name="r", dir="runs/r"),
        model=ModelConfig(path="model"),
        data=DataConfig(path="rows.jsonl"),
        reward=RewardConfig(function="rewards/mine.py:score"),
        eval=EvalConfig(
            path="rows.jsonl",
            sets={
                "plain": "rows.jsonl",
                "own": {
                    "path": "rows.jsonl",
                    "reward": {"functions": {"a": "r.py:a", "b": {"function": "f1", "weight": 2}}},
                    "environment": "e.py:E",
                },
            },
        ),
        rollout=RolloutConfig(**rollout),
    )


def test_a_worker_gets_absolute_paths_and_a_config_it_can_rebuild(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = make_config(tmp_path, workers=2)
    config.environment.name = "own.py:Own"
    first, second = worker_specs(config)
    assert first.name != second.name
    assert first.log_path == str(tmp_path / "runs/r/logs/rollout-0.log")
    rebuilt = config_from_dict(json.loads(json.dumps(first.config)))
    assert rebuilt.data.path == rebuilt.eval.path == str(tmp_path / "rows.jsonl")
    assert rebuilt.eval.sets == {
        "plain": str(tmp_path / "rows.jsonl"),
        "own": {
            "path": str(tmp_path / "rows.jsonl"),
            "reward": {"functions": {"a": f"{tmp_path}/r.py:a", "b": {"function": "f1", "weight": 2}}},
            "environment": f"{tmp_path}/e.py:E",
        },
    }
    assert rebuilt.model.path == str(tmp_path / "model")
    assert rebuilt.reward.function == f"{tmp_path}/rewards/mine.py:score"
    assert rebuilt.environment.name == f"{tmp_path}/own.py:Own"
    assert rebuilt.rollout == config.rollout
    assert first.environment["OMP_NUM_THREADS"] == "1"
    assert config.data.path == "rows.jsonl"


def test_a_worker_finds_the_files_that_tools_are_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text("")
    config = make_config(tmp_path)
    config.environment.name = "tools"
    config.environment.args = {
        "functions": ["tools.py:add", "package.module:sub"],
        "mcp": ["python server.py --name 'a b'"],
        "system": "see server.py:add",
    }
    args = worker_specs(config)[0].config["environment"]["args"]
    assert args["functions"] == [f"{tmp_path}/tools.py:add", "package.module:sub"]
    assert args["mcp"] == [f"python {tmp_path}/server.py --name 'a b'"]
    assert args["system"] == "see server.py:add" and config.environment.args["functions"][0] == "tools.py:add"


@pytest.mark.parametrize(
    ("name", "key", "given"), [("openai", "agent", "agent.py:run"), ("search", "corpus", "passages.jsonl")]
)
def test_a_worker_finds_the_file_that_an_environment_is_given(tmp_path, monkeypatch, name, key, given):
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path)
    config.environment.name, config.environment.args = name, {key: given, "max_calls": 3}
    args = worker_specs(config)[0].config["environment"]["args"]
    assert args == {key: f"{tmp_path}/{given}", "max_calls": 3}


def test_pools_that_run_together_have_names_and_logs_of_their_own(tmp_path):
    config = make_config(tmp_path, workers=2)
    with pool_number(tmp_path / "logs") as first, pool_number(tmp_path / "logs") as second:
        assert (first, second) == (0, 1)
        logs = {spec.log_path for number in (first, second) for spec in worker_specs(config, number)}
        assert len(logs) == 4
    with pool_number(tmp_path / "logs") as again:
        assert again == 0, "a pool that ended left its number to the next"
    assert worker_specs(config)[0].name.endswith(f".{os.getpid()}")


def test_a_hub_model_and_a_module_reward_are_left_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path)
    config.model.path, config.reward.function = "org/model", "package.module:score"
    plain = worker_specs(config)[0].config
    assert (plain["model"]["path"], plain["reward"]["function"]) == ("org/model", "package.module:score")


def test_a_config_of_another_version_is_refused(tmp_path):
    values = config_to_dict(make_config(tmp_path))
    values["rollout"]["colour"] = "red"
    with pytest.raises(ConfigError, match="colour"):
        config_from_dict(values)


def test_an_unknown_host_is_found_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"rollout\.host='cloud'"):
        run_pool(make_config(tmp_path, host="cloud"))


def test_the_pool_reads_no_row_again_that_its_command_has_looked_at(tmp_path, monkeypatch):
    """At a hundred thousand rows a second look costs seconds of every start and of every restart."""
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path, host="process")
    (tmp_path / "rows.jsonl").write_text("{}\n")

    class Reached(Exception):
        pass

    def beyond(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(pool_module, "pool_number", beyond)
    with pytest.raises(Reached):
        run_pool(config)


def test_the_pool_loads_neither_torch_nor_ray():
    code = (
        "import sys, asyncrl.rollout.__main__, asyncrl.rollout.pool.process_host;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'transformers')))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_a_worker_ended_by_a_signal_was_not_stopped_by_the_run_and_is_worth_a_restart(tmp_path, monkeypatch, capfd):
    async def until_signal(config: Config, name: str, digest: str, ending: EndWatch) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)

    monkeypatch.setattr(process, "run_worker", until_signal)
    monkeypatch.setattr(process, "redirect_output", lambda path: None)
    (worker,) = worker_specs(make_config(tmp_path, workers=1))
    assert process.run_worker_process(worker) == EXIT_FAILED
    assert "signal" in capfd.readouterr().out


def test_an_environment_that_exits_in_a_task_of_its_own_is_no_stop_of_the_run(tmp_path, monkeypatch, capfd):
    async def leaving() -> None:
        sys.exit(0)

    async def leaves(config: Config, name: str, digest: str, ending: EndWatch) -> None:
        await asyncio.create_task(leaving())

    monkeypatch.setattr(process, "run_worker", leaves)
    monkeypatch.setattr(process, "redirect_output", lambda path: None)
    (worker,) = worker_specs(make_config(tmp_path, workers=1))
    assert process.run_worker_process(worker) == EXIT_FAILED
    assert "leaving" in capfd.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(ModuleNotFoundError, EXIT_REFUSED), (ImportError, EXIT_FAILED)])
def test_what_a_worker_cannot_import_stands_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[ImportError], code: int
) -> None:
    """A missing package was ten restarts with `no log on this machine`, and no word of who asked for it."""

    def missing(_module: str) -> None:
        raise error("No module named 'httpx'")

    monkeypatch.setattr(host_module, "load", missing)
    log = tmp_path / "logs" / "rollout-0.log"
    assert run_worker_here(spec("a", str(log))) == code
    assert "in missing" in log.read_text() and last_line(str(log)) == f"{error.__name__}: No module named 'httpx'"
