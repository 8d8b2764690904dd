"""Checks before anything is started, the same for the start and for `--dry-run`."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import local
from asyncrl.cli.main import main
from asyncrl.config import load_config, read_config
from asyncrl.quickstart.byte_tokenizer import CHAT_TEMPLATE, save_byte_tokenizer
from asyncrl.quickstart.smoke_rows import NUMBERS_V1
from asyncrl.telemetry.folder.run_folder import prepare_run_folder

REWARDS = """
import os, time
def score(completion, row): return float(completion == row["answer"])
def forgot(completion, row): row["answer"]
def strict(completion, row):
    if not completion: raise ValueError("an empty completion")
    return 1.0
def ends(completion, row): os._exit(7)
def hangs(completion, row): time.sleep(600)
"""
BROKEN_TEMPLATE = "{% for message in messages %}{{ message['content'] }"


def write_rows(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a whole task, in this directory; no test may start it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    save_byte_tokenizer("model")
    Path("model/config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 1024, "vocab_size": 258})
    )
    Path("model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    Path("r.py").write_text(REWARDS)
    rows = [{"prompt": [{"role": "user", "content": f"what is {n}?"}], "answer": str(n)} for n in range(50)]
    write_rows(Path("d.jsonl"), *rows)

    def started(*_: object) -> int:
        raise AssertionError("started")

    monkeypatch.setattr(local, "_run", started)
    return ["model.path=model", "data.path=d.jsonl", "reward.function=r.py:score"]


@pytest.mark.slow
@pytest.mark.unhurried
def test_a_model_that_the_built_in_engine_cannot_batch_is_refused_at_the_start(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 1024}
    Path("model/config.json").write_text(json.dumps(settings | {"sliding_window": 64}))
    for command in ("local", "rollout"):
        assert main([command, *task, "--dry-run"]) == 2
        said = capsys.readouterr().err
        assert "model.path=model: the built-in engine (engine=transformers)" in said and "sliding window" in said
        assert main([command, *task, "--dry-run", "engine=fake"]) == 0
    Path("model/config.json").write_text(json.dumps(settings | {"sliding_window": None}))
    assert main(["local", *task, "--dry-run"]) == 0


@pytest.mark.parametrize("command", [["local"], ["data", "check"]])
def test_an_order_by_a_column_that_is_none_is_refused_at_the_start(
    command: list[str], task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(
        Path("d.jsonl"), {"prompt": "a", "answer": "b", "level": 1}, {"prompt": "a", "answer": "b", "level": "x"}
    )
    dry = [] if command == ["data", "check"] else ["--dry-run"]
    assert main([*command, *task, *dry, "data.order_by=levle"]) == 2
    said = capsys.readouterr().err
    assert "d.jsonl:1: data.order_by=levle needs a number in every row" in said
    assert "it has answer, level, prompt. Did you mean `level`?" in said and "order by another column" in said
    assert main([*command, *task, *dry, "data.order_by=level"]) == 2
    assert "d.jsonl:2: data.order_by=level" in (said := capsys.readouterr().err) and "got 'x'" in said


@pytest.mark.parametrize("asked", [["--dry-run"], []])
def test_a_curriculum_of_more_rows_than_are_counted_is_refused_at_the_start(
    asked: list[str], task: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asyncrl.drawing.curriculum.MOST_ROWS", 49)
    assert main(["local", *task, "data.curriculum=pass_rate", *asked]) == 2
    assert "at most 49; there are 50. Choose rows with data.where" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.unhurried
def test_rows_that_an_environment_cannot_use_are_refused_at_the_start(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*task[:2], "environment=reasoning_gym"], capsys)
    assert "d.jsonl:1: the row has no column 'reasoning_gym'" in said and "environments.reasoning.rows TASK" in said
    package = Path("tasksets/nothing_v1")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(NUMBERS_V1)
    given = ["environment.args.taskset=nothing_v1", "environment.args.path=tasksets", 'environment.args.harness="null"']
    said = refused([*task[:2], "environment=verifiers", *given, "model.renderer=default"], capsys)
    assert "d.jsonl:1: the row has no column 'verifiers'" in said


def test_a_source_of_a_mixture_whose_rows_have_no_score_is_refused_at_the_start(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("bare.jsonl"), *({"prompt": [{"role": "user", "content": "hm"}]} for _ in range(4)))
    said = refused([task[0], "data.mixture={good: d.jsonl, bare: bare.jsonl}", "reward.function=r.py:score"], capsys)
    assert "gave no score for any of 6 completions" in said and "bare.jsonl:1" in said and "'answer'" in said


def test_a_set_s_own_reward_and_environment_are_looked_at_before_the_start(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["eval.path=d.jsonl", "eval.sets.hard.path=d.jsonl", "eval.sets.hard.reward=f1"]
    assert main(["local", *task, *own, "--dry-run"]) == 0
    assert "eval hard: asyncrl.rewards.library.question_answering:f1: called on" in capsys.readouterr().out
    said = refused([*task, *own[:2], "eval.sets.hard.reward=r.py:nowhere"], capsys)
    assert "eval.sets.hard: reward.function=" in said and "has no 'nowhere'" in said
    said = refused([*task, *own[:2], "eval.sets.hard.environment=r.py:Nowhere"], capsys)
    assert "eval.sets.hard: environment.name='r.py:Nowhere'" in said
    said = refused([*task, *own[:2], "eval.sets.hard.max_new_tokens=900"], capsys)
    assert "eval.sets.hard.max_new_tokens=900 = 1412" in said
    assert "e.jsonl: there is no such file" in refused([*task, "eval.sets.hard=e.jsonl"], capsys)


def test_epochs_become_steps_by_the_rows_that_there_are(
    task: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = [*task, "learner.groups_per_step=8", "learner.epochs=2.5", "learner.steps=3"]
    assert main(["local", *epochs, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "16 steps = 128 groups" in told and "learner.epochs=0" in told, "ceil(2.5 * 50 / 8), and the roles are told"
    begun = []
    monkeypatch.setattr(local, "_run", lambda config, overrides, typed: begun.append((config, overrides, typed)) or 0)
    assert main(["local", *epochs]) == 0
    ((config, overrides, typed),) = begun
    assert (config.learner.steps, config.learner.epochs, typed[2:]) == (16, 0, epochs)
    assert load_config(overrides) == config
    assert main(["learner", *epochs, "--dry-run"]) == 2
    assert "learner.epochs=2.5 needs `asyncrl local`, which counts the rows" in capsys.readouterr().err
    assert main(["local", *epochs[:-1], "advantage=gae", "loss=ppo", "critic.warmup_steps=16"]) == 2
    assert "critic.warmup_steps=16 leaves none of learner.steps=16" in capsys.readouterr().err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the start says, which `--dry-run` has to say too."""
    said = []
    for mode in ([], ["--dry-run"]):
        assert main(["local", *arguments, *mode]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert not Path("runs").exists()
    return said[0]


def test_the_plan_shows_a_rendered_prompt_the_reward_the_loss_and_the_rate(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["local", *task, "learner.lr=3e-5", "loss=ppo", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "d.jsonl: 50 rows, all of a form that can be used; of 50 prompts the longest has 29 tokens" in plan
    assert "the first, 28 tokens: 'user: what is 0?\\nassistant: '" in plan
    assert "r.py:score: called on the first rows with made-up completions, it gave 0" in plan
    assert "learner.lr=3e-05" in plan
    assert "loss: preset=ppo" in plan and "clip_low=0.2" in plan and "None" not in plan


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("forgot", ["d.jsonl:1", "returned None"]),
        ("ends", ["d.jsonl:1", "exit code 7"]),
        ("hangs", ["d.jsonl:1", "reward.timeout_s=0.3"]),
        ("gone", ["r.py has no 'gone'"]),
    ],
)
def test_a_reward_that_can_never_work_is_refused(
    reward: str, says: list[str], task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    patience = 0.3 if reward == "hangs" else 60  # a busy machine makes the others no hanging ones
    said = refused([*task, f"reward.function=r.py:{reward}", f"reward.timeout_s={patience}"], capsys)
    assert all(part in said for part in says)


def test_a_best_checkpoint_by_a_data_source_that_no_row_has_is_refused(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "1", "data_source": name} for name in ("a b", "c")
    ]
    write_rows(Path("held.jsonl"), *rows)
    given = [*task, "eval.path=held.jsonl", "eval.every=5", "learner.save_every=5"]
    said = refused([*given, "learner.keep_best=eval/heldout/a_d/mean"], capsys)
    assert "the means by data_source of heldout are eval/heldout/a_b/mean, eval/heldout/c/mean." in said
    assert "Did you mean `eval/heldout/a_b/mean`?" in said
    for known in ("a_b", "c"):
        assert main(["local", *given, f"learner.keep_best=eval/heldout/{known}/mean", "--dry-run"]) == 0
    assert main(["local", *given, "learner.keep_best=eval/heldout/x/mean", "eval.rows=1", "--dry-run"]) == 0
    write_rows(Path("held.jsonl"), rows[0])
    said = refused([*given, "learner.keep_best=eval/heldout/a_b/mean"], capsys)
    assert "are none: its rows have 1 different `data_source`" in said


def test_an_alarm_or_metric_that_there_is_not_is_refused_with_those_there_are(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*task, "learner.keep_best=reward/men"], capsys)
    assert "learner.keep_best=reward/men is not a metric. Did you mean `reward/mean`?" in said
    said = refused([*task, "telemetry.ignore_alarms=[disk_ful]"], capsys)
    assert "telemetry.ignore_alarms=['disk_ful']: there is no such alarm" in said and "clock" in said


def test_a_column_that_the_reward_misses_is_refused(task: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("d.jsonl"), {"prompt": "a"}, {"prompt": "b"})
    assert "d.jsonl:1: r.py:score: KeyError: 'answer'" in refused(task, capsys)


def test_several_rewards_are_called_together_and_what_needs_a_server_is_made_and_not_asked(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    several = [*task[:2], "reward.function=", "reward.functions.right=r.py:score", "reward.functions.form=format"]
    judge = "reward.functions.judge={function: llm_judge, weight: 0.5, args: {url: 'http://127.0.0.1:1', model: m}}"
    assert main(["local", *several, judge, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "judge: asyncrl.rewards.library.llm_judge:LlmJudge: not called before the start" in plan
    assert "right + form: called on the first rows with made-up completions, it gave 0, 0" in plan

    assert "url must begin with http://" in refused([*several, judge.replace("http:", "ftp:")], capsys)


CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "vocab_size": 258}


@pytest.mark.parametrize(
    ("changed", "template", "says"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, None, "is a Qwen3ForCausalLM, whose output is not a reward"),
        ({"id2label": None}, None, "has num_labels=2, but a reward is one number"),
        ({"vocab_size": 100}, None, "gives token id 256, but the model has 100 tokens"),
        ({}, "", "the prompt is a conversation, but its tokenizer has no chat template"),
        ({}, "{{ raise_exception('no such role') }}", "its chat template fails (TemplateError: no such role)"),
    ],
)
def test_a_reward_model_that_can_score_no_row_is_refused(
    changed: dict, template: str | None, says: str, task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("model", "judge")
    Path("judge/config.json").write_text(json.dumps(CLASSIFIER))
    given = [*task[:2], "reward=model", "reward.model=judge"]
    assert main(["local", *given, "--dry-run"]) == 0
    assert "RewardModel of judge: not loaded before the start" in capsys.readouterr().out
    Path("judge/config.json").write_text(json.dumps(CLASSIFIER | changed))
    if template is not None:
        Path("judge/chat_template.jinja").write_text(template)
    said = refused(given, capsys)
    assert "reward.model=judge" in said and says in said


def test_a_row_whose_data_source_has_no_reward_is_refused_by_its_line(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("d.jsonl"), *({"prompt": "p", "answer": "1", "data_source": source} for source in ("a", "b", "c")))
    some = [*task[:2], "reward.function=", "reward.functions.one={function: r.py:score, data_source: [a, b]}"]
    said = refused(some, capsys)
    assert "d.jsonl:3: no reward of reward.functions is for data_source='c'; they are for a, b. Add it to" in said
    assert main(["local", *some, "reward.functions.rest=format", "--dry-run"]) == 0


def test_an_argument_that_the_reward_does_not_take_is_refused(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*task[:2], "reward=gsm8k", "reward.args.methd=flexible"], capsys)
    assert (
        "reward.args.methd" in said and "takes no such argument. It takes method, score, format_score, column" in said
    )


def test_a_reward_that_refuses_some_completions_is_told_of_and_not_refused(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["local", *task, "reward.function=r.py:strict", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "it failed for 3 of 6; d.jsonl:1: r.py:strict: ValueError: an empty completion" in plan


def test_a_bad_row_anywhere_is_refused_by_its_line(task: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with Path("d.jsonl").open("a") as file:
        file.write('{"text": "no prompt"}\n')
    assert "d.jsonl:51 has no column `prompt`" in refused(task, capsys)


def test_a_template_with_a_syntax_error_is_refused(task: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    Path("model/tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": BROKEN_TEMPLATE}))
    assert "chat template cannot be rendered: TemplateSyntaxError" in refused(task, capsys)


@pytest.mark.parametrize("column", ["image", "images", "audio", "videos"])
def test_rows_with_images_audio_or_video_are_refused_by_name(
    task: list[str], capsys: pytest.CaptureFixture[str], column: str
) -> None:
    nothing = (None, [], [{"bytes": None, "path": None}], {"bytes": None})
    rows = [{"prompt": "abc", "answer": "", column: value} for value in nothing] * 10
    write_rows(Path("d.jsonl"), *rows)
    assert main(["local", *task, "--dry-run"]) == 0
    write_rows(Path("d.jsonl"), *rows, {"prompt": "abc", "answer": "", column: ["cat.png"]})
    assert f"d.jsonl:41 has something in its column `{column}`, but the policy reads text only" in refused(task, capsys)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video"])
def test_parts_of_a_message_that_are_not_text_are_refused(
    task: list[str], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: "x"}]
    write_rows(Path("d.jsonl"), {"prompt": [{"role": "user", "content": content}], "answer": ""})
    assert "must be text, or parts of type text" in refused(task, capsys)


@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_is_no_model_and_the_way_to_merge_it_is_told(
    task: list[str], capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    settings = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    Path("model/adapter_config.json").write_text(json.dumps(settings))
    Path("model/adapter_model.safetensors").write_bytes(b"")
    if not whole:
        Path("model/model.safetensors").unlink()
    said = refused(task, capsys)
    assert ("a whole model and a PEFT adapter beside it" if whole else "a PEFT adapter of org/base") in said
    assert "merge_and_unload()" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model_type": "llava", "vision_config": {}}, "llava is a model of images"),
        ({"model_type": "qwen2_audio", "audio_config": {}}, "qwen2_audio is a model of audio"),
        ({"model_type": "whisper", "is_encoder_decoder": True}, "whisper is an encoder-decoder"),
    ],
)
def test_a_model_that_needs_more_than_text_is_refused_by_name(
    task: list[str], capsys: pytest.CaptureFixture[str], settings: dict[str, Any], says: str
) -> None:
    file = Path("model/config.json")
    given = json.loads(file.read_text()) | settings | {"architectures": ["XForConditionalGeneration"]}
    file.write_text(json.dumps(given))
    assert says in refused(task, capsys)


def test_the_longest_row_is_found_and_what_becomes_of_it_said(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "x" * (700 if n == 1234 else 5), "answer": ""} for n in range(2000)]
    write_rows(Path("d.jsonl"), *rows)
    assert main(["local", *task, "--dry-run"]) == 0
    assert "(the longest: d.jsonl:1235, 700): data.overlong=drop" in capsys.readouterr().out
    assert "d.jsonl:1235, 700" in refused([*task, "data.overlong=error"], capsys)
    assert "have more than data.max_prompt_tokens=4" in refused([*task, "data.max_prompt_tokens=4"], capsys)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["rollout.max_new_tokens=600"], ["= 1112, and the model of model.path has 1024 positions"]),
        (["engine=vllm", "engine.max_model_len=600"], ["= 768, and engine.max_model_len=600. Lower one of them"]),
        (
            ["engine.record_topk=300"],
            ["engine.record_topk=300 is more than the 258 tokens in the vocabulary of model.path. Lower it"],
        ),
        (["learner.copy_to=nosuch://x"], ["learner.copy_to=nosuch://x is not a URL that fsspec can open here"]),
        (
            ["weights.transport=files", "weights.url=nosuch://x"],
            ["weights.url=nosuch://x is not a URL that fsspec can open here"],
        ),
        (["ray.gpus_per_worker=1"], ["ray.gpus_per_worker=1", "this machine has 0"]),
        (["engine.device=cuda"], ["engine.device=cuda needs 1 GPU(s), and this machine has 0"]),
        (["learner.device=cuda", "learner.ranks=2"], ["learner.device=cuda needs 2 GPU(s)"]),
        (["weights.host=192.0.2.1"], ["weights.host=192.0.2.1 cannot be listened on"]),
        (["weights.interface='lo,eth77'"], ["this machine has no network interface eth77. It has lo"]),
        (["run.dir=/proc/nothing/runs"], ["run.dir=/proc/nothing/runs cannot be written"]),
    ],
)
def test_what_this_machine_or_model_cannot_give_is_refused(
    settings: list[str], says: list[str], task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*task, *settings], capsys)
    assert all(part in said for part in says)


def test_a_warm_up_that_outlasts_the_run_is_told_with_the_rate_it_ends_at(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = "learner.warmup_steps=20 is more than the 5 steps that are trained: the rate ends at 0.001 instead of"
    given = ["learner.steps=5", "learner.lr=0.004", "learner.schedule=linear"]
    for steps, told in ((20, True), (5, False)):
        assert main(["local", *task, *given, f"learner.warmup_steps={steps}", "--dry-run"]) == 0
        assert (said in capsys.readouterr().out) == told


def test_a_prompt_with_a_token_that_the_model_does_not_know_is_refused_by_its_row(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"vocab_size": 120}))
    write_rows(Path("d.jsonl"), {"prompt": "a", "answer": ""}, {"prompt": "xyz", "answer": ""})
    assert "d.jsonl:2: the rendered prompt has token id 122, but the model has 120 tokens" in refused(task, capsys)


def test_it_is_told_where_no_token_ends_a_completion(task: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = "model.path=model names no token that ends a completion"
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    config = json.loads(Path("model/config.json").read_text())
    for eos, named, told in ((None, None, True), (None, 5, False), (settings["eos_token"], None, False)):
        Path("model/tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": eos}))
        Path("model/config.json").write_text(json.dumps(config | {"eos_token_id": named}))
        assert main(["local", *task, "--dry-run"]) == 0
        assert (said in capsys.readouterr().out) == told


def test_the_start_says_what_ends_a_turn(task: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The template's own end, which is not the EOS."""
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"vocab_size": 264}))
    save_byte_tokenizer("model", template=CHAT_TEMPLATE.replace("\n{% endfor", "<|reserved_260|>\n{% endfor"))
    assert main(["local", *task, "--dry-run"]) == 0
    assert "a turn ends with '<|eos|>' (258) or '<|reserved_260|>' (260)" in capsys.readouterr().out


def test_a_model_that_predicts_no_next_token_is_refused(task: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("model/config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    assert "model.path=model is a BertForMaskedLM, which has no head for the next token" in refused(task, capsys)


def test_an_address_that_is_taken_is_refused(task: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refused([*task, f"replay.address=tcp://127.0.0.1:{port}"], capsys)
        weights = refused([*task, f"weights.port={port}"], capsys)
    assert f"replay.address=127.0.0.1:{port} is already in use" in said
    assert f"weights.host=127.0.0.1:{port} is already in use" in weights


def test_an_environment_that_scores_by_itself_needs_no_reward(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text("class Own:\n    async def run(self, prompt, size, tools): ...\n")
    assert main(["local", *task[:2], "environment.name=own.py:Own", "--dry-run"]) == 0
    assert "none; the environment scores by itself" in capsys.readouterr().out
    assert "reward.function" in refused(task[:2], capsys)


@pytest.mark.parametrize("loss", ["dppo_tv", "ppo", "m2po_paper", "vcpo"])
def test_the_settings_of_a_run_show_the_loss_as_it_is_and_are_read_back_as_the_same(loss: str, tmp_path: Path) -> None:
    given = ["model.path=m", "data.path=d", "reward.function=m:f", f"run.dir={tmp_path / 'run'}", f"loss={loss}"]
    config = load_config(given)
    prepare_run_folder(config, "one")
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert "null" not in written.partition("\nloss:\n")[2].partition("\nadvantage:")[0]
    first = read_config(tmp_path / "run" / "config.yaml")
    prepared = tmp_path / "again"
    first.run.dir = str(prepared)
    prepare_run_folder(first, "two")
    assert read_config(prepared / "config.yaml").loss == first.loss
    assert first.loss.preset == loss


def test_a_pool_that_is_started_alone_refuses_a_bad_row_before_it_begins(
    task: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asyncrl.rollout.__main__.run_pool", lambda _: pytest.fail("started"))
    with Path("d.jsonl").open("a") as file:
        file.write("{}\n")
    assert main(["rollout", *task]) == 2
    assert "d.jsonl:51" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_a_loss_of_the_user_s_that_cannot_work_is_refused_before_torchrun_starts(
    task: list[str], how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("def total(inputs): return (inputs.advantages * inputs.learner_logprobs).sum()\n")
    assert main(["local", *task, "loss=custom", "loss.function=mine.py:total", *how]) == 2
    assert "loss.function=mine.py:total must return the loss of each token" in capsys.readouterr().err
    assert main(["local", *task, "learner.hook=gone.py:Hook", *how]) == 2
    assert "learner.hook=gone.py:Hook: there is no file gone.py" in capsys.readouterr().err
