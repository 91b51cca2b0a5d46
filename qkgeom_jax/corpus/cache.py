"""Encoded corpora on disk, keyed by content: written atomically, checked when read, rebuilt when damaged."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qkgeom_jax.corpus.files import count_characters
from qkgeom_jax.corpus.source import SPLITS, fingerprint
from qkgeom_jax.corpus.vocabulary import encoded_chunks, make_vocabulary, token_dtype

_FORMAT = 1


@dataclass(frozen=True)
class Encoded:
    """A vocabulary, the token ids of each split, and how many of them are the unknown symbol."""

    vocabulary: tuple[str, ...]
    tokens: dict[str, np.ndarray]
    unknown: dict[str, int]


def default_folder() -> Path | None:
    """qkgeom_jax in $XDG_CACHE_HOME or ~/.cache; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the convention is to ignore a relative one
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "qkgeom_jax") if os.path.isabs(base) else None


def _temporary_prefix(path: Path) -> str:
    """Beside `path`, under a name that tells whose it is; what an ended process of this machine left is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = f".{path.name}.{socket.gethostname()}-"
    for left in path.parent.glob(f"{glob.escape(mine)}*.tmp") if os.name == "posix" else ():
        with contextlib.suppress(OSError, ValueError):
            try:
                os.kill(int(left.name.removeprefix(mine).split("-")[0]), 0)
            except ProcessLookupError:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return f"{mine}{os.getpid()}-"


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is whole."""
    handle, temporary = tempfile.mkstemp(prefix=_temporary_prefix(path), suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def temporary_folder(path: Path | None) -> Iterator[Path]:
    """A folder to build `path` in: beside it, or among the system's temporary files where that cannot be written."""
    try:
        if path is None:
            raise OSError
        folder = tempfile.mkdtemp(prefix=_temporary_prefix(path), suffix=".tmp", dir=path.parent)
    except OSError:
        folder = tempfile.mkdtemp(prefix="qkgeom_jax-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """JSON values, with their digest."""
    digest = fingerprint([json.dumps(record, sort_keys=True)])
    with atomic_file(path) as file:
        file.write(json.dumps({"digest": digest, "record": record}, sort_keys=True).encode())


def read_record(path: Path) -> dict[str, Any] | None:
    """What `write_record` wrote; None where it is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
        record = content["record"]
        return record if content["digest"] == fingerprint([json.dumps(record, sort_keys=True)]) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


class TokenCache:
    """The encoded form of one text under one minimum count."""

    def __init__(self, folder: Path, split_sha256: Mapping[str, str], minimum_count: int):
        texts = [(split, split_sha256[split]) for split in SPLITS if split in split_sha256]
        key = fingerprint([_FORMAT, minimum_count, *texts])[:32]
        self._record = folder / "tokens" / f"{key}.json"

    def _array_file(self, split: str) -> Path:
        return self._record.with_suffix(f".{split}.npy")

    def load(self) -> Encoded | None:
        """Memory-mapped tokens; None where they are missing or damaged in any way."""
        record = read_record(self._record)
        if record is None:
            return None
        try:
            vocabulary = tuple(record["vocabulary"])
            tokens = {}
            for split in filter(record["splits"].get, SPLITS):
                facts = record["splits"][split]
                array = _read_array(self._array_file(split), token_dtype(vocabulary), facts["characters"])
                if array is None or _digest(array) != facts["digest"]:
                    return None
                tokens[split] = array
            return Encoded(vocabulary, tokens, {split: record["splits"][split]["unknown"] for split in tokens})
        except (AttributeError, KeyError, TypeError):  # sound, but not of this program's making
            return None

    def store(self, texts: Mapping[str, bytes], minimum_count: int) -> None:
        """Encodes straight to disk; the record comes last.

        Raises:
          OSError: the folder cannot be written.
        """
        vocabulary = make_vocabulary(texts["train"], minimum_count)
        splits = {}
        for split, text in texts.items():
            characters, unknown, digest = count_characters(text), 0, hashlib.blake2b()
            with atomic_file(self._array_file(split)) as file:
                file.write(_header(token_dtype(vocabulary), characters))
                for chunk in encoded_chunks(text, vocabulary):
                    file.write(chunk.data)
                    digest.update(chunk.data)
                    unknown += chunk.size - int(np.count_nonzero(chunk))
            splits[split] = {"characters": characters, "unknown": unknown, "digest": digest.hexdigest()}
        write_record(self._record, {"vocabulary": vocabulary, "splits": splits})


def encode(texts: Mapping[str, bytes], minimum_count: int) -> Encoded:
    """The same in memory."""
    vocabulary = make_vocabulary(texts["train"], minimum_count)
    tokens, unknown = {}, {}
    for split, text in texts.items():
        array = np.empty(count_characters(text), dtype=token_dtype(vocabulary))
        position = 0
        for chunk in encoded_chunks(text, vocabulary):
            array[position : position + chunk.size] = chunk
            position += chunk.size
        array.flags.writeable = False
        tokens[split], unknown[split] = array, array.size - int(np.count_nonzero(array))
    return Encoded(vocabulary, tokens, unknown)


def _header(dtype: np.dtype, size: int) -> bytes:
    """The .npy header of a flat array."""
    header = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


def _read_array(path: Path, dtype: np.dtype, size: int) -> np.ndarray | None:
    """The mapped array, if the file's header is the expected one byte for byte; what it says is never parsed."""
    header = _header(dtype, size)
    try:
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                return None
        if size == 0:  # an empty range cannot be mapped
            return np.empty(0, dtype)
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=len(header), shape=(size,)))
    except (OSError, ValueError):
        return None


def _digest(array: np.ndarray) -> str:
    # blake2b: twice as fast as sha256 where the processor has no instructions for the latter.
    return hashlib.blake2b(array.data).hexdigest()
