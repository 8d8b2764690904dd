"""Host-side state of the running rows, as numpy columns; row r is row r of the KV slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.hf.requests import Pending
from asyncrl.engines.noise import mixes, uniforms
from asyncrl.engines.stop_text import ended_by_text
from asyncrl.types import NO_VERSION, ROUTED_EXPERTS, TOPK_IDS, TOPK_LOGPROBS, Completion

_NO_STOP = -1


class RunningBatch:
    """The running rows: `[0, rows)` are live. `length` counts tokens whose keys are in the slots, without the last
    sampled one."""

    def __init__(self, max_sequences: int) -> None:
        self.rows = 0
        self.owners: list[tuple[Pending, int]] = []
        """(request, member) of each row."""
        self.length = np.zeros(max_sequences, np.int64)
        self.produced = np.zeros(max_sequences, np.int64)
        self.limit = np.zeros(max_sequences, np.int64)
        self.temperature = np.zeros(max_sequences, np.float32)
        self.key = np.zeros(max_sequences, np.uint64)
        self.stops = np.full((max_sequences, 1), _NO_STOP, np.int64)
        self.tokens = np.zeros((max_sequences, 64), np.int32)
        self.logprobs = np.zeros((max_sequences, 64), np.float32)
        self.versions = np.full((max_sequences, 64), NO_VERSION, np.int32)
        self.truncation = np.zeros((3, max_sequences), np.float32)
        """Top-p, top-k and min-p; 1, 0 and 0 sample from the whole vocabulary."""
        self._wanted = np.zeros((5, max_sequences), np.int64)
        """What each row requests besides tokens: see `_look_at_rows`."""
        self.recorded: list[dict[str, list[NDArray[Any]]]] = []
        """The pieces of `Completion.recorded` so far, by row."""
        self.topk = 0
        """Largest number of most likely tokens that any row records."""
        self.any_greedy = False
        self.any_truncated = False
        self.any_text = False
        """Whether any row has a stop text."""
        self.any_routed = False
        """Whether any row records its experts."""

    def add(self, pending: Pending) -> None:
        """Append the request's `n` rows, with the prompt prefilled and nothing sampled yet."""
        request, first = pending.request, self.rows
        stop = first + request.n
        stops = request.sampling.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            extra = np.full((len(self.stops), len(stops) - self.stops.shape[1]), _NO_STOP, np.int64)
            self.stops = np.concatenate([self.stops, extra], axis=1)
        self.length[first:stop] = len(request.prompt_ids)
        self.produced[first:stop] = 0
        self.limit[first:stop] = request.sampling.max_new_tokens
        self.temperature[first:stop] = request.sampling.temperature
        self.key[first:stop] = mixes(request.seed, request.n)
        self.stops[first:stop] = _NO_STOP
        self.stops[first:stop, : len(stops)] = stops
        sampling = request.sampling
        narrowed = (sampling.top_p, sampling.top_k, sampling.min_p) if sampling.truncated else (1.0, 0.0, 0.0)
        self.truncation[:, first:stop] = np.array(narrowed, np.float32)[:, None]
        asked = (sampling.temperature == 0, sampling.truncated, sampling.stop, sampling.record_routing)
        self._wanted[:, first:stop] = np.array([*map(bool, asked), sampling.record_topk], np.int64)[:, None]
        self.recorded.extend({} for _ in range(request.n))
        self.owners.extend((pending, member) for member in range(request.n))
        self.rows = stop
        self._look_at_rows()

    def uniforms(self, start: int = 0) -> NDArray[np.float64]:
        """[rows - start] the uniform random number of each row for its next token."""
        live = slice(start, self.rows)
        return uniforms(self.key[live], self.produced[live])

    def truncations(self, start: int = 0) -> NDArray[np.float32] | None:
        """[3, rows - start] truncation of each row; None if no row is truncated."""
        return self.truncation[:, start : self.rows] if self.any_truncated else None

    def last_tokens(self) -> NDArray[np.int64]:
        rows = np.arange(self.rows)
        return self.tokens[rows, self.produced[: self.rows] - 1].astype(np.int64)

    def held(self, row: int) -> NDArray[np.int32]:
        """[length] the tokens of a row whose keys are in the slots."""
        prompt = self.owners[row][0].request.prompt_ids
        return np.concatenate([prompt, self.tokens[row, : self.length[row] - len(prompt)]])

    def record(
        self,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        policy_version: int,
        start: int = 0,
        recorded: Mapping[str, Sequence[NDArray[Any]]] | None = None,
    ) -> NDArray[np.int64]:
        """Append one sampled token to rows `[start, rows)`; returns the rows that are finished.

        Args:
            recorded: by name, the piece that each of these rows appends to `Completion.recorded`.
        """
        rows, live = np.arange(start, self.rows), slice(start, self.rows)
        column = self.produced[live].copy()
        self._widen(int(column.max()) + 1)
        self.tokens[rows, column] = tokens
        self.logprobs[rows, column] = logprobs
        self.versions[rows, column] = policy_version
        self.produced[live] = column + 1
        for name, pieces in (recorded or {}).items():
            for row, piece in zip(rows.tolist(), pieces, strict=True):
                # Recorded only for rows that request it, whatever their batch-mates request.
                sampling = self.owners[row][0].request.sampling
                if name in (TOPK_IDS, TOPK_LOGPROBS):
                    if sampling.record_topk:
                        self.recorded[row].setdefault(name, []).append(piece[:, : sampling.record_topk])
                elif sampling.truncated:
                    self.recorded[row].setdefault(name, []).append(piece)
        stopped = (tokens[:, None] == self.stops[live]).any(axis=1)
        if self.any_text:
            stopped |= np.array([self._ended_by_text(row) for row in rows.tolist()], bool)
        return rows[stopped | (column + 1 >= self.limit[live])]

    def route(self, routed: Sequence[NDArray[Any]], start: int = 0) -> None:
        """Append the experts of the tokens fed to rows `[start, rows)`.

        Args:
            routed: [tokens, layers, k] of each row, padded on the right; empty if no row records them.
        """
        for row, each in enumerate(routed, start):
            request = self.owners[row][0].request
            if request.sampling.record_routing:
                fed = 1 if self.produced[row] else len(request.prompt_ids)
                self.recorded[row].setdefault(ROUTED_EXPERTS, []).append(each[:fed])

    def completions(self, rows: NDArray[np.int64]) -> list[Completion]:
        """Return the completions of some rows, at least one; their arrays share memory."""
        counts = self.produced[rows]
        longest = int(counts.max())
        tokens, logprobs = self.tokens[rows, :longest], self.logprobs[rows, :longest]
        versions = self.versions[rows, :longest]
        last = tokens[np.arange(len(rows)), counts - 1]
        stopped = (last[:, None] == self.stops[rows]).any(axis=1)
        return [
            Completion(
                token_ids=tokens[place, :count],
                logprobs=logprobs[place, :count],
                policy_versions=versions[place, :count],
                finish_reason="stop" if stop or (self.any_text and self._ended_by_text(row)) else "length",
                recorded={name: np.concatenate(pieces) for name, pieces in self.recorded[row].items()},
            )
            for place, (row, count, stop) in enumerate(
                zip(rows.tolist(), counts.tolist(), stopped.tolist(), strict=True)
            )
        ]

    def _ended_by_text(self, row: int) -> bool:
        return ended_by_text(self.owners[row][0].request, self.tokens[row, : self.produced[row]].tolist())

    def remove(self, gone: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free rows `gone` by moving the last live rows onto them; returns `(source, target)` rows moved."""
        keep = self.rows - len(gone)
        dead = np.zeros(self.rows, bool)
        dead[gone] = True
        target = np.flatnonzero(dead[:keep])
        source = keep + np.flatnonzero(~dead[keep:])
        columns = (self.length, self.produced, self.limit, self.temperature, self.key, self.stops)
        for column in (*columns, self.tokens, self.logprobs, self.versions):
            column[target] = column[source]
        for table in (self.truncation, self._wanted):
            table[:, target] = table[:, source]
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.owners[new], self.recorded[new] = self.owners[old], self.recorded[old]
        del self.owners[keep:], self.recorded[keep:]
        self.rows = keep
        self._look_at_rows()
        return source, target

    def _look_at_rows(self) -> None:
        greedy, truncated, text, routed, topk = self._wanted[:, : self.rows].max(axis=1, initial=0).tolist()
        self.any_greedy, self.any_truncated = bool(greedy), bool(truncated)
        self.any_text, self.any_routed, self.topk = bool(text), bool(routed), topk

    def _widen(self, columns: int) -> None:
        have = self.tokens.shape[1]
        if columns <= have:
            return
        pad = ((0, 0), (0, max(have, columns - have)))
        self.tokens, self.logprobs = np.pad(self.tokens, pad), np.pad(self.logprobs, pad)
        self.versions = np.pad(self.versions, pad, constant_values=NO_VERSION)
