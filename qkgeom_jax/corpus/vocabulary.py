"""Characters to token ids, vectorised and a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qkgeom_jax.corpus.source import UNKNOWN, CorpusError, code_points, decoded_chunks

_CODE_POINTS = 0x110000
_LARGEST_VOCABULARY = 1 << 16


def make_vocabulary(train: bytes, minimum_count: int) -> tuple[str, ...]:
    """The unknown symbol, then each character that occurs at least `minimum_count` times, by code point.

    Raises:
      CorpusError: no character is that frequent, or more than 65,535 are.
    """
    counts = np.zeros(_CODE_POINTS, dtype=np.int64)
    for text in decoded_chunks(train):
        found = np.bincount(code_points(text))
        counts[: found.size] += found
    kept = np.flatnonzero(counts >= minimum_count)
    if kept.size == 0:
        raise CorpusError(
            f"no character of the training split occurs at least {minimum_count} times (its most frequent occurs "
            f"{counts.max()} times): give a longer text, or a smaller --minimum-count"
        )
    if kept.size >= _LARGEST_VOCABULARY:
        raise CorpusError(
            f"the training split has {kept.size} characters that occur at least {minimum_count} times, more than the "
            f"{_LARGEST_VOCABULARY - 1} that ids of 16 bits can tell apart: give a larger --minimum-count"
        )
    return (UNKNOWN, *map(chr, kept))


def token_dtype(vocabulary: tuple[str, ...]) -> np.dtype:
    """uint8 where it can hold every id, else uint16."""
    return np.dtype(np.uint8 if len(vocabulary) <= 256 else np.uint16)


def encoded_chunks(text: bytes, vocabulary: tuple[str, ...]) -> Iterator[np.ndarray]:
    """The token ids of `text`, in pieces."""
    table = np.zeros(_CODE_POINTS, dtype=token_dtype(vocabulary))
    table[[ord(character) for character in vocabulary[1:]]] = np.arange(1, len(vocabulary))
    for piece in decoded_chunks(text):
        yield table[code_points(piece)]
