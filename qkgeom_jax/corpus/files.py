"""A text file or a folder of split files that the user names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np

from qkgeom_jax.corpus.source import CHUNK, CorpusError, Texts, decoded_chunks

# A text is read whole and its tokens live on the device.
LARGEST_FILE = 4 << 30
# A single text: the last 10% of its characters validate, the 5% before them test.
TRAIN_UNTIL, TEST_UNTIL = 0.85, 0.90
_PATTERNS = {"train": "train", "validation": "valid", "test": "test"}


def check_regular(path: Path, largest: int = LARGEST_FILE) -> None:
    """Refuses what is no regular file (a pipe would block), empty or too large.

    Raises:
      CorpusError: so, or it is missing or out of reach.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise CorpusError(f"{str(path)!r} is no regular file")
    if status.st_size > largest:
        raise CorpusError(f"{str(path)!r} has {status.st_size} bytes; at most {largest} can be used")
    if status.st_size == 0:
        raise CorpusError(f"{str(path)!r} is empty")


def read_bytes(path: Path) -> bytes:
    """A regular file's bytes.

    Raises:
      CorpusError: as `check_regular`, or it cannot be read.
    """
    check_regular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> CorpusError:
    return CorpusError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}")


def identity(path: Path) -> tuple:
    """What changes when a file does, without reading it."""
    try:
        status = path.stat()
        return str(path), status.st_size, status.st_mtime_ns
    except OSError:
        return (str(path),)


def normalise(data: bytes, path: Path) -> tuple[bytes, list[str]]:
    """UTF-8 without a byte order mark and with LF line ends; says what was changed. A lone CR is kept.

    Raises:
      CorpusError: not UTF-8, a NUL byte, or nothing but a byte order mark.
    """
    try:
        for _ in decoded_chunks(data):
            pass
    except UnicodeDecodeError as error:
        hint = " (it begins like UTF-16: convert it to UTF-8)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise CorpusError(
            f"{str(path)!r} is not UTF-8: byte 0x{data[error.start]:02x} at byte offset {error.start}{hint}"
        ) from None
    zero = data.find(b"\0")
    if zero >= 0:
        raise CorpusError(f"{str(path)!r} is not a text: it has a NUL byte at byte offset {zero}")
    notes = []
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        notes.append(f"{path.name!r}: the byte order mark at its start was left out")
    if b"\r\n" in data:
        data = data.replace(b"\r\n", b"\n")
        notes.append(f"{path.name!r}: line ends CR LF were read as LF")
    if not data:
        raise CorpusError(f"{str(path)!r} holds nothing but a byte order mark")
    return data, notes


def count_characters(text: bytes) -> int:
    """Characters of valid UTF-8: every byte but the continuation bytes."""
    data = np.frombuffer(text, dtype=np.int8)
    return sum(int(np.count_nonzero(data[i : i + CHUNK] >= -64)) for i in range(0, data.size, CHUNK))


def byte_offset(text: bytes, characters: int) -> int:
    """Where character number `characters` (from 0) begins; the length where there is none."""
    data = np.frombuffer(text, dtype=np.int8)
    for start in range(0, data.size, CHUNK):
        begins = data[start : start + CHUNK] >= -64
        here = int(np.count_nonzero(begins))
        if characters < here:
            return start + int(np.flatnonzero(begins)[characters])
        characters -= here
    return data.size


def split_text(text: bytes) -> dict[str, bytes]:
    """The last 10% of the characters are validation, the 5% before them test, the rest train."""
    characters = count_characters(text)
    first, second = (byte_offset(text, int(characters * share)) for share in (TRAIN_UNTIL, TEST_UNTIL))
    return {"train": text[:first], "validation": text[second:], "test": text[first:second]}


def read_path(path: Path) -> Texts:
    """The split texts of one file, or of a folder with one file a split.

    Raises:
      CorpusError: as `read_bytes` and `normalise`; a folder without, or with two, matches for a split.
    """
    if os.path.isdir(path):
        splits, notes = {}, []
        for split, file in _split_files(path).items():
            splits[split], said = normalise(read_bytes(file), file)
            notes += said
        return Texts(splits, tuple(notes))
    text, notes = normalise(read_bytes(path), path)
    return Texts(split_text(text), tuple(notes))


def _split_files(folder: Path) -> dict[str, Path]:
    """The file of each split in a folder, by name."""
    try:
        names = sorted(name for name in os.listdir(folder) if name[0] != "." and not os.path.isdir(folder / name))
    except OSError as error:
        raise CorpusError(f"folder {str(folder)!r} cannot be listed: {error.strerror}") from None
    found: dict[str, Path] = {}
    for split, word in _PATTERNS.items():
        matches = [name for name in names if word in name.lower()]
        if len(matches) > 1:
            listed = ", ".join(map(repr, matches))
            raise CorpusError(f"folder {str(folder)!r} has several files that match *{word}*: {listed}")
        if matches:
            if folder / matches[0] in found.values():
                raise CorpusError(f"{str(folder / matches[0])!r} matches more than one of *train*, *valid*, *test*")
            found[split] = folder / matches[0]
        elif split != "test":
            raise CorpusError(f"folder {str(folder)!r} has no file that matches *{word}* (needed: *train*, *valid*)")
    return found
