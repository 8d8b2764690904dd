"""SGLang's HTTP API, according to its sources (`http_server.py`, `io_struct.py`) and to 0.5.23 on a CPU.

    /generate                        tokens in, tokens out
    /pause_generation mode=abort     running sequences are ended, new ones wait
    /update_weights_from_disk        a folder that the server reads, and the label of its contents
    /flush_cache                     drops the KV cache of the previous weights
    /continue_generation /abort_request /server_info /model_info

Only newer versions tell apart tokens of several weights (`weight_versions`), so no sequence continues over an update.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.checks.architecture import of_its_decoder
from asyncrl.checks.servers import ServerFacts
from asyncrl.engines.server.answers import TOLD_EVERY, Answer, ServerGoneError
from asyncrl.engines.server.link import Load, ServerLink
from asyncrl.engines.server.terms import LOOK_TIMEOUT_S
from asyncrl.engines.vllm.names import SHAPE_KEYS
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import AsyncRLError, GenerationError

log = logging.getLogger(__name__)
START_IT = "Start it as docs/servers.md says: python -m sglang.launch_server --model-path MODEL"
ALONE = ("dp_size", "pp_size", "tokenizer_worker_num")
"""Settings that must be 1: with more, each replica would have its own weights, or its own label of them."""
NONE_OF = ("quantization", "speculative_algorithm", "enable_lora", "preferred_sampling_params")
"""Settings that must be unset: they change log-probs, or the distribution that tokens are sampled from."""
AS_OURS = "Start it with the model of model.path"
FLUSH_S, AGAIN_S = 20.0, 0.02
"""Longest time in seconds that a flush of a busy cache is retried, and the pause between two tries."""
REPORTED_LESS, CONTEXT_MORE = 4, 2
"""With a context of C tokens its scheduler takes prompts of fewer than C - 6 (`max_req_input_len`), and silently ends a
sequence after C - 2 tokens, prompt included."""
DTYPES = {"float": "float32", "half": "float16"}
FILE = "model.safetensors"
"""Name of the file with a version's weights, in a folder of its own."""


def facts_of(settings: Mapping[str, Any]) -> ServerFacts:
    """Args: settings: /server_info, with the arguments that it was started with, and its scheduler's state."""
    return ServerFacts(
        max_length=int(settings["max_req_input_len"]) + REPORTED_LESS,
        spared=REPORTED_LESS + 1,
        width=int(settings["tp_size"]),
        option="--context-length",
        option_adds=CONTEXT_MORE,
    )


def problems(
    settings: Mapping[str, Any], model: Mapping[str, Any], dtype: str, shape: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield the reasons why this server cannot be used. Args: settings: as for `facts_of`. model: /model_info. dtype,
    shape: as `ServerLink.facts`."""
    if "weight_version" not in model:
        yield "its /model_info does not say which weights it has: it is too old. Start a newer SGLang"
    for key in ALONE:
        if settings.get(key, 1) != 1:
            yield f"its {key} is {settings[key]}, but only --tp-size may be more than 1. Start it with 1"
    for key in NONE_OF:
        if settings.get(key):
            yield f"it has {key}={settings[key]!s:.80}, and its log-probs were never verified with that"
    served = DTYPES.get(settings["dtype"], settings["dtype"])
    if dtype and served not in ("auto", dtype):
        yield f"it computes in {served}, but the run expects engines to compute in {dtype}. Set engine.dtype={served}"
    theirs, ours = model.get("architectures"), (shape or {}).get("architectures")
    if theirs and ours and list(theirs) != list(ours):
        yield f"it serves a {theirs[0]}, but model.path is a {ours[0]}. {AS_OURS}"
    for key, their in _started_with(settings).items():
        our = (shape or {}).get(key)
        if our is not None and their is not None and our != their:
            yield f"its model has {key}={their}, but model.path has {our}: it would die at the first load. {AS_OURS}"


def _started_with(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Shape of the model that the server was started with; empty if its folder is not visible from here."""
    try:
        config = json.loads((Path(settings["model_path"]) / "config.json").read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    own = of_its_decoder(config) if isinstance(config, dict) else {}
    return {key: own.get(key) for key in SHAPE_KEYS if key != "architectures"}


class SglangLink(ServerLink):
    """It does not ask how busy a server is: SGLang reports it only with --enable-metrics."""

    kind, start_it = "SGLang", START_IT
    tells_spans = False
    broken_off = GenerationError  # it reports request errors this way; a lost engine process breaks the connection

    def __init__(self, url: str, *, base_url: str, key: str, timeout_s: float) -> None:
        super().__init__(url, base_url=base_url, key=key, timeout_s=timeout_s)
        self.width = 1
        """Number of its processes."""
        self._one_load = asyncio.Lock()
        """One load at a time: the server gives the answer of the first of two concurrent loads to both."""
        self._process: Any = None
        """The server's `random_seed`, drawn at its start: another value is another process."""
        self._unanswered: tuple[str, Any] | None = None
        """Label and process of a load from disk that may still be running."""

    async def facts(self, dtype: str, shape: Mapping[str, Any] | None) -> ServerFacts:
        # Not /health, which generates a token: a server left paused by a dead worker never does.
        model = await self.ask("GET", "/model_info")
        label = str(self.part(model, "weight_version"))
        settings = await self.ask("GET", "/server_info")  # this asks its scheduler, too
        self._process = self.part(settings, "random_seed")
        if self._unanswered is not None:
            if self._unanswered[0] != label and self._unanswered[1] == self._process:
                raise ServerGoneError(
                    f"{self.url} may still be loading {self._unanswered[0]}. If this does not end, restart it"
                )
            self._unanswered = None
        try:
            why, facts = next(problems(settings, model, dtype, shape), ""), facts_of(settings)
        except (KeyError, TypeError, ValueError) as error:
            raise self.unusable(
                f"its /server_info has an unknown form ({type(error).__name__}: {error}). Start a newer SGLang"
            ) from error
        if why:
            raise self.unusable(why)
        await self.check_generation("/generate")
        self.width = facts.width
        return facts

    async def label(self, timeout_s: float) -> str:
        return str(await self.get("/model_info", "weight_version", timeout_s))

    def stream(self, sibling: Sibling, name: str, label: str) -> AsyncIterator[Mapping[str, Any]]:
        sampling = sibling.request.sampling
        return self.chunks(
            "/generate",
            {
                "rid": name,
                "input_ids": sibling.request.prompt_ids.tolist(),
                "stream": True,
                "return_logprob": True,
                "extra_key": label,
                "sampling_params": {
                    "max_new_tokens": sampling.max_new_tokens,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k or -1,
                    "min_p": sampling.min_p,
                    "stop_token_ids": list(sampling.stop_token_ids),
                    "ignore_eos": not sampling.stop_token_ids,  # it would ignore those as well
                    "stream_interval": 1 if sampling.stop else TOLD_EVERY,
                },
            },
            name,
        )

    def read(self, chunk: Mapping[str, Any], answer: Answer) -> int:
        """Append a chunk; it holds all tokens so far, or with --incremental-streaming-output the new ones."""
        have = len(answer.token_ids)
        try:
            meta = chunk["meta_info"]
            ended, label = (meta["finish_reason"] or {}).get("type", ""), meta["weight_version"]
            answer.finish_reason = ended
            if ended == "abort":  # the rest of such a chunk may be anything
                return 0
            found, count = meta["output_token_logprobs"] or [], meta["completion_tokens"]
            first = count - len(found)
            new = found[have - first :] if 0 <= first <= have <= count else None
            tokens, logprobs = [int(each[1]) for each in new or ()], [float(each[0]) for each in new or ()]
            spans = [dict(span) for span in meta.get("weight_versions") or ()]
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
            raise ServerGoneError(
                f"{self.url} sent a chunk that is not SGLang's ({error!r}): {chunk!s:.200}"
            ) from error
        if new is None:
            raise ServerGoneError(f"{self.url} sent tokens {first} to {count} after {have} of them")
        if any(span["version"] != label for span in [*answer.spans, *spans]):
            raise ServerGoneError(f"{self.url} changed its weights to {label!r} during a sequence")
        answer.token_ids += tokens
        answer.logprobs += logprobs
        answer.spans = [{"version": label, "start": 0, "end": count}]
        return len(tokens)

    async def abort(self, name: str) -> None:
        await self.ask("POST", "/abort_request", {"rid": name}, text=True)

    async def score(self, ids: NDArray[np.int32], name: str) -> NDArray[np.float32]:
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        body = {"rid": name, "input_ids": ids.tolist(), "return_logprob": True, "logprob_start_len": 0}
        answer = await self.post("/generate", body | {"sampling_params": {"max_new_tokens": 1, "temperature": 0.0}})
        found = self.part(self.part(answer, "meta_info"), "input_token_logprobs")
        if [each[1] for each in found] != ids.tolist():
            raise GenerationError(f"{self.url} scored {len(found)} tokens that are not the {len(ids)} it was given")
        return np.array([each[0] for each in found[1:]], np.float32)

    async def _flush(self) -> None:
        """waits for: the scheduler to remove the ended sequences. Raises GenerationError: it has not within
        `FLUSH_S`."""
        deadline = time.monotonic() + FLUSH_S
        while True:
            try:
                return await self.ask("POST", "/flush_cache", text=True)
            except GenerationError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def load(self, load: Load) -> None:
        load.overtake()
        async with self._one_load:
            try:
                await self.post("/pause_generation", {"mode": "abort"})
                await self._read_from_disk(load)
                await self._flush()
                if await self.label(LOOK_TIMEOUT_S) != load.label:
                    raise GenerationError(f"{self.url} has another label than it was given")
                await self.post("/continue_generation", {})
            except AsyncRLError as error:
                raise ServerGoneError(f"{self.url} could not load {load.label} and may be paused: {error}") from error

    async def _read_from_disk(self, load: Load) -> None:
        self._unanswered = (load.label, self._process)
        body = {"model_path": load.path, "load_format": "safetensors", "weight_version": load.label}
        body |= {"flush_cache": False}  # a flush fails the load while ended sequences are still in a batch
        try:
            await self.post("/update_weights_from_disk", body)
        except GenerationError as error:
            self._unanswered = None
            raise GenerationError(
                f"{error}. Can it read that folder? A server of engine=sglang reads its weights from run.dir, which it "
                "has to see under the same path"
            ) from error
        self._unanswered = None
