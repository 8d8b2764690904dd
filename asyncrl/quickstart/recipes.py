"""Recipes of the quickstart's models. Free of torch, because their hash names the cache folders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRecipe:
    """A tiny Qwen2, trained on the modes task until a tenth of its samples are right."""

    seed: int = 0
    hidden_size: int = 64
    layers: int = 2
    heads: int = 2
    """Two heads of 32: vLLM's CPU backend serves head dimensions from 32 up."""
    intermediate_size: int = 256
    initializer_range: float = 0.05
    """Transformers' default of 0.02 takes twice the steps (measured on 3 seeds)."""
    max_steps: int = 1500
    """Limit on the steps; training gives up if `min_sampled_accuracy` is not reached by then."""
    check_every: int = 25
    batch_size: int = 64
    lr: float = 1e-3
    min_sampled_accuracy: float = 0.1
    """Training stops here. Far below it RL sees too few rewards to start from (0.4 % gave no signal at all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecipe(WarmupRecipe):
    """The same model, trained on conversations with a tool, a ninth of which are right in both turns."""

    agent: str = "calculator"
    """Name in `agents.AGENTS`."""

    lr: float = 2e-3
    min_sampled_accuracy: float = 0.105


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecipe:
    """A classifier on that base model, trained to tell reversed words from other answers."""

    seed: int = 0
    steps: int = 600
    batch_size: int = 64
    lr: float = 1e-3
    min_accuracy: float = 0.85
