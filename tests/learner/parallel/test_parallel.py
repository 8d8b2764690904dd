"""On every layout of the ranks, scores and gradients are those of plain transformers in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from asyncrl.checks.architecture import COMPUTED_TOGETHER, EXPERTS_APART, SHARED
from asyncrl.routers import routers_of
from tests.learner.families import FAMILIES, scores_alone, siblings, values_alone
from tests.learner.layouts import Cell, Found, compute, in_a_direction, outcome
from tests.learner.model.test_families import REFUSED

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]
RANKS = 4
NO_CRITIC = ("Gemma 3 (text)", "OLMo 2", "OLMo 3", "Cohere 2", "ERNIE 4.5", "Granite", "GPT-NeoX")
"""Families with no token classifier in transformers, or with one whose head has another name."""
CELLS = [
    Cell(family="Qwen3"),
    Cell(family="Qwen3-MoE", offload="all"),
    Cell(family="Llama", replicas=2, keep="nothing"),
    Cell(family="Qwen2", replicas=2, lora=2),
    Cell(family="Qwen3", tensor=2, keep="matmul"),
    Cell(family="Llama", sequence=2, tensor=2),
    Cell(family="Qwen3", sequence=2, keep="matmul"),
    Cell(family="Qwen3-MoE", sequence=4, routed=True),
    Cell(family="Qwen3-MoE", experts=2, keep="matmul", routed=True),
    Cell(family="Qwen3-MoE", experts=2, sequence=2, idle=True),
    Cell(family="Qwen3-MoE", experts=2, replicas=2, offload="all"),
    Cell(family="Mistral", sequence=2, replicas=2, lora=2),
    Cell(family="Qwen2", tensor=2, lora=2, offload="all"),
    Cell(family="Llama", sequence=2, tensor=2, lora=3),
    Cell(family="Qwen3", tensor=2, critic=True),
    Cell(family="Phi-3", tensor=2, replicas=2, lora=2),
    Cell(family="OLMo 2", tensor=2, sequence=2, keep="matmul"),
    Cell(family="Apertus", tensor=2),
    Cell(family="StarCoder2", tensor=2),
    Cell(family="Qwen2", replicas=2, lora=2, keep="attention", compiled=True),
    Cell(family="Qwen3-MoE", experts=2, sequence=2, offload="all", compiled=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what four ranks made of every cell."""
    folder = tmp_path_factory.mktemp("layouts")
    compute(folder, CELLS, RANKS)
    return folder


def alone(cell: Cell, folder: Path) -> dict[str, torch.Tensor]:
    """The same by transformers, one sequence at a time; with adapters, which it has not got, by one rank."""
    if cell.lora:
        return outcome(cell.build(folder, None), 0, 1)
    kind = AutoModelForTokenClassification if cell.critic else AutoModelForCausalLM
    hf = kind.from_pretrained(cell.source(folder), attn_implementation="eager").eval()
    batch = siblings(routers_of(hf) if cell.routed else None)
    # In the pack siblings stand behind each other, as they do alone.
    if cell.critic:
        found = {"values": values_alone(hf, batch)}
    else:
        found = dict(zip(("logprobs", "entropy"), scores_alone(hf, batch), strict=True))
    in_a_direction(*found.values()).sum().backward()
    gradients = {f"gradient.{name}": p.grad for name, p in hf.named_parameters() if p.grad is not None}
    return {name: score.detach() for name, score in found.items()} | gradients


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_log_probs_and_gradients_are_those_of_one_process(cell: Cell, folder: Path):
    agrees(cell, folder)


def agrees(cell: Cell, folder: Path) -> None:
    found, wanted = load_file(folder / f"{cell.name}.safetensors"), alone(cell, folder)
    assert found.keys() == wanted.keys()
    for score in [name for name in wanted if not name.startswith("gradient.")]:
        torch.testing.assert_close(found.pop(score), wanted.pop(score), atol=1e-5, rtol=0)
    norm = torch.nn.utils.get_total_norm(wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name] / norm, gradient / norm, atol=1e-5, rtol=0, msg=name)
        if cell.idle and ".experts." in name:
            assert [bool(each.any()) for each in found[name]] == [True, True, False, False], name


@pytest.mark.long
@pytest.mark.parametrize("family", [name for name, (kind, _) in FAMILIES.items() if kind in COMPUTED_TOGETHER])
@pytest.mark.parametrize(
    "layout",
    [
        *({"tensor": 2}, {"tensor": 2, "replicas": 2}),
        *({"tensor": 2, "lora": 3}, {"tensor": 2, "replicas": 2, "lora": 2}, {"tensor": 2, "critic": True}),
        {"tensor": 2, "sequence": 2},
    ],
    ids=str,
)
def test_so_they_are_of_every_family_that_ranks_compute_together(family: str, layout: dict[str, Any], tmp_path: Path):
    cell = Cell(family=family, **layout)
    if cell.critic and family in NO_CRITIC:
        pytest.skip("transformers has no token classifier of it")
    compute(tmp_path, [cell], 2 * cell.replicas * cell.sequence)
    agrees(cell, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", [name for name, (kind, _) in FAMILIES.items() if kind in EXPERTS_APART])
@pytest.mark.parametrize(
    "layout", [{"experts": 2}, {"experts": 4, "idle": True}, {"experts": 2, "replicas": 2}], ids=str
)
def test_so_they_are_of_every_family_whose_experts_ranks_spread(family: str, layout: dict[str, Any], tmp_path: Path):
    cell = Cell(family=family, **layout)
    compute(tmp_path, [cell], RANKS)
    agrees(cell, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("more", [{"lora": 2, "offload": "all"}, {"critic": True}, {"keep": "nothing"}], ids=str)
def test_so_they_are_with_adapters_or_of_a_critic_whose_experts_ranks_spread(more: dict[str, Any], tmp_path: Path):
    cell = Cell(family="Qwen3-MoE", experts=2, **more)
    compute(tmp_path, [cell], RANKS)
    agrees(cell, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_so_they_are_on_two_ranks_of_every_family(family: str, tmp_path: Path):
    cell = Cell(family=family)
    compute(tmp_path, [cell], 2)
    agrees(cell, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", [name for name, (kind, _) in FAMILIES.items() if kind in SHARED])
def test_so_they_are_on_two_ranks_that_share_the_sequences_of_every_family_that_is_packed(family: str, tmp_path: Path):
    cell = Cell(family=family, sequence=2)
    compute(tmp_path, [cell], 2)
    agrees(cell, tmp_path)


def test_a_model_is_packed_on_several_ranks_as_on_one(folder: Path):
    cells = [cell.name for cell in CELLS]
    packed = [Found(**json.loads((folder / f"{name}-0.json").read_text())).layout for name in cells]
    assert packed == ["packed"] * len(cells)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_no_rank_reads_or_holds_much_more_than_its_share(cell: Cell, folder: Path):
    ranks = [Found(**json.loads((folder / f"{cell.name}-{rank}.json").read_text())) for rank in range(RANKS)]
    stored = sum(file.stat().st_size for file in cell.source(folder).glob("*.safetensors"))
    for found in ranks:
        assert found.read <= 1.2 * stored / found.shards
        assert found.held <= 1.2 * found.whole / found.shards
        assert found.largest <= 0.25 * found.held
    assert sum(found.read for found in ranks) >= 0.9 * stored * RANKS / ranks[0].shards
