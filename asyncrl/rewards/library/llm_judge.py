"""`llm_judge`: a language model behind any OpenAI-compatible URL reads a completion and returns a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.library.answers import COLUMNS
from asyncrl.rewards.library.asking import Asking

TEMPLATE = """\
Judge the answer to the question.

Question:
{prompt}

Right answer:
{answer}

Answer to judge:
{completion}

Think briefly, then end with one line `Score: N`, where N is a whole number from 0 (wrong) to 10 (right and clear)."""
PATTERN = r"(?i)score[\s*_`\"']*[:=][\s*_`\"']*(-?\d+(?:\.\d+)?)"
"""Judges put the word or the number into bold, or the whole into JSON."""
REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
PLACE = re.compile(r"\{(\w+)\}")


class LlmJudge:
    """The number that the judge ends with, divided by `scale`; token counts (and `cost`) are parts.

    Args:
        url: the API's URL without `/chat/completions`.
        template: the request; `{prompt}`, `{completion}`, `{answer}` (the row's right answer, if it has one) and
            `{any_column}` are filled in, other braces stay.
        pattern: a regular expression whose first group is the number; its last match after any `<think>` counts.
        lowest, highest: of the number; `highest` is `scale` if not given. Any other number is no score: the judge
            misunderstood, or did what the completion told it.
        prompt_price, completion_price: per million tokens; if given, the part `cost` is computed.
        body: further fields of the request.

    Raises:
        ConfigError: an invalid argument. When called, RewardError: no answer after all tries, or none with a number.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str = TEMPLATE,
        pattern: str = PATTERN,
        scale: float = 10.0,
        lowest: float = 0.0,
        highest: float | None = None,
        system: str = "",
        temperature: float = 0.0,
        max_tokens: int = 512,
        key_env: str = "",
        request_timeout_s: float = 60.0,
        retries: int = 4,
        backoff_s: float = 0.5,
        prompt_price: float = 0.0,
        completion_price: float = 0.0,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        if "{completion}" not in template:
            raise ConfigError("llm_judge: template must say where the completion goes: {completion}")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"llm_judge: pattern={pattern!r} is not a valid regular expression: {error}") from error
        if self._pattern.groups < 1 or not scale:
            raise ConfigError(f"llm_judge: pattern={pattern!r} needs a group for the number, and scale must not be 0")
        self._asking = Asking(
            f"{url.rstrip('/')}/chat/completions",
            who="judge",
            key_env=key_env,
            request_timeout_s=request_timeout_s,
            retries=retries,
            backoff_s=backoff_s,
        )
        self._template, self._scale = template, scale
        self._lowest, self._highest = lowest, scale if highest is None else highest
        if not self._lowest < self._highest:
            raise ConfigError(f"llm_judge: highest={self._highest:g} (or scale) must be above lowest={lowest:g}")
        self._system = [{"role": "system", "content": system}] if system else []
        self._body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(body or {})}
        self._prices = (prompt_price, completion_price)

    async def __call__(self, completion: str, row: dict[str, Any]) -> dict[str, float]:
        asked = {"role": "user", "content": filled(self._template, completion, row)}
        said = await self._asking.post(self._body | {"messages": [*self._system, asked]})
        try:
            choice = said["choices"][0]
            text = text_of(choice["message"]["content"])
            cut = choice.get("finish_reason") == "length"
            spent = self._spent(said.get("usage") or {})
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise RewardError(
                f"the answer of the judge at {self._asking.url} is not a chat completion: {said!r:.200}", "no_number"
            ) from error
        return {"score": self._number(text, cut) / self._scale} | spent

    def _number(self, text: str, cut: bool) -> float:
        """Raises RewardError if there is none, or not one of those asked for."""
        found = [match.group(1) for match in self._pattern.finditer(REASONING.sub("", text))]
        if not found:
            how = " before it was cut (raise reward.args.max_tokens)" if cut else ""
            raise RewardError(f"the judge gave no number{how}: {text[-200:]!r}", "no_number")
        number = float(found[-1])
        if not self._lowest <= number <= self._highest:
            raise RewardError(
                f"the judge gave {number:g}, but reward.args.lowest={self._lowest:g} and highest={self._highest:g} (or "
                f"scale) bound its numbers: {text[-200:]!r}",
                "no_number",
            )
        return number

    def _spent(self, usage: Mapping[str, Any]) -> dict[str, float]:
        tokens = [float(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        parts: dict[str, float] = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
        if any(self._prices):
            parts["cost"] = sum(count * price for count, price in zip(tokens, self._prices, strict=True)) / 1e6
        return parts


def text_of(content: Any) -> str:
    """Return the text of a message. Judges that reason may answer in parts; those with a text are the answer."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content or ""


def filled(template: str, completion: str, row: Mapping[str, Any]) -> str:
    """Fill in the template in one pass, so that braces in a completion are not filled in again."""
    values = {name: value for name, value in row.items() if isinstance(value, str | int | float)}
    judged = row.get("reward_model")
    truth = judged.get("ground_truth") if isinstance(judged, Mapping) else None
    truth = truth if truth is not None else next((row[name] for name in COLUMNS if row.get(name) is not None), "")
    values |= {"answer": truth, "prompt": as_text(row.get("prompt", "")), "completion": completion}
    return PLACE.sub(lambda place: str(values.get(place.group(1), place.group(0))), template)


def as_text(prompt: Any) -> str:
    """Return a conversation as lines `role: content`."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
