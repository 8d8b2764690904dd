"""Chooses the probe tokens of a run's canary, once: pieces of its own prompts, or random tokens if none are
available."""

from __future__ import annotations

import json
import logging
import random

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.chat.base import PromptRenderer
from asyncrl.chat.hub import described_in
from asyncrl.checks.servers import PROBE_TOKENS
from asyncrl.checks.sources import places, sources
from asyncrl.data.dataset import Dataset
from asyncrl.data.local_tokenizer import load_local_tokenizer
from asyncrl.data.prompts import render
from asyncrl.data.rows.opening import open_source
from asyncrl.errors import AsyncRLError, ConfigError, DataError
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.parallel.collectives import is_first, text_of_rank_zero
from asyncrl.schema import Config
from asyncrl.weights.canary import MAX_PROBES, random_probes

log = logging.getLogger(__name__)

SETS = 2
"""Sets of probes in a run's canary: the second decides where the first fails."""
PROBES = 16
"""Number of sequences in a set, of PROBE_TOKENS each: the mean over this many tokens is within a tenth of the mean
over more. If the model has fewer positions there are more sequences, with about as many tokens."""
ROWS = 256
"""Limit on rows that are read: all prompts of a file may start alike."""
IN_FILES = {"jsonl", "parquet", "saved"}
"""Kinds of `checks.sources.Place`."""

Probes = tuple[NDArray[np.int32], ...]
"""[T] token ids each."""


def agreed_probes(
    config: Config, model: PolicyModel, device: torch.device, tokenizer: PromptRenderer | None = None
) -> Probes:
    """SETS sets of `probes_of_run`, one after the other and of the same size (the first may have one more), from rank
    0, which alone reads the data and logs where they come from. Collective."""
    mine = ""
    if is_first():
        probes, why_random = probes_of_run(config, model, tokenizer, sets=SETS)
        log.info("canary: %s", f"random tokens: {why_random}" if why_random else "tokens of this run's prompts")
        # Dealt out in turns: with few prompts each set has some, and some of the random tokens that fill them up.
        mine = json.dumps([ids.tolist() for first in range(SETS) for ids in probes[first::SETS]])
    return tuple(np.array(ids, np.int32) for ids in json.loads(text_of_rank_zero(mine, device)))


def probes_of_run(
    config: Config, model: PolicyModel, tokenizer: PromptRenderer | None = None, *, sets: int = 1
) -> tuple[Probes, str]:
    """Pieces of the run's prompts, determined by its seed, filled up with random tokens; or random tokens only, and the
    reason. `tokenizer`: the model's, if it was read already."""
    vocabulary, longest = _bounds(model)
    try:
        pieces = _pieces(_rows(config), tokenizer or _tokenizer(config.model.path), longest, config.seed, sets)
    except (AsyncRLError, OSError, ValueError) as error:  # the last: a tokenizer's file
        return probes_of(model, config.seed, sets), str(error)
    if max(int(ids.max()) for ids in pieces) >= vocabulary:
        return probes_of(
            model, config.seed, sets
        ), f"the prompts have tokens outside the model's vocabulary of {vocabulary}"
    missing = max(sets * PROBES * PROBE_TOKENS - sum(map(len, pieces)), 0)
    return (*pieces, *random_probes(vocabulary, config.seed, count=-(-missing // longest), length=longest)), ""


def probes_of(model: PolicyModel, seed: int, sets: int = 1) -> Probes:
    """Random probes within the model's vocabulary and maximum sequence length."""
    vocabulary, longest = _bounds(model)
    return random_probes(vocabulary, seed, count=sets * PROBES, length=longest)


def _bounds(model: PolicyModel) -> tuple[int, int]:
    """Size of the vocabulary, and the largest length of a probe."""
    settings = model.hf.config.get_text_config(decoder=True)
    longest = getattr(settings, "max_position_embeddings", None) or PROBE_TOKENS  # ALiBi has no last position
    return int(settings.vocab_size), min(PROBE_TOKENS, longest)


def _rows(config: Config) -> Dataset:
    """Rows of sources in local files: others would run user code, or fetch a dataset."""
    here = [source for source in sources(config.data) if {place.kind for place in places(source)} <= IN_FILES]
    if not here:
        raise ConfigError("the learner reads only prompts in files")
    return Dataset([open_source(source) for source in here])


def _tokenizer(model_path: str) -> PromptRenderer:
    folder = described_in(model_path)
    tokenizer = load_local_tokenizer(folder) if folder else None
    if tokenizer is None:
        raise ConfigError(f"model.path={model_path} has no tokenizer.json")
    return tokenizer


def _pieces(rows: Dataset, tokenizer: PromptRenderer, longest: int, seed: int, sets: int) -> Probes:
    """Pieces from anywhere within prompts: many start alike, and all chats end alike. Short prompts are joined, because
    an engine scores each probe in a separate forward. Raises DataError if no prompt has two tokens."""
    drawn, found = random.Random(seed), dict[bytes, NDArray[np.int32]]()
    piece = np.empty(0, np.int32)
    try:
        for row in drawn.sample(range(len(rows)), min(len(rows), ROWS)):
            ids = render(tokenizer, rows[row], rows.where(row))[1]
            start = drawn.randint(0, max(len(ids) - longest, 0))
            piece = np.concatenate([piece, ids[start : start + longest]])[:longest]
            if len(piece) == longest:
                found[piece.tobytes()], piece = piece, piece[:0]
            if (
                sum(map(len, found.values())) >= sets * PROBES * PROBE_TOKENS
                or len(found) == MAX_PROBES - sets * PROBES
            ):
                break
    finally:
        rows.close()
    if len(piece) > 1 and len(found) < sets * PROBES:
        found[piece.tobytes()] = piece
    if not found:
        raise DataError("no prompt has two tokens")
    return tuple(found.values())
