"""What every corpus has in common: an error, a source of split texts, and the corpus as token arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

SPLITS = ("train", "validation", "test")
UNKNOWN = "<unk>"

# Bytes decoded at a time: measured twice as fast as 1 << 22, because a chunk's code points stay in the cache.
CHUNK = 1 << 18


class CorpusError(ValueError):
    """Anything a user can get wrong about a corpus, in one sentence."""


@dataclass(frozen=True)
class Texts:
    """The UTF-8 text of each split, and what was done to it."""

    splits: Mapping[str, bytes]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A corpus before encoding.

    `fingerprint` names what `read` would return without reading it, so that a cached result can stand in for a slow
    `read`; None where reading is cheap.
    """

    name: str
    read: Callable[[], Texts]
    fingerprint: str | None = None


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as token ids, one array a split.

    `sha256` is that of the split texts' own sha256 sums (UTF-8 bytes), as ``sha256sum train validation test`` prints
    them (``<hex>  <split>\\n`` each, present splits only): it changes with any byte and with where the splits are cut.
    `vocabulary` maps an id to its character; index 0 is the unknown symbol ``<unk>``, the rest are sorted by code
    point. `tokens` are read-only uint8 (up to 256 symbols) or uint16 arrays, memory-mapped where a cache is to be had.
    `unknown_share` is the share of a split's characters outside the vocabulary. `notes` are sentences for the user.
    """

    name: str
    sha256: str
    split_sha256: dict[str, str]
    characters: dict[str, int]
    vocabulary: tuple[str, ...]
    tokens: dict[str, np.ndarray]
    unknown_share: dict[str, float]
    notes: tuple[str, ...] = ()


def combined_sha256(split_sha256: Mapping[str, str]) -> str:
    """The sha256 of the splits' sums, written as sha256sum would."""
    lines = "".join(f"{split_sha256[split]}  {split}\n" for split in SPLITS if split in split_sha256)
    return hashlib.sha256(lines.encode()).hexdigest()


def fingerprint(parts: Iterable[object]) -> str:
    """A name for anything that its parts' representations tell apart."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode("utf-8", "backslashreplace")).hexdigest()


def decoded_chunks(data: bytes) -> Iterator[str]:
    """The text in pieces, never cut inside a character.

    Raises:
      UnicodeDecodeError: its `start` is the offset in `data`.
    """
    start = 0
    while start < len(data):
        stop = min(start + CHUNK, len(data))
        if stop < len(data):
            # A fourth continuation byte in a row belongs to no character: then the cut stays, for the right offset.
            stop = next((stop - back for back in range(4) if data[stop - back] & 0xC0 != 0x80), stop)
        try:
            yield str(memoryview(data)[start:stop], "utf-8")
        except UnicodeDecodeError as error:
            raise UnicodeDecodeError(
                "utf-8", data[start + error.start : start + error.end], start + error.start, start + error.end,
                error.reason,
            ) from None  # fmt: skip
        start = stop


def code_points(text: str) -> np.ndarray:
    """uint32 [characters]."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
