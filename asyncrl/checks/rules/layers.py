"""Rules for how the learner's layers compute, and what they keep (see `asyncrl.checks.rules.whole`)."""

from __future__ import annotations

from asyncrl.checks.problem import Problems
from asyncrl.schema import Config, RunSettings


def compiles_with_the_rest(config: Config) -> Problems:
    others = {
        "engine.exact": (config.engine.exact, "computes by kernels of its own, bit for bit"),
        "learner.router_replay": (config.learner.router_replay, "reaches into every layer while it computes"),
    }
    for name, (given, why) in others.items():
        if given and config.model.compile:
            yield f"model.compile=true does not go with {name}=true, which {why}. Set one of them to false"


def layers_can_be_compiled(config: RunSettings) -> Problems:
    model, tensor_parallel = config.model, config.learner.tensor_parallel
    if model.compile and tensor_parallel > 1:
        yield (
            f"model.compile=true cannot compile sums over ranks, and learner.tensor_parallel={tensor_parallel} has "
            "them in every layer. Set model.compile=false, or learner.tensor_parallel=1"
        )
    if model.compile and model.checkpoint_keep == "matmul":
        yield (
            "model.checkpoint_keep=matmul keeps products that are out of reach in code compiled by "
            "model.compile=true. Set model.checkpoint_keep=attention, or model.compile=false"
        )


RULES = (layers_can_be_compiled, compiles_with_the_rest)
