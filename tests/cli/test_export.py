"""Tests of `asyncrl export`: a checkpoint becomes a model that loads anywhere, with the weights that were saved."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.cli import export
from asyncrl.cli.main import main
from asyncrl.config import load_config, read_config
from asyncrl.learner.checkpoints.checkpoint import Checkpoints
from asyncrl.learner.roles import build_roles
from asyncrl.storage.occupancy import in_turn
from asyncrl.storage.sealed import verify, verify_export
from asyncrl.telemetry.folder.run_folder import prepare_run_folder
from tests.learner.checkpoints.test_checkpoint import state
from tests.learner.feed import tiny_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("made", ["learner.proximal_ema=0.5 loss=tis", "model.lora_rank=2"])
def test_a_checkpoint_becomes_the_model_that_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str):
    path = tiny_checkpoint(tmp_path / "model")
    given = [
        f"model.path={path}",
        f"run.dir={tmp_path}/run",
        "data.path=d.jsonl",
        "reward.function=r.py:f",
        *made.split(),
    ]
    config = load_config(given)
    run = prepare_run_folder(config, "first")
    roles = build_roles(config, CPU, None)
    trained = [parameter for parameter in roles.policy.parameters() if parameter.requires_grad]
    for number, parameter in enumerate(trained):
        parameter.data += 0.01 * (number + 1)
    saves = Checkpoints(run / "ckpt", rank=0, keep=3)
    for step in (4, 9):
        saves.save(state(step), roles, {})
        trained[0].data += 1.0
    assert main(["export", str(run), "--step", "5"]) == 0
    exported = run / "exports" / "step_5" / "hf"
    verify_export(exported)
    ids = torch.arange(12)[None]
    trained[0].data -= 2.0
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(exported)(input_ids=ids).logits
        original = AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits
    assert not torch.allclose(found, original, atol=1e-2)
    if "lora" in made:
        assert (exported.with_name("adapter") / "adapter_model.safetensors").is_file()
        assert main(["export", str(run), "--to", str(tmp_path / "mine")]) == 0
        assert (tmp_path / "mine-adapter" / "adapter_model.safetensors").is_file(), "that of another would be replaced"
        return
    saved = {name.removeprefix("hf."): value for name, value in roles.policy.named_parameters()}
    loaded = dict(AutoModelForCausalLM.from_pretrained(exported).named_parameters())
    torch.testing.assert_close(loaded, saved, rtol=0, atol=1e-6)
    assert main(["export", str(run), "--average", "--to", str(tmp_path / "ema")]) == 0
    average = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "ema").named_parameters())
    torch.testing.assert_close(average, dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()))
    assert "the averaged policy after 10 steps" in capsys.readouterr().out
    assert main(["export", str(run), "--step", "7"]) == 2


def test_a_run_in_half_precision_is_exported_so_without_its_ranks_or_a_gpu(tmp_path: Path):
    path = tiny_checkpoint(tmp_path / "model")
    given = [f"model.path={path}", f"run.dir={tmp_path}/run", "data.path=d.jsonl", "reward.function=r.py:f"]
    run = prepare_run_folder(load_config([*given, "model.dtype=bfloat16"]), "first")
    roles = build_roles(load_config(given), CPU, None)  # the weights of which are float32 in either
    Checkpoints(run / "ckpt", rank=0, keep=3).save(state(0), roles, {})
    assert main(["export", str(run)]) == 0
    exported = AutoModelForCausalLM.from_pretrained(run / "exports" / "step_1" / "hf", dtype="auto")
    for name, value in roles.policy.named_parameters():
        found = exported.get_parameter(name.removeprefix("hf."))
        torch.testing.assert_close(found, value.to(torch.bfloat16), rtol=0, atol=0)


def test_a_checkpoint_of_another_run_and_damaged_settings_are_refused_by_name_and_changed_ones_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tiny_checkpoint(tmp_path / "model")
    config = load_config([f"model.path={path}", f"run.dir={tmp_path}/run", "data.path=d", "reward.function=r.py:f"])
    run = prepare_run_folder(config, "first")
    Checkpoints(run / "ckpt", rank=0, keep=3).save(state(0), build_roles(config, CPU, None), {})
    origin = run / "run.json"
    origin.write_text(origin.read_text().replace("first", "other"))
    for step in ([], ["--step", "1"]):
        assert main(["export", str(run), *step]) == 2
        assert "ckpt/step_1 was saved by run first, but this folder belongs to run other" in capsys.readouterr().err
    origin.unlink()
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace("seed: 0", "seed: 1"))
    assert main(["export", str(run)]) == 0
    assert f"{settings} was changed or truncated after the run wrote it" in capsys.readouterr().err
    for damage in ("[" * 100_000, "3", "\0", "- a", "data: {messages_column: x}", "x: ["):
        settings.write_text(damage)
        assert main(["export", str(run)]) == 2
        assert f"ConfigError: {settings} " in capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """With one checkpoint, of one step."""
    path = tiny_checkpoint(tmp_path / "model")
    config = load_config([f"model.path={path}", f"run.dir={tmp_path}/run", "data.path=d", "reward.function=r.py:f"])
    run = prepare_run_folder(config, "first")
    save(run, 1)
    return run


def save(run: Path, steps: int) -> None:
    roles = build_roles(read_config(run / "config.yaml"), CPU, None)
    Checkpoints(run / "ckpt", rank=0, keep=1).save(state(steps - 1), roles, {})


def test_what_no_export_wrote_is_not_replaced_by_one(run: Path, capsys: pytest.CaptureFixture[str]):
    mine = run.with_name("mine")
    mine.mkdir()
    for _ in range(2):
        assert main(["export", str(run), "--to", str(mine)]) == 0
        verify_export(mine)
    capsys.readouterr()
    (mine / "thesis.txt").write_text("years")
    for place, said in (
        (mine, f"{mine} contains thesis.txt, which no export wrote"),
        (run / "ckpt" / "step_1", "which no export wrote"),
        (run, "which no export wrote"),
        (run / "config.yaml", "config.yaml is a file. Give --to a folder"),
    ):
        assert main(["export", str(run), "--to", str(place)]) == 2
        assert said in capsys.readouterr().err
    assert (mine / "thesis.txt").read_text() == "years"
    verify(run / "ckpt" / "step_1")


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_passed_over_for_a_newer_one_or_said_to_be_gone(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    read, saved = export.fill, [1]

    def slow(*given) -> None:
        if len(saved) < 3:
            saved.append(saved[-1] + 1)
            save(run, saved[-1])
        read(*given)

    monkeypatch.setattr(export, "fill", slow)
    assert main(["export", str(run)]) == 0
    assert "the policy after 3 steps" in capsys.readouterr().out
    saved[:] = [3]
    assert main(["export", str(run), "--step", "3"]) == 2
    assert f"{run}/ckpt/step_3 does not exist. There are step_4" in capsys.readouterr().err


@pytest.mark.slow
def test_two_exports_into_one_folder_come_one_after_the_other(run: Path, capfd: pytest.CaptureFixture[str]):
    (run / "exports" / "step_1").mkdir(parents=True)
    with in_turn(run / "exports" / "step_1", lambda: None):
        other = subprocess.Popen([sys.executable, "-m", "asyncrl.cli.export", str(run), "1"])
        until = time.monotonic() + 120
        while "another export is writing into" not in (said := capfd.readouterr().err):
            assert time.monotonic() < until and other.poll() is None, said
            time.sleep(0.05)
        assert not list((run / "exports" / "step_1").iterdir())
    assert other.wait(120) == 0
    verify_export(run / "exports" / "step_1" / "hf")


def test_a_file_system_without_locks_is_exported_to(run: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(handle: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuses)
    assert main(["export", str(run)]) == 0
    verify_export(run / "exports" / "step_1" / "hf")
