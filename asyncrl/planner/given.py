"""Costs given by hand: `cost.NAME=VALUE` of `asyncrl plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.planner.costs import Costs, Decode, LogNormal

AS_GIVEN = (
    "step_s", "step_sigma", "sync_s", "stall_s", "turns", "environment_s", "environment_sigma",
    "prefill_s", "deliver_s",
)  # fmt: skip
"""Fields of `Costs` that are given by their own names."""
MOST = {"_per_s": math.inf, "_s": 7 * 86400.0, "_sigma": 10.0, "turns": 1000.0}
"""Upper limits by the suffix of a name: with larger values no simulation would end with a useful result."""


@dataclass(slots=True, kw_only=True)
class Given:
    """The `cost.*`; 0 means none, or not given."""

    tokens_per_s: str = ""
    """Tokens/s of one engine, by the number of sequences that it decodes together: `1:60,32:1500,256:6000`."""
    length_mean: float = 0.0
    """Mean of the sampled tokens per completion."""
    length_sigma: float = 0.7
    """Standard deviation of the logarithm of that number."""
    train_tokens_per_s: float = 0.0
    """Sampled tokens per second that one learner rank trains."""
    gpu_gb: float = 0.0
    """Memory of a GPU in GB. Splits whose models do not fit are left out; 0 checks nothing."""
    as_given: dict[str, Any] = field(default_factory=dict)
    """The costs of `AS_GIVEN`, by name."""

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Given:
        """Raises ConfigError if a name is unknown or a value is not valid."""
        known = [each.name for each in fields(cls) if each.name != "as_given"] + [*AS_GIVEN]
        found = cls()
        for name, text in values.items():
            if name not in known:
                raise ConfigError(
                    f"cost.{name} is not a cost. The costs are: {', '.join(f'cost.{each}' for each in known)}"
                )
            if name == "tokens_per_s":
                found.tokens_per_s = text
                continue
            try:
                number = float(text)
            except ValueError:
                number = math.nan
            if not (math.isfinite(number) and number >= 0):
                raise ConfigError(f"cost.{name}={text} is not a number of 0 or more")
            most = next((most for end, most in MOST.items() if name.endswith(end)), math.inf)
            if number > most:
                raise ConfigError(f"cost.{name}={text} is more than {most:g}, which no run has. Give the real value")
            if name in AS_GIVEN:
                found.as_given[name] = max(1, int(number)) if name == "turns" else number
            else:
                setattr(found, name, number)
        return found

    def as_texts(self) -> dict[str, str]:
        """Return what was given, by name, as it would be given again."""
        named = ("tokens_per_s", "length_mean", "length_sigma", "train_tokens_per_s", "gpu_gb")
        given = {name: str(value) for name in named if (value := getattr(self, name))}
        return given | {name: str(value) for name, value in self.as_given.items()}

    def costs(self, longest: int, *, measured: bool) -> Costs:
        """Build the costs of a simulation.

        Args:
            longest: limit on the length of a completion.
            measured: whether measured runs will supply what is missing here.

        Raises:
            ConfigError: a cost is missing and nothing will supply it.
        """
        missing = [
            name
            for name, value in (
                ("tokens_per_s", self.tokens_per_s),
                ("length_mean", self.length_mean),
                ("train_tokens_per_s or cost.step_s", self.train_tokens_per_s or self.as_given.get("step_s")),
            )
            if not value
        ]
        if missing and not measured:
            raise ConfigError(
                f"no value is known for cost.{', cost.'.join(missing)}. Measure them with a short run, `asyncrl plan "
                "--from RUN`, or give them: cost.tokens_per_s=1:60,32:1500,256:6000 (of one engine, by the sequences "
                "decoded together) cost.length_mean=900 cost.train_tokens_per_s=20000 (of one rank)"
            )
        return Costs(
            decode=Decode.of_rates(rates_of(self.tokens_per_s)) if self.tokens_per_s else Decode(((1, 0.01),)),
            lengths=LogNormal(self.length_mean or longest / 2, self.length_sigma, longest),
            token_s=1 / self.train_tokens_per_s if self.train_tokens_per_s else 0.0,
            **self.as_given,
        )


def rates_of(text: str) -> list[tuple[int, float]]:
    """Parse `1:60,32:1500` into pairs. Raises ConfigError."""
    try:
        return [(int(batch), float(rate)) for batch, rate in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise ConfigError(
            f"cost.tokens_per_s={text} is not a list of sequences:tokens/s. Example: 1:60,32:1500,256:6000"
        ) from None
