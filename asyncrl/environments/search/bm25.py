"""Okapi BM25, by `bm25s`: finds the texts of a corpus that share the rare words of a query."""

from __future__ import annotations

import re
from collections.abc import Iterable

import bm25s
import numpy as np
from bm25s.tokenization import Tokenized

K1, B = 1.2, 0.75
"""Saturation of repeated words, and the penalty of long texts."""
WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


class Bm25:
    """An index in memory. The score contribution of each word to each text that has it is precomputed."""

    def __init__(self, texts: Iterable[str], k1: float = K1, b: float = B) -> None:
        self._terms: dict[str, int] = {}
        ids = [[self._terms.setdefault(word, len(self._terms)) for word in words(text)] for text in texts]
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
        if self._terms:
            self._index.index(Tokenized(ids=ids, vocab=self._terms), create_empty_token=False, show_progress=False)
        self._scale = k1 + 1  # Lucene leaves out the constant factor of Okapi's formula

    def search(self, query: str, most: int) -> list[tuple[int, float]]:
        """Return (index, score) of the best texts, best first, equal ones in their order; only texts that share a
        word."""
        asked = [self._terms[word] for word in words(query) if word in self._terms]
        if not asked:
            return []
        scores = self._index.get_scores_from_ids(asked) * self._scale
        found = np.flatnonzero(scores > 0)
        best = found[np.lexsort((found, -scores[found]))][:most]
        return [(int(place), float(scores[place])) for place in best]
