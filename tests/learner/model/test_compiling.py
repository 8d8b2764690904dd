"""Tests of `model.compile`: the number of compilations, results equal up to rounding, and where it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from asyncrl.errors import ConfigError
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.model.compiling import refuse_unbuildable
from asyncrl.learner.model.policy import PolicyModel, build_model
from tests.learner.families import settings_for, tiny_family
from tests.learner.feed import make_lease, make_step
from tests.learner.layouts import in_a_direction
from tests.learner.parallel.test_ranks import EQUAL, apart, first, make_config
from tests.learner.rank_process import train_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def anew():
    """What other tests compiled is forgotten, and what this one compiles counted from 0."""
    torch.compiler.reset()
    refuse_unbuildable(CPU)  # compiles, too
    counters.clear()
    yield
    torch.compiler.reset()


def models(family: str, folder: Path) -> tuple[PolicyModel, PolicyModel]:
    """As it is, and compiled."""
    tiny_family(family).save_pretrained(folder)
    config = settings_for(folder)
    compiled = replace(config, model=replace(config.model, compile=True))
    return build_model(config, CPU, None), build_model(compiled, CPU, None)


def batch_of(groups: int, seed: int) -> MicroBatch:
    plan, made = make_step(seed, groups=groups, size=3, max_staleness=4)
    return pack(make_lease(plan, made), plan.shards[0], CPU)


def scores(model: PolicyModel, batch: MicroBatch) -> Tensor:
    """[2, chosen] log-probs and entropies."""
    return torch.stack([each[batch.loss_positions] for each in model(batch, 1.0)])


def gradients(model: PolicyModel, batch: MicroBatch) -> dict[str, Tensor]:
    model.zero_grad()
    in_a_direction(*scores(model, batch)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("Qwen3", 4),
        pytest.param("Llama", 4, marks=pytest.mark.long),
        ("Qwen3-MoE", 7),
        pytest.param("OLMo 3", 3, marks=pytest.mark.long),  # no norm before its attention; some layers have a window
        pytest.param("Qwen2-MoE", 7, marks=pytest.mark.long),
        pytest.param("Mixtral", 7, marks=pytest.mark.long),
    ],
)
def test_batches_of_all_lengths_run_what_the_first_compiled_and_differ_by_rounding(
    family: str, graphs: int, tmp_path: Path
):
    plain, compiled = models(family, tmp_path)
    batches = [batch_of(groups, seed) for seed, groups in enumerate((2, 3, 1, 4, 2, 5))]
    assert len({len(batch.input_ids) for batch in batches}) == len({str(b.packing.padded.shapes) for b in batches}) == 6
    assert counters["stats"]["unique_graphs"] == 2 * graphs, "with gradient and without, at the start"
    assert all(parameter.grad is None for parameter in compiled.parameters())
    for batch in batches:
        found, wanted = gradients(compiled, batch), gradients(plain, batch)
        assert found.keys() == wanted.keys()
        norm = torch.nn.utils.get_total_norm(wanted.values())
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name] / norm, gradient / norm, atol=1e-5, rtol=0, msg=name)
    for batch in batches:
        with torch.no_grad():
            torch.testing.assert_close(scores(compiled, batch), scores(plain, batch), atol=1e-5, rtol=0)
    gradients(compiled, batches[0])
    in_a_direction(*scores(compiled, batches[1])).sum().backward()  # onto what is there
    assert counters["stats"]["unique_graphs"] == 2 * graphs


def test_a_rank_without_trajectories_compiles_nothing_for_its_one_token(tmp_path: Path):
    plain, compiled = models("Qwen3", tmp_path)
    counters.clear()
    lonely = pack(make_lease(*make_step(0, groups=1, size=1, max_staleness=4)), [], CPU)
    assert len(lonely.input_ids) == 1 and torch.equal(compiled(lonely, 1.0)[0], plain(lonely, 1.0)[0])
    assert not counters["stats"]["unique_graphs"]


def test_names_are_those_of_a_model_that_is_not_compiled(tmp_path: Path):
    plain, compiled = models("Qwen3", tmp_path)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in compiled.named_hf_parameters()] == [name for name, _ in plain.named_hf_parameters()]


def test_a_model_that_cannot_be_packed_is_refused(tmp_path: Path):
    tiny_family("Mamba").save_pretrained(tmp_path)
    config = settings_for(tmp_path)
    config.model.compile = True
    with pytest.raises(ConfigError, match=r"runs unpacked, but model\.compile=true .* Set model\.compile=false"):
        build_model(config, CPU, None)


@contextmanager
def by(compiler: Path) -> Iterator[None]:
    """Nothing that was compiled before is used."""
    torch.compiler.reset()
    with inductor.patch({"cpp.cxx": (str(compiler),)}), fresh_cache():
        yield


def test_without_a_compiler_the_start_is_refused_with_what_to_install():
    with (
        by(Path("/nowhere/g++")),
        pytest.raises(ConfigError, match=r"cannot build code for cpu here \(.* Install g\+\+"),
    ):
        refuse_unbuildable.__wrapped__(CPU)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A compiler that finds an error in everything."""
    script = tmp_path / "g++"
    script.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_cannot_be_built_are_refused_at_the_start(frozen: bool, tmp_path: Path, broken: Path):
    tiny_family("Qwen3").save_pretrained(tmp_path)
    config = settings_for(tmp_path)
    config.model.compile = True
    said = rf"cannot build the layers of model\.path={tmp_path} for cpu here \(.* Install g\+\+ .*model\.compile=false"
    with by(broken), pytest.raises(ConfigError, match=said):
        build_model(config, CPU, None, frozen=frozen)


def test_layers_that_cannot_be_built_later_end_the_run_in_the_same_sentence(tmp_path: Path, broken: Path):
    _, compiled = models("Qwen3", tmp_path)
    with by(broken), pytest.raises(ConfigError, match=r"cannot build the layers of .* set model\.compile=false"):
        scores(compiled, batch_of(2, 0))


def test_two_ranks_learn_the_same_and_go_on_uncompiled_from_their_checkpoint(tmp_path: Path):
    plain = train_on_ranks(make_config(tmp_path, "plain"), 2)
    config = make_config(tmp_path, "compiled", steps=2)
    config.model.compile = config.model.activation_checkpointing = True
    train_on_ranks(config, 2)
    went_on = train_on_ranks(make_config(tmp_path, "compiled"), 2, resume=True)
    assert apart(plain, went_on, first(tmp_path, "plain")) < EQUAL
