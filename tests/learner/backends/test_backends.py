"""The learner with another backend than FSDP2: nothing depends on which backend holds the models."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.learner.backends.base import Backend
from asyncrl.learner.backends.fsdp2 import FSDP2
from tests.learner.backends.whole_copies import WholeCopies
from tests.learner.fed_replay import largest_difference
from tests.learner.parallel.test_ranks import published
from tests.learner.parallel.test_ranks_roles import gae
from tests.learner.rank_process import train_on_ranks
from tests.learner.smooth_steps import EQUAL, apart

ASKED = [name for name in vars(Backend) if not name.startswith("_")]


@pytest.mark.parametrize("backend", [FSDP2, WholeCopies])
def test_a_backend_has_what_is_asked_of_one_and_takes_what_it_is_given(backend: type):
    assert set(ASKED) == {"mesh", "on_host", "shard", "sync", "settle"}
    assert {"mesh", "on_host"} <= set(inspect.signature(backend).parameters)
    for name in set(ASKED) - {"mesh", "on_host"}:
        asked, has = (inspect.signature(getattr(each, name)).parameters for each in (Backend, backend))
        assert [str(each) for each in has.values()] == [str(each) for each in asked.values()], name


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(900)
def test_two_ranks_with_whole_copies_learn_save_resume_and_export_what_one_rank_does(tmp_path: Path):
    """A policy, a critic and an average, two updates a batch; saved, and gone on with from the checkpoint."""
    one, copies = gae(tmp_path, "one"), gae(tmp_path, "copies")
    train_on_ranks(one, 1)
    train_on_ranks(replace(copies, learner=replace(copies.learner, steps=2)), 2, backend=WholeCopies.of)
    train_on_ranks(copies, 2, backend=WholeCopies.of, resume=True)
    begun, ends = (
        load_file(tmp_path / "one" / "begun.safetensors"),
        [load_file(tmp_path / run / "learned.safetensors") for run in ("one", "copies")],
    )
    assert any(name.startswith("critic.") for name in ends[1])
    assert apart(ends[0], ends[1], begun) < EQUAL
    rows = [load_file(tmp_path / run / "row.safetensors") for run in ("one", "copies")]
    for name in ("optim/grad_norm", "loss/total", "policy/entropy", "critic/grad_norm"):
        assert rows[1][name].item() == pytest.approx(rows[0][name].item(), abs=1e-4, rel=5e-3), name
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "copies" / "hf").named_parameters()
    weights = {name: tensor.detach() for name, tensor in exported}
    assert largest_difference(weights, published(tmp_path, "copies")) == 0.0
