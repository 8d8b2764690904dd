"""Converts a given conversation into what the policy would have sampled: token ids, and which of them are trained on.

Not used for rollouts, whose sampled tokens are never rendered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.chat.base import ChatError, Message, ToolSpec, with_arguments
from asyncrl.chat.library import Renderer
from asyncrl.chat.seam import Seam
from asyncrl.chat.template import special_tokens

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """Example: `user: hi` answered by `yes`, with a template that ends the turn with `<eos>`::

    token_ids  [u s e r : _ h i \\n a s s i s t a n t : _ | y e s <eos>]
    loss_mask  [0 0 0 ...                                | 1 1 1 1    ]
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """The last element is true, unless all are false: tokens after the last trained one teach nothing."""
    as_asked: bool = True
    """Whether every trained turn begins as in a rollout. Some families begin the reasoning in the prompt of a turn, and
    render turns without reasoning differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What ends a turn, besides special tokens."""

    tokens: Collection[str] = ()
    """Texts of stop tokens."""
    texts: Collection[str] = ()
    """Markers of several tokens."""


def trimmed(token_ids: Sequence[int], loss_mask: Sequence[bool], as_asked: bool = True) -> Supervised:
    """Drop the tokens after the last trained one; keep all if none is trained."""
    last = max((place for place, learned in enumerate(loss_mask) if learned), default=len(token_ids) - 1)
    ids, mask = token_ids[: last + 1], loss_mask[: last + 1]
    return Supervised(token_ids=tuple(map(int, ids)), loss_mask=tuple(map(bool, mask)), as_asked=as_asked)


def by_renderer(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec], learned: Sequence[bool]
) -> Supervised:
    """Mark the tokens that the renderer says a model would sample: without role headers, with the end of each turn, and
    without the part of the turn that a rollout's prompt already contains (the beginning of its reasoning).

    Raises:
        ChatError: the renderer cannot say so with this tokenizer. Unknown messages may raise other errors.
    """
    given: Any = with_arguments(messages)
    offered: Any = list(tools) or None
    rendered = renderer.render(given, tools=offered)
    ids, owners = list(rendered.token_ids), rendered.message_indices
    if len(rendered.sampled_mask) != len(ids):
        raise ChatError(
            "the renderer cannot tell which tokens are sampled with this tokenizer. Set model.renderer=default"
        )
    mask = [bool(said) and of >= 0 and learned[of] for said, of in zip(rendered.sampled_mask, owners, strict=True)]
    as_asked = True
    for number in [number for number, wanted in enumerate(learned) if wanted]:
        prompt = list(renderer.render_ids(given[:number], tools=offered, add_generation_prompt=True))
        if ids[: len(prompt)] == prompt:
            mask[: len(prompt)] = [
                is_in and of != number for is_in, of in zip(mask, owners[: len(prompt)], strict=False)
            ]
        else:
            as_asked = False
    stops = renderer.get_stop_token_ids()
    if learned[-1] and any(mask) and ids[max(place for place, is_in in enumerate(mask) if is_in)] not in stops:
        ids.append(stops[0])  # some families end a turn only with the header of the next one
        mask.append(True)
    return trimmed(ids, mask, as_asked)


def by_template(
    tokenizer: Any,
    seam: Seam,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    learned: Sequence[bool],
    options: Mapping[str, Any],
    ends: Ends,
) -> Supervised:
    """Use the chat template alone: a turn is the text that it writes after the beginning of an assistant's turn.

    Prompt and turns are tokenized separately, as they are when the turns are sampled. A turn that the template does not
    end with a token of its own, nor with the header of the next turn, is ended with the tokenizer's EOS, as a sampled
    one is. Behind a marker of several tokens, at which rollouts stop, the EOS stands in the last turn alone, for
    engines that stop at tokens only.

    Raises:
        ChatError: the template changes a turn once others follow, or does not begin it with its generation prompt.
    """
    ids: list[int] = []
    mask: list[bool] = []
    said = ""
    for text, is_learned, closes in _pieces(tokenizer, with_arguments(messages), tools, learned, options, ends):
        new = seam.encode(text, behind=said) if said else tokenizer.encode(text, add_special_tokens=False)
        said += text
        if closes:
            new.append(_end_of(tokenizer))
            said += str(tokenizer.eos_token)
        ids += map(int, new)
        mask += [is_learned] * len(new)
    return trimmed(ids, mask)


def _pieces(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    learned: Sequence[bool],
    options: Mapping[str, Any],
    ends: Ends,
) -> Iterator[tuple[str, bool, bool]]:
    """Yield `(text, whether it is trained on, whether EOS is to follow it)`, in order."""

    def written(count: int, *, asks: bool = False) -> str:
        given = {**options, "tools": list(tools) or None}
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=asks, **given))

    whole, place, special = written(len(messages)), 0, {*special_tokens(tokenizer).values(), *ends.tokens}
    for number in [number for number, wanted in enumerate(learned) if wanted]:
        head, through = written(number, asks=True), _going_on(written(number + 1), whole, special)
        if not through.startswith(head):
            raise ChatError(
                f"the chat template begins message {number} differently from its generation prompt ({through[-80:]!r} "
                f"after {head[-40:]!r}), so the model would learn another beginning than the one it is sampled with. "
                "Set the renderer of the model (model.renderer), or an option of the template (model.chat)"
            )
        if not whole.startswith(through):
            raise ChatError(
                f"the chat template writes message {number} differently once other messages follow it (it may leave "
                "out earlier reasoning). Train on the last turn only (data.learn=last), or set the renderer of the "
                "model (model.renderer)"
            )
        body, closes = _closed(whole[len(head) : len(through)], messages[number], special)
        if closes and (end := _end_behind(whole[len(through) :], ends.tokens)):
            body, closes = whole[len(head) : len(through) + end], False
        closes &= number == len(messages) - 1 or not any(body.endswith(text) for text in ends.texts)
        yield whole[place : len(head)], False, False
        yield body, True, closes
        place = len(head) + len(body)
    yield whole[place:], False, False


def _going_on(through: str, whole: str, special: Collection[str]) -> str:
    """Leave out the special token with which a template (Phi's) ends any conversation, so also one that goes on; but
    not where another token ends the turn there (Harmony's): the model would learn both."""
    if whole.startswith(through):
        return through
    shorter = (through.removesuffix(token) for token in special if token and through.endswith(token))
    return next((text for text in shorter if whole.startswith(text) and _is_same_end(text, whole, special)), through)


def _end_behind(text: str, tokens: Collection[str]) -> int:
    """Length of the end that the template writes once the conversation goes on: with the next header, or as that (GLM).
    With the EOS in front of it, earlier turns would have two ends, as no prompt of a rollout has."""
    bare = text.lstrip()
    end = max((token for token in tokens if token and bare.startswith(token)), key=len, default="")
    return len(text) - len(bare) + len(end) if end else 0


def _is_same_end(text: str, whole: str, special: Collection[str]) -> bool:
    """Whether `text` ends its turn by itself, or nothing in `whole` ends it behind `text`."""
    bare, behind = text.rstrip(), whole[len(text) :].lstrip()
    return any(token and bare.endswith(token) for token in special) or not any(
        token and behind.startswith(token) for token in special
    )


def _closed(written: str, message: Message, special: Collection[str]) -> tuple[str, bool]:
    """The part of a turn that is trained on, without trailing white space; and whether it lacks an end token."""
    bare = written.rstrip()
    if any(token and bare.endswith(token) for token in special):
        return bare, False
    content = message.get("content")
    own = content[len(content.rstrip()) :] if isinstance(content, str) else ""
    if own and written[len(bare) :].startswith(own):
        bare += own  # trailing white space of the answer itself
    return bare, True


def _end_of(tokenizer: Any) -> int:
    """The id of the EOS token. Raises ChatError if there is none."""
    if tokenizer.eos_token_id is None:
        raise ChatError(
            "the chat template ends assistant turns without a special token, and the tokenizer has no EOS, so nothing "
            "would teach the model to stop. Give the tokenizer an eos_token"
        )
    return int(tokenizer.eos_token_id)
