"""Which errors in a bfloat16 engine's weights does the canary find, and does it refuse right ones?

    python -m benchmarks.canary [--layers 24] [--deviations 0.02 0.05 0.1] [--learner float32]

Random Qwen3 (`dense`) and Qwen3-MoE (2 of 8 experts, `moe8`; 8 of 64, `moe64`), width 64, one of each per initial
deviation of the weights, whose norms vary by a fifth; 16 probes of 24 random tokens. The learner scores them in one
pack, the built-in engine one by one, in bfloat16.

For each kind of model: `honest`, the mean difference of the right engine, and `allowed`, in thousandths; `refused`,
right engines that are not accepted; `correlation`, the largest of a right engine's differences with a decoy's, over the
tokens (with one of 0.7 it would count as serving the decoy). For each kind of error: how many there were; of them
`found` by the mean and maximum alone (`by_size`) and with decoys; and `times`, their least mean difference over that of
the right engine.

    layers      two adjacent layers exchanged, at every depth
    last        of them, the last two
    experts     the first two experts of one layer exchanged, in every fourth layer and the last
    norms       a layer's norms of queries and keys exchanged, in every fourth layer and the last
    head        a tied head that is another matrix of the same deviation
    tensor      one matrix of the middle layer is one step old: it lacks +-1e-2 of the deviation in every weight
    version     all weights are one step old, of +-1e-3 to 3e-2 of the deviation; the engine proved it before

Steps have random signs. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.errors import WeightsError
from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.publishing.canary import DECOYS, canary_of
from asyncrl.learner.publishing.probes import probes_of
from asyncrl.schema import Config, DataConfig, ModelConfig, RunConfig
from asyncrl.weights.canary import Canary, Decoy, Proof, compare
from benchmarks.parts.answer import answer, parse

SMOKE = {"layers": 2, "deviations": [0.1], "kinds": ["dense", "moe8"]}
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {
    "moe8": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "moe64": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32},
}
STEPS = (1e-3, 3e-3, 1e-2, 3e-2)
Damage = Callable[[Any], object]


def random_model(kind: str, layers: int, deviation: float, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = SIZES | EXPERTS.get(kind, {}) | {"num_hidden_layers": layers, "initializer_range": deviation}
    model = AutoModelForCausalLM.from_config((Qwen3Config if kind == "dense" else Qwen3MoeConfig)(**sizes))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.mul_(1 + 0.2 * torch.randn_like(parameter))
    return model.bfloat16().float().eval().requires_grad_(False)


def exchange(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def layers_exchanged(model: Any, first: int) -> None:
    one, other = model.model.layers[first], model.model.layers[first + 1]
    exchange(list(zip(one.parameters(), other.parameters(), strict=True)))


def norms_exchanged(model: Any, layer: int) -> None:
    attention = model.model.layers[layer].self_attn
    exchange([(attention.q_norm.weight, attention.k_norm.weight)])


def experts_exchanged(model: Any, layer: int) -> None:
    exchange([(weights[0], weights[1]) for weights in model.model.layers[layer].mlp.experts.parameters()])


def another_head(model: Any) -> None:
    head = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    head.weight = torch.nn.Parameter(model.config.initializer_range * torch.randn_like(model.lm_head.weight))
    model.lm_head = head


def step(parameter: torch.Tensor, size: float) -> None:
    parameter.add_((size * torch.randn(parameter.shape).sign()).to(parameter.dtype))


def damages(kind: str, layers: int, deviation: float) -> Iterator[tuple[str, Damage]]:
    some = sorted({*range(0, layers, 4), layers - 1})
    for first in range(layers - 1):
        yield "layers", lambda model, at=first: layers_exchanged(model, at)
    yield "last", lambda model: layers_exchanged(model, layers - 2)
    for layer in some if kind != "dense" else ():
        yield "experts", lambda model, at=layer: experts_exchanged(model, at)
    for layer in some:
        yield "norms", lambda model, at=layer: norms_exchanged(model, at)
    yield "head", another_head
    middle = layers // 2
    yield "tensor", lambda model: step(model.model.layers[middle].self_attn.o_proj.weight, 1e-2 * deviation)


class Found:
    """Counts for one kind of model."""

    def __init__(self) -> None:
        self.honest: list[float] = []
        self.allowed: list[float] = []
        self.right, self.refused = 0, 0
        self.correlations: list[float] = []
        self.errors: dict[str, list[tuple[bool, bool, float]]] = defaultdict(list)

    def result(self, kind: str) -> dict[str, Any]:
        thousandths = {"honest": self.honest, "allowed": self.allowed}
        found: dict[str, Any] = {f"{kind}_{word}": [round(1e3 * x, 1) for x in of] for word, of in thousandths.items()}
        found[f"{kind}_refused"] = f"{self.refused} of {self.right}"
        found[f"{kind}_correlation"] = round(max(self.correlations), 2)
        for name, rows in self.errors.items():
            by_size, with_decoys, times = zip(*rows, strict=True)
            found[f"{kind}_{name}_found"] = f"{sum(with_decoys)} of {len(rows)}"
            found[f"{kind}_{name}_found_by_size"] = f"{sum(by_size)} of {len(rows)}"
            found[f"{kind}_{name}_times"] = round(min(times), 2)
        return found


def correlation(decoy: Decoy, canary: Canary, scored: list[NDArray[np.float32]]) -> float:
    right, wrong, found = (np.concatenate(parts) for parts in (canary.logprobs, decoy.logprobs, scored))
    one, other = found - right, wrong - right
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def refused(canary: Canary, scored: list[NDArray[np.float32]], before: tuple[int, Canary] | None = None) -> bool:
    try:
        Proof(score=lambda _: scored, engine_dtype="bfloat16").prove(1, canary, before)
    except WeightsError:
        return True
    return False


def look(found: Found, kind: str, layers: int, deviation: float, learner: str, seed: int) -> None:
    """Count what is found in one random model."""
    model = random_model(kind, layers, deviation, seed)

    def policy() -> PolicyModel:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            settings = ModelConfig(path=folder, dtype=learner)
            config = Config(model=settings, run=RunConfig(dir=folder), data=DataConfig(path="none"))
            return build_model(config, CPU, FSDP2(init_device_mesh("cpu", (1,))))

    def scored(engine: Any) -> list[NDArray[np.float32]]:
        return ModelRunner(engine, CPU, 1).score(canary.sequences)

    def judged(name: str, answer: list[NDArray[np.float32]], against: Canary, before: Any = None) -> None:
        by_size = refused(replace(against, decoys=()), answer)
        times = compare(against, answer).mean / found.honest[-1]
        found.errors[name].append((by_size, refused(against, answer, before), times))

    right = policy()
    probes = probes_of(right, 0)
    canary = canary_of(right, probes, CPU, learner, "bfloat16", with_noise=True, decoys=DECOYS)
    engine = copy.deepcopy(model).bfloat16()
    honest = scored(engine)
    found.honest.append(compare(canary, honest).mean)
    found.allowed.append(canary.tolerance("bfloat16").mean)
    found.right, found.refused = found.right + 1, found.refused + refused(canary, honest)
    found.correlations += [correlation(decoy, canary, honest) for decoy in canary.decoys]
    for name, damage in damages(kind, layers, deviation):
        wrong = copy.deepcopy(engine)
        damage(wrong)
        judged(name, scored(wrong), canary)
    for size in STEPS:
        for parameter in model.parameters():
            step(parameter, size * deviation)
        newer = canary_of(policy(), probes, CPU, learner, "bfloat16", with_noise=True)
        loaded = scored(copy.deepcopy(model).bfloat16())
        found.right, found.refused = found.right + 1, found.refused + refused(newer, loaded, (0, canary))
        judged(f"version_{size:g}", honest, newer, (0, canary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--deviations", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--kinds", nargs="+", default=["dense", *EXPERTS])
    parser.add_argument("--learner", choices=("float32", "bfloat16"), default="float32")
    given = parse(parser, SMOKE)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    result: dict[str, Any] = {}
    with torch.no_grad():
        for kind in given.kinds:
            found = Found()
            for seed, deviation in enumerate(given.deviations):
                look(found, kind, given.layers, deviation, given.learner, seed)
            result |= found.result(kind)
    dist.destroy_process_group()
    answer("canary", result, smoke=given.smoke)


if __name__ == "__main__":
    main()
