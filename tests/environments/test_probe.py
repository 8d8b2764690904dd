"""What is known of a user environment before a start, without running it in this process."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from asyncrl.chat.choice import open_chat
from asyncrl.cli import local
from asyncrl.cli.dry_run import command as dry_run
from asyncrl.environments.episodes import Asked
from asyncrl.environments.probe import check_environment, foreseen
from asyncrl.environments.registry import ENVIRONMENTS, make_environment
from asyncrl.errors import ConfigError
from asyncrl.quickstart.byte_tokenizer import CHAT_TEMPLATE, save_byte_tokenizer
from asyncrl.schema import EnvironmentConfig, ModelConfig

SOUND = """
import os
from pathlib import Path

Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
print("hello " * 100_000)


class Own:
    async def run(self, prompt, size, tools):
        raise NotImplementedError
"""


def own(tmp_path: Path, text: str, name: str = "Own") -> EnvironmentConfig:
    (tmp_path / "own.py").write_text(text)
    return EnvironmentConfig(name=f"{tmp_path}/own.py:{name}")


def test_the_code_of_an_environment_runs_in_another_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_environment(own(tmp_path, SOUND))
    assert int((tmp_path / "own.pid").read_text()) != os.getpid()
    assert not any(str(tmp_path) in str(getattr(each, "__file__", "")) for each in sys.modules.values())
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (SOUND, "Other", "has no 'Other'. It defines: Own"),
        ("raise OSError('no GPU')", "Own", "no GPU"),
        ("raise OSError('\\ud800')", "Own", "OSError"),
        ("import os; os._exit(7)", "Own", "importing it ended its process (exit code 7)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "Own", "signal SIGSEGV"),
        ("class Own: pass", "Own", "has no run"),
    ],
)
def test_a_refusal_says_why(tmp_path: Path, text: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_environment(own(tmp_path, text, name))
    assert said in str(error.value) and "own.py" in str(error.value)


def test_an_import_that_hangs_has_a_deadline_and_a_child_it_left_does_not_lengthen_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"took more than 1\.5 s"):
        check_environment(own(tmp_path, "import time; time.sleep(600)"), timeout_s=1.5)
    left = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)'])\n"
    check_environment(own(tmp_path, left + SOUND))


def chat_model(tmp_path: Path, template: str = CHAT_TEMPLATE, kind: str = "qwen2") -> ModelConfig:
    save_byte_tokenizer(tmp_path / "model", template=template)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    return ModelConfig(path=str(tmp_path / "model"))


TALKS = """
from asyncrl.environments.chat import ChatEnvironment


class Talks(ChatEnvironment):
    async def episode(self, chat, row):
        raise NotImplementedError


class Once(Talks):
    several_turns = False


class Decides(Talks):
    def __init__(self, turns: int = 1) -> None:
        self.several_turns = turns > 1


class Game:
    def reset(self, row): ...
    def step(self, text): ...
"""


def test_several_turns_without_a_known_renderer_are_refused_before_a_start(tmp_path: Path) -> None:
    model = chat_model(tmp_path)
    for name in ("Talks", "Game"):
        with pytest.raises(
            ConfigError, match=r"has several turns, but no renderer writes the chat template .* Set model.renderer="
        ):
            check_environment(own(tmp_path, TALKS, name), model)
    for name in ("Once", "Decides"):  # the objects of the second say so themselves: its worker asks them
        check_environment(own(tmp_path, TALKS, name), model)
    check_environment(own(tmp_path, TALKS, "Talks"), replace(model, renderer="default"))
    check_environment(own(tmp_path, TALKS, "Talks"), replace(model, path="hub/name"))


def test_what_is_foreseen_of_a_chat_is_what_the_worker_says(tmp_path: Path) -> None:
    models = {
        "no template": chat_model(tmp_path / "a", template=""),
        "of no family": chat_model(tmp_path / "b"),
        "of a family, with another template": chat_model(tmp_path / "c", kind="qwen3"),
        "named": replace(chat_model(tmp_path / "d"), renderer="default"),
    }
    for title, model in models.items():
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=False)
        said, before = open_chat(tokenizer, model.path, model.renderer, model.chat), foreseen(**chat_of(model))
        assert before is not None and before.why_single == said.why_single, title
        for told in (False, True):
            assert before.why_no_calls(told=told) == said.why_no_calls(told=told), title
        assert bool(said.why_single) == (title != "named")


def chat_of(model: ModelConfig) -> dict[str, Any]:
    return {"path": model.path, "renderer": model.renderer, "chat": dict(model.chat)}


CALCULATOR = ["asyncrl.environments.tools.calculator:calculate"]


def test_tools_whose_calls_nobody_reads_or_of_which_the_policy_is_not_told_are_refused(tmp_path: Path) -> None:
    """Such a run trained on replies that never called anything, without a word."""
    model = replace(chat_model(tmp_path), renderer="default")
    tools = EnvironmentConfig(name="tools", args={"functions": CALCULATOR})
    with pytest.raises(ConfigError, match=r"renderer=default reads no tool calls: .*model\.chat\.tool_parser"):
        check_environment(tools, model)
    reads = replace(model, chat={"tool_parser": "qwen3"})
    with pytest.raises(ConfigError, match=r"no place for `tools`.* environment\.args\.tell=false"):
        check_environment(tools, reads)
    check_environment(EnvironmentConfig(name="tools", args={"functions": CALCULATOR, "tell": False}), reads)
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=False)
    with pytest.raises(ConfigError, match="renderer=default reads no tool calls"):
        make_environment(tools, chat=open_chat(tokenizer, model.path, "default"))
    other = tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja"
    other.parent.mkdir()
    other.write_text("{{ tools | tojson }}" + CHAT_TEMPLATE)  # transformers takes it where there are tools
    check_environment(tools, reads)


@pytest.mark.parametrize(
    ("name", "args", "asked"),
    [
        ("tools", {"functions": CALCULATOR}, Asked(several=True, calls=True, told=True)),
        ("tools", {"functions": CALCULATOR, "max_turns": 1}, Asked(several=False, calls=True, told=True)),
        ("tools", {"functions": CALCULATOR, "tell": False}, Asked(several=True, calls=True)),
        ("search", {"corpus": "corpus.jsonl"}, Asked(several=False)),
        ("search", {"corpus": "corpus.jsonl", "call": "tool"}, Asked(several=True, calls=True, told=True)),
        ("reasoning_gym", {}, Asked(several=False)),
    ],
)
def test_ours_say_what_they_ask_of_the_chat(
    name: str, args: dict[str, Any], asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").write_text('{"contents": "one"}\n')
    environment: Any = ENVIRONMENTS[name]
    assert environment.check(**args) == asked


def test_ours_and_unknown_names_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.user_code.subprocess.run", None)
    check_environment(EnvironmentConfig(name="single_turn"))
    with pytest.raises(ConfigError, match="does not exist"):
        check_environment(EnvironmentConfig(name="chess"))


@pytest.mark.parametrize("command", ["dry_run", "local"])
def test_neither_a_plan_nor_a_start_imports_it(tmp_path: Path, command: str) -> None:
    config = own(tmp_path, SOUND, "Missing")
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    settings = [f"model.path=hub/{model.name}", f"data.path={rows}", f"environment.name={config.name}"]
    settings += ["reward.function=asyncrl.rewards.exact_match:exact_match", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match="Missing"):
        if command == "local":
            local.run_local(settings, typed=["asyncrl", "local"])
        else:
            dry_run.main("local", settings)
    assert int((tmp_path / "own.pid").read_text()) != os.getpid()
