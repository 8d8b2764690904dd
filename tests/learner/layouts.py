"""Compute a tiny model under different layouts of ranks, one cell each, in processes joined by gloo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from asyncrl.checks.parallel import ParallelDims
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.backends.factory import backend_of
from asyncrl.learner.model.critic import build_critic
from asyncrl.learner.model.lora import NAME
from asyncrl.learner.model.packed import PackedModel
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.model.reading import Checkpoint
from asyncrl.learner.model.routing import RouterReplay
from asyncrl.learner.parallel.place import Place
from asyncrl.learner.parallel.sharding import part_and_box
from asyncrl.schema import Config
from tests.learner.families import settings_for, siblings, tiny_family
from tests.learner.rank_process import on_ranks, whole

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    family: str
    replicas: int = 1
    sequence: int = 1
    experts: int = 1
    tensor: int = 1
    lora: int = 0
    critic: bool = False
    offload: str = "none"
    idle: bool = False
    """The second half of the experts gets no token."""
    routed: bool = False
    """Recorded experts are replayed in the routers."""
    keep: str = ""
    """`model.checkpoint_keep`, with activation checkpointing; empty: no activation checkpointing."""

    compiled: bool = False

    @property
    def name(self) -> str:
        words = [
            self.family,
            f"{self.replicas} copies, sequence {self.sequence}, tensor {self.tensor}",
            *([f"experts {self.experts}"] * (self.experts > 1)),
            *(["LoRA"] * bool(self.lora)),
            *(["critic"] * self.critic),
            *(["half of them idle"] * self.idle),
            *(["routed"] * self.routed),
            *(["compiled"] * self.compiled),
            *([f"offload {self.offload}"] * (self.offload != "none")),
        ]
        return ", ".join([*words, *([f"checkpoint_keep {self.keep}"] * bool(self.keep))])

    def source(self, folder: Path) -> Path:
        """Return the path of the cell's checkpoint in `folder`."""
        return folder / (self.family + "-critic" * self.critic + "-idle" * self.idle)

    def build(self, folder: Path, backend: Backend | None) -> PackedModel:
        """Build the model as a run does."""
        config = self.config(folder)
        if self.critic:
            return build_critic(config, CPU, backend)
        model = build_model(config, CPU, backend)
        model.replay = RouterReplay(model, self.name) if self.routed else None
        return model

    def config(self, folder: Path) -> Config:
        config = settings_for(self.source(folder))
        model = replace(config.model, lora_rank=self.lora, activation_checkpointing=bool(self.keep))
        model.checkpoint_keep = self.keep or model.checkpoint_keep
        model.compile = self.compiled
        learner = replace(config.learner, replicas=self.replicas, offload=self.offload)
        learner.sequence_parallel, learner.tensor_parallel = self.sequence, self.tensor
        return replace(config, model=model, learner=replace(learner, expert_parallel=self.experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Sizes measured on one rank."""

    read: int
    """Bytes of the checkpoint that the rank has read."""
    largest: int
    """Bytes of the largest slice that it has read."""
    held: int
    """Bytes of its own shards of the parameters."""
    whole: int
    """Bytes of all parameters."""
    shards: int
    layout: str


def compute(folder: Path, cells: Sequence[Cell], ranks: int) -> None:
    """Compute the cells on `ranks` processes.

    It writes to `folder` for each cell: `NAME.safetensors` with the result of `outcome`, and `NAME-RANK.json` with
    `Found`.
    """
    for family in {cell.family for cell in cells}:
        tiny_family(family).save_pretrained(folder / family)
    for cell in (cell for cell in cells if cell.critic):
        critic = AutoModelForTokenClassification.from_pretrained(folder / cell.family, num_labels=1)
        critic.score.weight.data.normal_(
            0.0, 0.1, generator=torch.Generator().manual_seed(1)
        )  # a head of zeros gives the layers no gradient
        critic.save_pretrained(cell.source(folder))
    for cell in (cell for cell in cells if cell.idle):
        model = tiny_family(cell.family)
        leave_idle(model)
        model.save_pretrained(cell.source(folder))
    on_ranks(_rank, ranks, folder, folder, cells, ranks)


def _rank(rank: int, folder: Path, cells: Sequence[Cell], ranks: int) -> None:
    place = Place(rank=rank, world=ranks, device=CPU, restarted=False, run_id="cells")
    opened: list[Checkpoint] = []
    Checkpoint.of = _noted(opened)
    for cell in cells:
        opened.clear()
        config = cell.config(folder)
        dims = ParallelDims.of(config.learner, ranks)
        model = cell.build(folder, backend_of(config, place))
        tensors = outcome(model, dims.data_rank(rank), dims.data)
        (found,) = opened
        held = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
        of_rank = Found(
            read=found.read_bytes,
            largest=found.largest,
            held=sum(each.nbytes for each in held),
            whole=sum(each.numel() * each.element_size() for each in model.parameters()),
            shards=dims.shards * dims.tensor,
            layout=model.layout.value,
        )
        (folder / f"{cell.name}-{rank}.json").write_text(json.dumps(asdict(of_rank)))
        if rank == 0:
            save_file(tensors, folder / f"{cell.name}.safetensors")


@torch.no_grad()
def leave_idle(hf: PreTrainedModel) -> None:
    """Change the model so that no token goes to the second half of each layer's experts.

    Their logits are far below the others' for a hidden state whose first number is above 0, and no layer changes that
    number.
    """
    hf.get_submodule("model.embed_tokens").get_parameter("weight")[:, 0] = 3.0
    for name, parameter in hf.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            parameter[..., 0, :] = 0.0
        if name.endswith("mlp.gate.weight"):
            parameter[len(parameter) // 2 :] = 0.0
            parameter[len(parameter) // 2 :, 0] = -100.0


def _noted(opened: list[Checkpoint]):
    of = Checkpoint.of

    def noting(path: str) -> Checkpoint:
        opened.append(of(path))
        return opened[-1]

    return noting


def outcome(model: PackedModel, number: int, data: int) -> dict[str, Tensor]:
    """Return the log-probs and entropies of the trained tokens (a critic's values), and the whole gradient of their sum
    with random factors. The loss of each of the `data` ranks counts its own tokens only."""
    batch = siblings(model.routers if isinstance(model, PolicyModel) else None)
    if isinstance(model, PolicyModel):
        model.through_entropy = True
        move_adapters(model)
        logprobs, entropy = (each[batch.loss_positions] for each in model(batch, 1.0))
        found = {"logprobs": logprobs, "entropy": entropy}
    else:
        found = {"values": model(batch)[batch.loss_positions]}
    loss = in_a_direction(*found.values())
    mine = torch.arange(len(loss)) % data == number % data
    (loss * mine).sum().mul(data).backward()
    gradients = {
        f"gradient.{name}": whole(parameter.grad)
        for name, parameter in model.hf.named_parameters()
        if parameter.grad is not None
    }
    return {name: score.detach() for name, score in found.items()} | gradients


@torch.no_grad()
def move_adapters(model: PolicyModel) -> None:
    """Move the adapters away from their start, where B is 0 and A has no gradient. The values do not depend on the
    sharding."""
    generator = torch.Generator().manual_seed(5)
    for layer in model.adapters.layers.values() if model.adapters else ():
        b = layer.lora_B[NAME].weight
        local, own = part_and_box(b)
        drawn = torch.randn(b.shape, generator=generator) / 10
        local.copy_(drawn[tuple(slice(*each) for each in own)])


def in_a_direction(*scores: Tensor) -> Tensor:
    """Return the [tokens] sum of all scores with random factors."""
    factors = torch.randn(2, len(scores[0]), generator=torch.Generator().manual_seed(7))
    return torch.stack([score * factor for score, factor in zip(scores, factors, strict=False)]).sum(0)
