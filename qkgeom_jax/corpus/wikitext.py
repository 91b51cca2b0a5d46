"""WikiText-103 and WikiText-2, raw: downloaded from the author's mirror, or from a zip or raw files that the user has.

Whatever it comes from goes through the TFDS builder into a prepared folder in the cache, built under a temporary name;
what is read back from there must have the sha256 that went in.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qkgeom_jax.corpus.cache import read_record, temporary_folder, write_record
from qkgeom_jax.corpus.download import download
from qkgeom_jax.corpus.files import check_regular, normalise
from qkgeom_jax.corpus.source import CorpusError, Source, Texts, fingerprint

_FILES = {"train": "wiki.train.raw", "validation": "wiki.valid.raw", "test": "wiki.test.raw"}
# The validation and test files are the same text in both sizes.
_PUBLISHED = {
    "validation": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
    "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
}
_RECORD = "sha256.json"
# Far above any real member (the largest is under 0.6 GB): a bomb is refused before it is unpacked.
_LARGEST_MEMBER = 1 << 30


@dataclass(frozen=True)
class Archive:
    """A published zip: where it is, and how to know it."""

    url: str
    size: int
    sha256: str
    folder: str

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[-1]


ARCHIVES: Mapping[str, Archive] = {
    "wikitext103": Archive(
        url="https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
        size=191_984_949,
        sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        folder="wikitext-103-raw",
    ),
    "wikitext2": Archive(
        url="https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
        size=4_721_645,
        sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        folder="wikitext-2-raw",
    ),
}

# Opens the raw file of each split that is to be had.
Splits = Mapping[str, Callable[[], BinaryIO]]


def wikitext_source(
    name: str,
    data_dir: str | None,
    cache: Path | None,
    *,
    archive: Archive | None = None,
    timeout: float = 8.0,
    progress: Callable[[str], None] | None = None,
) -> Source:
    """WikiText from what the user has in `data_dir`, or from the mirror; either way once, then from `cache`.

    A zip in `data_dir` must be the published one; raw files are taken as they are.

    Raises:
      CorpusError: `data_dir` holds nothing usable (at once); the download failed (when read).
    """
    archive = archive or ARCHIVES[name]
    hint = (
        f"to give it by hand: --data-dir with {archive.file}, or with a folder that has {_FILES['train']}, "
        f"{_FILES['validation']} and maybe {_FILES['test']}"
    )
    try:
        file, raw = _given(Path(os.path.expanduser(data_dir)), archive) if data_dir is not None else (None, None)
        if file is not None:
            _check_zip(file, archive)
        sha256 = {split: _file_sha256(path) for split, path in raw.items()} if raw else {}
    except CorpusError as error:
        raise CorpusError(f"corpus {name}: {error}; {hint}") from None
    key = fingerprint(["wikitext 1", *(sorted(sha256.items()) or [archive.sha256])])
    notes = tuple(
        f"{raw[split].name!r} differs from the published {split} split"
        for split, published in _PUBLISHED.items()
        if sha256.get(split, published) != published
    )

    @contextlib.contextmanager
    def splits(folder: Path) -> Iterator[Splits]:
        if raw:
            yield {split: functools.partial(open, path, "rb") for split, path in raw.items()}
            return
        zipped = file or folder / archive.file
        if file is None:
            download(
                archive.url, zipped, size=archive.size, sha256=archive.sha256, timeout=timeout, progress=progress
            )
        with _zip_splits(zipped, archive) as members:
            yield members

    def read() -> Texts:
        try:
            texts = _prepared(cache and cache / "tfds" / key[:32], splits, sha256)
            if not raw:
                return Texts(texts)
            said = list(notes)
            for split, path in raw.items():
                texts[split], changes = normalise(texts[split], path)
                said += changes
            return Texts(texts, tuple(said))
        except CorpusError as error:
            raise CorpusError(f"corpus {name}: {error}; {hint}") from None
        except ImportError as error:
            raise CorpusError(f"corpus {name} needs tensorflow-datasets, which cannot be loaded: {error}") from error

    return Source(name, read, key)


def _given(path: Path, archive: Archive) -> tuple[Path | None, dict[str, Path] | None]:
    """The zip, or else the raw files, that `path` is or holds."""
    if not os.path.isdir(path):
        check_regular(path)
        return path, None
    for folder in (path, path / archive.folder):
        raw = {split: folder / name for split, name in _FILES.items() if os.path.lexists(folder / name)}
        missing = [_FILES[split] for split in ("train", "validation") if split not in raw]
        if raw and missing:
            raise CorpusError(f"folder {str(folder)!r} has no {' and no '.join(missing)}")
        if raw:
            for file in raw.values():
                check_regular(file)
            return None, raw
    if os.path.lexists(path / archive.file):
        check_regular(path / archive.file)
        return path / archive.file, None
    raise CorpusError(f"folder {str(path)!r} has neither {archive.file} nor {_FILES['train']}")


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def _check_zip(path: Path, archive: Archive) -> None:
    size, got = path.stat().st_size, _file_sha256(path)
    if got != archive.sha256:
        raise CorpusError(
            f"{str(path)!r} is not the published {archive.file}: it has {size} bytes with sha256 {got}, expected "
            f"{archive.size} bytes with sha256 {archive.sha256}"
        )


@contextlib.contextmanager
def _zip_splits(path: Path, archive: Archive) -> Iterator[Splits]:
    """The three members, to be streamed. Nothing is unpacked under a name that the zip gives."""
    try:
        with zipfile.ZipFile(path) as content:
            members = {}
            for split, name in _FILES.items():
                found = [member for member in content.infolist() if member.filename == f"{archive.folder}/{name}"]
                if len(found) != 1:
                    raise CorpusError(f"{path.name!r} has {len(found)} members {archive.folder}/{name}, expected one")
                if found[0].file_size > _LARGEST_MEMBER:
                    raise CorpusError(f"{path.name!r} claims {found[0].file_size} bytes for {name}: refused")
                members[split] = functools.partial(content.open, found[0])
            yield members
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path.name!r} is no readable zip ({error})") from None


def _prepared(
    folder: Path | None,
    splits: Callable[[Path], contextlib.AbstractContextManager[Splits]],
    expected: Mapping[str, str],
) -> dict[str, bytes]:
    """The texts from a prepared folder; where there is none that is whole, it is built, checked and then renamed."""
    from qkgeom_jax.corpus.wikitext_builder import build

    if folder and (texts := _read_prepared(folder)) is not None:
        return texts
    with temporary_folder(folder) as work:
        try:
            with splits(work) as opened:
                built = build(work / "data", opened)
            write_record(work / "data" / _RECORD, built)
        except CorpusError:
            raise
        except Exception as error:  # a damaged zip, a full disk, whatever the writer makes of either
            raise CorpusError(f"it could not be prepared in {str(work)!r} ({' '.join(str(error).split())})") from error
        texts = _read_prepared(work / "data")
        if texts is None or built != (expected or built):
            raise CorpusError("it changed while it was read, or could not be written whole")
        if folder and work.parent == folder.parent:
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(work / "data", folder)
    return texts


def _read_prepared(folder: Path) -> dict[str, bytes] | None:
    """The texts, if they have the sha256 that was recorded when they were built."""
    record = read_record(folder / _RECORD)
    if record is None:
        return None
    from qkgeom_jax.corpus.wikitext_builder import read_split

    try:
        texts = {split: read_split(folder, split) for split in record}
    except Exception:  # whatever a damaged file makes the reader raise
        return None
    whole = all(hashlib.sha256(texts[split]).hexdigest() == sha256 for split, sha256 in record.items())
    return texts if whole else None
