"""`environment.name=search`: the policy queries a retriever, reads passages, and answers, as in Search-R1."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.environments.episodes import Asked
from asyncrl.environments.late import late_import
from asyncrl.environments.search.corpus import NEEDS_BM25, Corpus
from asyncrl.environments.tools.calling import Budget, Calling, check_positive
from asyncrl.environments.tools.styles import Native, Style, Tagged
from asyncrl.errors import ConfigError, DataError, EpisodeError

STYLES: dict[str, tuple[Style, str]] = {
    "tag": (
        Tagged(tool="search", argument="query", tag="search", result="information", final="answer"),
        "Think before you answer. Where you lack a fact, write <search>what to look for</search>: passages that were "
        "found follow at once, between <information> and </information>, and you go on. Search as often as it helps. "
        "Then give the answer alone, in as few words as it takes, between <answer> and </answer>.",
    ),
    "tool": (
        Native(),
        "Think before you answer, and search where you lack a fact. Then give the answer alone, in as few words as it "
        "takes, between <answer> and </answer>.",
    ),
}
"""Values of `environment.args.call`: how queries are written, and the instructions that the policy gets."""


AGAIN = (
    "That was neither a query nor an answer. To search, write <search>what to look for</search>; to end, give the "
    "answer between <answer> and </answer>. Try again."
)


class Search(Calling):
    """Scored by `reward.function`, which gets the last reply: `qa_exact_match` and `f1` read its `<answer>`.

    Args:
        url: address of a retriever; see `search.server` for its requests and answers.
        corpus: instead, a JSONL file of passages, for which each worker starts its own retriever.
        call: `tag`: `<search>` in the policy's own turn, followed by `<information>`; `tool`: calls of the chat
            template.
        topk: passages per query.
        max_turns, max_calls, max_calls_per_turn, max_result: see `Budget`.
        request_timeout_s, retries, backoff_s: of a query; see `Asking`.
        retry: whether the policy is told and tries again after a reply that neither searches nor answers, as in
            Search-R1.
        tell: whether the policy gets instructions for searching; `system` replaces them.
    """

    def __init__(
        self,
        url: str = "",
        corpus: str = "",
        call: str = "tag",
        topk: int = 3,
        max_turns: int = 5,
        max_calls: int = 8,
        max_calls_per_turn: int = 2,
        max_result: int = 4000,
        request_timeout_s: float = 30.0,
        retries: int = 4,
        backoff_s: float = 0.5,
        retry: bool = False,
        tell: bool = True,
        system: str = "",
    ) -> None:
        check_source(url, corpus)
        if call not in STYLES:
            raise ConfigError(f"environment.args.call must be one of {', '.join(STYLES)}; got {call!r}")
        if retry and call != "tag":
            raise ConfigError(
                f"environment.args.retry does nothing with call={call}, where any reply may be the answer"
            )
        check_positive(topk=topk, request_timeout_s=request_timeout_s, backoff_s=backoff_s)
        budget = Budget(
            max_turns=max_turns, max_calls=max_calls, max_calls_per_turn=max_calls_per_turn, max_result=max_result
        )
        asking = {"request_timeout_s": request_timeout_s, "retries": retries, "backoff_s": backoff_s}
        room = retrievers()
        self.retriever = room.OwnRetriever(corpus, topk, **asking) if corpus else room.Retriever(url, topk, **asking)
        style, said = STYLES[call]
        super().__init__(
            [self.retriever],
            style=style,
            budget=budget,
            tell=tell,
            system=system or (said if tell else ""),
            again=AGAIN if retry else "",
        )

    async def aclose(self) -> None:
        await self.retriever.disconnect()
        self.close()

    @staticmethod
    def for_first_request(**args: Any) -> dict[str, Any]:
        """Arguments with which the first request is the same, and no index is made of a corpus."""
        return args | ({"corpus": "", "url": "http://127.0.0.1"} if args.get("corpus") else {})

    @classmethod
    def check(cls, **args: Any) -> Asked:
        """Check before a start, in a separate process, that there is a retriever or a corpus. Returns the requirements
        on the chat. Raises ConfigError."""
        url, corpus = args.get("url", ""), args.get("corpus", "")
        check_source(url, corpus)
        if corpus:
            retrievers()
            late_import("search.bm25", NEEDS_BM25, "search")
            try:
                Corpus(corpus)
            except DataError as error:
                raise ConfigError(f"environment.args.corpus: {error}") from error
            # As with a retriever, which is only started for the run.
            return Search(**{**args, "corpus": "", "url": "http://127.0.0.1"}).asked
        made = Search(**{**args, "retries": 1})
        try:
            asyncio.run(made.retriever.answer("is anybody there?"))
        except EpisodeError as error:
            raise ConfigError(
                f"environment.args.url: {error}. Start one (asyncrl retriever corpus.jsonl), or give "
                "environment.args.corpus=FILE.jsonl"
            ) from error
        return made.asked


def check_source(url: str, corpus: str) -> None:
    """Raises ConfigError unless exactly one of them is given."""
    if bool(url) == bool(corpus):
        raise ConfigError(
            "environment.name=search needs either environment.args.url, the address of a retriever, or "
            f"environment.args.corpus, a JSONL file of passages; got url={url!r} and corpus={corpus!r}"
        )


def retrievers() -> Any:
    """Return the module that sends queries. Raises ConfigError if a package that it needs is not installed."""
    return late_import("search.retriever", "environment.name=search needs the package httpx", "search")
