"""Okapi BM25: finds the texts of a corpus that share the rare words of a query."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

K1, B = 1.2, 0.75
"""Saturation of repeated words, and the penalty of long texts."""
WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


class Bm25:
    """An index in memory: 8 bytes per word and text that has it. The score contribution of each is precomputed."""

    def __init__(self, texts: Iterable[str], k1: float = K1, b: float = B) -> None:
        self._terms: dict[str, int] = {}
        terms, texts_of, counts, lengths = array("i"), array("i"), array("i"), array("i")
        for place, text in enumerate(texts):
            found = Counter(words(text))
            lengths.append(found.total())
            for word, count in found.items():
                terms.append(self._terms.setdefault(word, len(self._terms)))
                texts_of.append(place)
                counts.append(count)
        of, length = np.frombuffer(terms, np.int32), np.frombuffer(lengths, np.int32).astype(np.float32)
        order = np.argsort(of, kind="stable")
        self._texts = np.frombuffer(texts_of, np.int32)[order]
        having = np.bincount(of, minlength=len(self._terms))
        self._starts = np.concatenate(([0], np.cumsum(having)))
        rarity = np.log1p((len(length) - having + 0.5) / (having + 0.5))
        count = np.frombuffer(counts, np.int32).astype(np.float32)[order]
        damping = k1 * (1 - b + b * length / max(float(length.mean()), 1.0)) if len(length) else length
        added = rarity[of[order]] * count * (k1 + 1) / (count + damping[self._texts])
        self._added = added.astype(np.float32)
        self._size = len(length)

    def search(self, query: str, most: int) -> list[tuple[int, float]]:
        """Return (index, score) of the best texts, best first, equal ones in their order; only texts that share a
        word."""
        scores = np.zeros(self._size, np.float32)
        for word in words(query):
            term = self._terms.get(word)
            if term is not None:
                span = slice(self._starts[term], self._starts[term + 1])
                scores[self._texts[span]] += self._added[span]
        if not scores.any():
            return []
        rank = max(self._size - most, 0)
        least = max(float(np.partition(scores, rank)[rank]), float(np.finfo(np.float32).tiny))
        found = np.flatnonzero(scores >= least)
        best = found[np.lexsort((found, -scores[found]))][:most]
        return [(int(place), float(scores[place])) for place in best]
