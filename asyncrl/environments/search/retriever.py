"""The worker's side of a retriever: queries it over HTTP, and starts one of our own if only a corpus is given."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from typing import Any

from asyncrl.environments.search.corpus import passage
from asyncrl.environments.search.server import READY
from asyncrl.environments.tools.calling import OneTool, sound
from asyncrl.errors import ConfigError, EpisodeError, RewardError
from asyncrl.rewards.library.asking import Asking
from asyncrl.utils.process_tree import describe_exit

DESCRIPTION = "Search for passages that share words with a query."
START_S = 600.0
"""Seconds for our own retriever to read a corpus and build its index."""


class Retriever(OneTool):
    """A retriever that others started.

    Args:
        topk: passages per query.
        asking: request_timeout_s, retries, backoff_s; see `Asking`.
    """

    def __init__(self, url: str, topk: int, **asking: Any) -> None:
        super().__init__("search", DESCRIPTION, argument="query", meaning="What to look for.", what="query")
        self._topk = topk
        self._asking = Asking(url, who="retriever", key_env="", **asking)

    async def answer(self, text: str) -> str:
        """Return passages. Raises EpisodeError: the retriever did not answer, or not with passages."""
        try:
            said = await self._asking.post({"queries": [sound(text)], "topk": self._topk, "return_scores": True})
        except RewardError as error:  # `Asking` raises errors of rewards
            raise EpisodeError(str(error)) from error
        try:
            (results,) = said["result"]
            documents = [each.get("document", each) for each in results]
            if not all(isinstance(one.get("contents", one.get("text")), str) for one in documents):
                raise ValueError("a passage has neither `contents` nor `text`")  # the policy would read nothing
            passages = [passage(one) for one in documents]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise EpisodeError(
                f"the retriever at {self._asking.url} did not answer with a list of passages, each with `contents`, or "
                f"`title` and `text`: {said!r:.200}"
            ) from error
        told = [f"[{place}] " + "\n".join(filter(None, one)) for place, one in enumerate(passages[: self._topk], 1)]
        return "\n".join(told) or "[nothing was found]"

    async def disconnect(self) -> None:
        await self._asking.close()


class OwnRetriever(Retriever):
    """A retriever with its own server, which ends with this process.

    Raises:
        ConfigError: the corpus cannot be used, or the server did not start.
    """

    def __init__(self, corpus: str, topk: int, **asking: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.environments.search.server", corpus, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        try:
            super().__init__(self._url(corpus), topk, **asking)
        except BaseException:
            self.close()
            raise

    def _url(self, corpus: str) -> str:
        """waits for: the index; unblocked by: the server's first line, its end, or START_S."""
        assert self._process.stdout is not None
        deadline, said = time.monotonic() + START_S, b""
        while not said.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise ConfigError(f"environment.args.corpus={corpus}: the index was not ready within {START_S:g} s")
            if not (more := os.read(self._process.stdout.fileno(), 1 << 12)):
                break
            said += more
        first = said.decode(errors="replace").strip()
        if not first.startswith(READY):
            why = first or f"the retriever ended ({describe_exit(self._process.wait(START_S))})"
            raise ConfigError(f"environment.args.corpus={corpus}: {why}")
        return first.rpartition(" ")[2]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
