"""The tokens that every revision of a series is measured on: prose through its tokenizer, or the user's own ids."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qkgeom_jax.reading import read_npy

# Below this many tokens the participation ratio comes out too low.
UNBIASED_TOKENS = 4096
DEFAULT_CONTEXT = 512
# So much of a text is tokenised; the windows are spread over it.
MOST_CHARACTERS = 1_000_000


class ProbeError(ValueError):
    """A text or ids that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Probe:
    """Text or ids, and how many of their tokens are taken.

    Attributes:
      name: for the results.
      sha256: of the text's UTF-8 bytes, or of the ids as int32 with their shape.
      tokens: in total.
      context: positions of a window; None for the smaller of 512, the model's own, and `tokens`.
      text: None where there are ids.
      ids: int32 [n] (to be cut into windows) or [windows, context].
      notes: what was done to the text on reading.
    """

    name: str
    sha256: str
    tokens: int = UNBIASED_TOKENS
    context: int | None = None
    text: str | None = field(default=None, repr=False)
    ids: np.ndarray | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()


def text_probe(path: str | None, tokens: int = UNBIASED_TOKENS, context: int | None = None) -> Probe:
    """The prose of a file, or without one the validation part of the prose that ships with Python.

    Raises:
      ProbeError: the file cannot be read, or is no UTF-8 text.
    """
    from qkgeom_jax.corpus import CorpusError
    from qkgeom_jax.corpus.builtin import builtin_source
    from qkgeom_jax.corpus.files import normalise, read_bytes

    try:
        if path is None:
            name, data, notes = "builtin", builtin_source().read().splits["validation"], []
        else:
            name = Path(path).name
            data, notes = normalise(read_bytes(Path(os.path.expanduser(path))), Path(path))
    except CorpusError as error:
        raise ProbeError(str(error).replace("give a text file as --corpus", "give a text file as --text")) from None
    text = data.decode("utf-8")
    if len(text) > MOST_CHARACTERS:
        text = text[:MOST_CHARACTERS]
        notes = [*notes, f"the first {MOST_CHARACTERS:,} characters of {name} are used"]
    return Probe(name, hashlib.sha256(data).hexdigest(), tokens, context, text, notes=tuple(notes))


def ids_probe(path: str, tokens: int | None = None, context: int | None = None) -> Probe:
    """The token ids of a NumPy file: one sequence, or one window a row.

    Args:
      path: whole numbers, [n] or [windows, context].
      tokens: in total; by default 4,096 of a sequence, and all of windows.
      context: as in `Probe`; windows have their own.

    Raises:
      ProbeError: the file, its shape or its type is wrong, or contradicts `context`.
    """
    try:
        ids = read_npy(path)
    except OSError as error:
        raise ProbeError(f"--token-ids {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ProbeError(f"--token-ids {error}") from None
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or not ids.size:
        found = f"{ids.dtype} {list(ids.shape)}"
        raise ProbeError(f"--token-ids {path} holds {found}; expected whole numbers [n] or [windows, context]")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ProbeError(f"--token-ids {path} has ids from {ids.min()} to {ids.max()}; ids begin at 0")
    ids = np.ascontiguousarray(ids, np.int32)
    if ids.ndim == 2:
        if context not in (None, ids.shape[1]):
            raise ProbeError(f"--context is {context}, but the windows of {path} have {ids.shape[1]} tokens")
        context = ids.shape[1]
        tokens = ids.size if tokens is None else tokens
    digest = hashlib.sha256(str(ids.shape).encode() + ids.tobytes()).hexdigest()
    return Probe(Path(path).name, digest, tokens or UNBIASED_TOKENS, context, ids=ids)


def make_windows(probe: Probe, checkpoint: Any, tokenizer: Any) -> np.ndarray:
    """The windows [n, context] for one model, evenly spaced over the tokens and not overlapping.

    Args:
      probe: from `text_probe` or `ids_probe`.
      checkpoint: its context and vocabulary count.
      tokenizer: of the `tokenizers` library; None where there is none.

    Raises:
      ProbeError: no tokenizer, too few tokens, or as `check_windows`.
    """
    context = probe.context or min(DEFAULT_CONTEXT, checkpoint.context, probe.tokens)
    if probe.tokens < context:
        raise ProbeError(f"--tokens {probe.tokens} is less than one window of {context}; give a smaller --context")
    ids = probe.ids
    if ids is None:
        if tokenizer is None:
            raise ProbeError("it has no tokenizer.json; give token ids as --token-ids FILE.npy")
        ids = np.array(tokenizer.encode(probe.text, add_special_tokens=False).ids, np.int32)
    if ids.ndim == 2:
        return check_windows(ids[: probe.tokens // context], checkpoint)
    if len(ids) < context:
        raise ProbeError(
            f"{probe.name} has {len(ids)} tokens, less than one window of {context}; give a smaller --context"
        )
    count = min(probe.tokens, len(ids)) // context
    starts = np.linspace(0, len(ids) - context, count).astype(np.int64)
    return check_windows(np.stack([ids[start : start + context] for start in starts]), checkpoint)


def check_windows(windows: np.ndarray, checkpoint: Any) -> np.ndarray:
    """The windows, if the model can take them.

    Raises:
      ProbeError: they are longer than its context, or have an id outside its vocabulary.
    """
    context, largest = windows.shape[1], windows.max()
    if context > checkpoint.context:
        raise ProbeError(f"a window of {context} tokens is longer than the model's context of {checkpoint.context}")
    if largest >= checkpoint.vocabulary:
        raise ProbeError(f"token id {largest} is outside the model's vocabulary of {checkpoint.vocabulary}")
    return windows
