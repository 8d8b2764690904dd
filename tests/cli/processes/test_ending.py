"""Messages about a run that has ended."""

from __future__ import annotations

from pathlib import Path

from asyncrl.cli.processes.ending import Ended, how_to_go_on
from asyncrl.cli.starting.resuming import nothing_to_do


def test_an_ended_run_says_from_where_and_how_it_goes_on(tmp_path: Path) -> None:
    saved = tmp_path / "ckpt" / "step_20"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text('{"step": 19, "policy_version": 21}')
    (tmp_path / "ckpt" / "latest").symlink_to("step_20")
    typed = ["asyncrl", "local", "model.path=a b", "overwrite=true", "resume=never"]
    assert how_to_go_on(tmp_path, typed, Ended(code=130)) == (
        "stopped; the newest checkpoint is that of step 20. Continue with:\n"
        "  asyncrl local 'model.path=a b' resume=auto"
    )
    lost = how_to_go_on(tmp_path, typed, Ended(code=143, saved=False, trained=23))
    assert lost.startswith("ended; the newest checkpoint is that of step 20; steps 21 to 23 are lost. Continue")
    assert "; step 21 is lost." in how_to_go_on(tmp_path, typed, Ended(code=1, trained=21))
    said = nothing_to_do(tmp_path, "20 steps are trained", [*typed, "learner.steps=20"], "learner.steps=40")
    assert said.startswith("nothing to do: 20 steps are trained. ")
    assert said.endswith("learner.steps=40 resume=auto")
    (saved / "state.json").write_text("{")
    assert "step_20/state.json cannot be read" in how_to_go_on(tmp_path, typed, Ended(code=1))
    assert "no checkpoint was saved" in how_to_go_on(tmp_path / "none", typed, Ended(code=1))


def test_a_fork_that_has_saved_nothing_is_told_to_begin_from_its_checkpoint_again(tmp_path: Path) -> None:
    typed = ["asyncrl", "local", "resume=old/ckpt/step_50"]
    assert how_to_go_on(tmp_path, typed, Ended(code=1)) == (
        "ended; no checkpoint was saved. Continue with:\n  asyncrl local resume=old/ckpt/step_50"
    )
