"""A small retriever: `asyncrl retriever corpus.jsonl`. BM25 over HTTP, on loopback by default.

`POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}` is answered by `{"result": [[{"document": ROW,
"score": 1.5}, ...], ...]}`. Rows are as in the file, with `contents` added if they have only title and text, and
without `score` unless it is requested. This is the protocol of the retrievers of Search-R1 (`search_r1/search` and
`llm_agent/generation.py` of its repository), so that one can replace the other.

consumes:     queries
waits for:    the next query, without a deadline
unblocked by: a request, a signal; if started by a worker (`python -m` with CORPUS PARENT_PID), also by the worker's end
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

from asyncrl.checks.addresses import is_loopback
from asyncrl.data.rows.base import Row
from asyncrl.environments.late import late_import
from asyncrl.environments.search.corpus import NEEDS_BM25, Corpus, passage
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.http_server import Answers, HttpServer
from asyncrl.utils.process_tree import die_with_parent

LOOPBACK = "127.0.0.1"
PATH = "/retrieve"
READY = "retriever: "
"""Start of the line that reports the address."""
MOST_BYTES = 1 << 20
"""Limit on the bytes of a request."""
MOST_QUERIES, MOST_RESULTS = 1024, 1000
IDLE_S = 300.0
"""Seconds after which an idle connection is closed."""


class Retriever:
    def __init__(self, corpus: Corpus) -> None:
        """Build the index. Raises DataError for a line that is not a passage."""
        self.corpus = corpus
        module = late_import("search.bm25", NEEDS_BM25, "search")
        self._index = module.Bm25(corpus.texts())

    def answer(self, asked: Any) -> dict[str, Any]:
        """Answer a request. Raises ValueError for an invalid one."""
        if not isinstance(asked, dict):
            raise ValueError("a request must be a JSON object with `queries`")
        queries, most = asked.get("queries"), asked.get("topk") or 3
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise ValueError("`queries` must be a list of texts")
        if not isinstance(most, int) or not 0 < most <= MOST_RESULTS or len(queries) > MOST_QUERIES:
            raise ValueError(f"at most {MOST_QUERIES} queries, and `topk` from 1 to {MOST_RESULTS}")
        scored = bool(asked.get("return_scores"))
        return {"result": [self._found(query, most, scored) for query in queries]}

    def _found(self, query: str, most: int, scored: bool) -> list[Any]:
        found = [(with_contents(self.corpus[place]), score) for place, score in self._index.search(query, most)]
        return [{"document": row, "score": score} if scored else row for row, score in found]


def with_contents(row: Row) -> Row:
    """Add `contents`, the only field that clients of Search-R1 read: the title, a line break, the text."""
    return row if "contents" in row else {**row, "contents": "\n".join(passage(row))}


class Server(HttpServer):
    def __init__(self, retriever: Retriever, host: str, port: int) -> None:
        """Raises ConfigError if the address is not available."""
        self.retriever, self.name, self.is_local = retriever, host, is_loopback(host)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            said = f"the retriever cannot listen at {host}:{port}: {error}"
            raise ConfigError(f"{said}. Give --host or --port") from error

    @property
    def url(self) -> str:
        return f"{super().url}{PATH}"


class Handler(Answers):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = IDLE_S

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 10) or int(length) > MOST_BYTES:
            self.close_connection = True  # the body is not read
            return self._say(413, {"error": f"a request must have a Content-Length of at most {MOST_BYTES}"})
        body = self.rfile.read(int(length))
        if self.server.is_local and not is_own_name(self.headers.get("Host", ""), self.server.name):
            return self._say(403, {"error": "request it by its address or as localhost"})
        if self.path != PATH:
            return self._say(404, {"error": f"only {PATH} exists here"})
        try:
            said = self.server.retriever.answer(json.loads(body))
        except (ValueError, RecursionError) as error:
            return self._say(400, {"error": str(error)})
        self._say(200, said)

    def _say(self, status: int, said: dict[str, Any]) -> None:
        self.say(status, json.dumps(said).encode(), {"Content-Type": "application/json"})


def is_own_name(host: str, given: str) -> bool:
    """Whether the Host header is an address, localhost, or the name `given`; a web page whose host name resolves to
    loopback would send its own name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", given.lower()) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def serve(corpus: str, host: str, port: int) -> int:
    """Serve until a signal. Raises AsyncRLError: the corpus cannot be used, or the address is not available."""
    held = Corpus(corpus)
    with Server(Retriever(held), host, port) as server:
        if not is_loopback(host):
            print(f"anyone who can reach {host} can read the corpus: no key is needed", file=sys.stderr)
        print(f"{READY}{len(held)} passages at {server.url}", flush=True)
        server.serve_forever()
    return 0


def main(corpus: str, parent: int) -> int:
    """Run as a child process that ends with its parent, on any free loopback port."""
    die_with_parent(parent)
    try:
        return serve(corpus, LOOPBACK, 0)
    except AsyncRLError as error:
        print(error, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
