"""Revisions on disk: a repository of the Hugging Face hub, one revision at a time, its cache, or a local folder.

Whatever can go wrong with a repository, the network, the cache or the disk comes out as a one-sentence `RevisionError`.
`huggingface_hub` is imported only when a repository is asked for; its own settings hold (HF_TOKEN, HF_ENDPOINT,
HF_HUB_CACHE, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from qkgeom_jax.series import Series

# What the client speaks HTTP with, by version.
_TRANSPORTS = ("httpx", "httpx2", "requests", "urllib3")
# Quantised files that `open_checkpoint` takes in place of a folder.
SINGLE_FILES = (".gguf",)


class RevisionError(ValueError):
    """A revision, or its series, cannot be had; the message is one sentence."""


@dataclass(frozen=True)
class Located:
    """A revision on this machine: what `open_checkpoint` takes, and the commit that its name stood for."""

    path: Path
    commit: str | None


@dataclass(frozen=True)
class Planned:
    """The needed bytes of one revision, and how many of them are here."""

    files: int
    bytes: int
    here: int


def require_hub() -> ModuleType:
    """The module `huggingface_hub`.

    Raises:
      RevisionError: it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise RevisionError(
            "repositories of the hub need the package huggingface_hub: pip install 'qkgeom_jax[checkpoints]', "
            "or give a local folder with --model"
        ) from None
    return huggingface_hub


def _status_of(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _sentence(error: Exception, what: str) -> str:
    """One sentence about a failure of the hub's client, of the network, or of the disk."""
    errors = require_hub().errors
    status = _status_of(error)
    if isinstance(error, errors.GatedRepoError):
        return f"{what}: access is restricted (HTTP {status}); accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{what}: there is no such revision (HTTP {status})"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return f"{what}: there is no such repository, or it is private (HTTP {status}); set HF_TOKEN if it is yours"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{what}: not in the cache, and the hub cannot be reached"
    if isinstance(error, errors.EntryNotFoundError):
        return f"{what}: a file is missing there"
    if status == 429:
        return f"{what}: the hub asks for fewer requests (HTTP 429); run the same command again later"
    if status is not None:
        return f"{what}: the hub answers HTTP {status}; run the same command again later"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}: the disk is full; point --cache to another one"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{what}: {error.filename or 'the cache'} cannot be written; point --cache elsewhere"
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, ConnectionError) or type(error).__module__.partition(".")[0] in _TRANSPORTS:
        return f"{what}: the hub cannot be reached ({first}); --offline takes what is in the cache"
    return f"{what}: {type(error).__name__}: {first}"


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except RevisionError:
        raise
    except Exception as error:  # the client raises its own errors, its transport's, the system's, and ValueError
        raise RevisionError(_sentence(error, what)) from error


def _files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class LocalFolder:
    """A folder: one checkpoint, or one subfolder (or GGUF file) for each revision."""

    def __init__(self, series: Series) -> None:
        self.path = Path(series.source)

    def revisions(self) -> list[str]:
        """The revisions inside; its own name where the folder or file itself is one.

        Raises:
          RevisionError: it holds neither.
        """
        if self._is_checkpoint(self.path):
            return [self.path.name]
        inside = [path.name for path in self.path.iterdir() if self._is_checkpoint(path)]
        if bad := next((name for name in inside if not name.isprintable()), None):
            raise RevisionError(f"{self.path}: the name {bad!r} has characters that no text has; rename it")
        if not inside:
            raise RevisionError(f"{self.path} is no checkpoint (it has no config.json) and holds none in subfolders")
        return sorted(inside)

    @staticmethod
    def _is_checkpoint(path: Path) -> bool:
        return (path / "config.json").is_file() or (path.is_file() and path.suffix in SINGLE_FILES)

    def locate(self, revision: str) -> Located:
        """Raises `RevisionError` where there is nothing of that name."""
        if revision == self.path.name and self._is_checkpoint(self.path):
            return Located(self.path, None)
        path = self.path / revision
        if not path.exists() or revision in (".", "..") or "/" in revision:
            raise RevisionError(f"{self.path} has no subfolder {revision!r}")
        return Located(path, None)

    def plan(self, revision: str) -> Planned:
        path = self.locate(revision).path
        sizes = [path.stat().st_size] if path.is_file() else [f.stat().st_size for f in path.iterdir() if f.is_file()]
        return Planned(len(sizes), sum(sizes), sum(sizes))


class HubRepository:
    """A repository of the hub, or what its cache holds of it.

    Args:
      series: its source is the repository.
      cache: the hub's cache folder; by default the client's own.
      offline: never ask the network; also where HF_HUB_OFFLINE is set.
    """

    def __init__(self, series: Series, cache: Path | None = None, offline: bool = False) -> None:
        self.series, self.hub = series, require_hub()
        self.cache = Path(cache or self.hub.constants.HF_HUB_CACHE)
        self.offline = offline or self.hub.constants.HF_HUB_OFFLINE

    def revisions(self) -> list[str]:
        """The revisions of the catalogue, else the repository's branches and tags; offline, those in the cache.

        Raises:
          RevisionError: the repository cannot be asked, or the cache has nothing of it.
        """
        if self.offline:
            refs = self.cache / f"models--{self.series.source.replace('/', '--')}" / "refs"
            names = _files_below(refs) if refs.is_dir() else []
            if not names:
                raise RevisionError(f"{self.series.source}: nothing of it is in the cache {self.cache}")
        elif self.series.revisions:
            return list(self.series.revisions)
        else:
            with _translated(self.series.source):
                found = self.hub.HfApi().list_repo_refs(self.series.source)
            names = [ref.name for ref in (*found.branches, *found.tags)]
        if self.series.pattern:  # not main, nor a branch of another kind
            begin = self.series.pattern.format("")
            names = [name for name in names if name.startswith(begin) and name[len(begin) :].isdigit()]
        return names

    def locate(self, revision: str) -> Located:
        """The revision's folder in the cache, downloaded first where it is not there.

        Raises:
          RevisionError: it cannot be had.
        """
        what = f"{self.series.source} at {revision}"
        if self.offline:
            return self._cached(revision, what)
        with _translated(what):
            listed = self._listed(revision)
            for name in listed:
                path = Path(self._download(self.series.source, name, revision))
                folder = path.parents[name.count("/")]
        return Located(folder, folder.name)

    def _download(self, repository: str, name: str, revision: str | None = None) -> str:
        return self.hub.hf_hub_download(
            repository, name, revision=revision, cache_dir=self.cache, local_files_only=self.offline
        )

    def _listed(self, revision: str) -> dict[str, int]:
        """Needed files and their sizes, as the hub lists them."""
        from qkgeom_jax import pretrained

        found = self.hub.HfApi().model_info(self.series.source, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings}
        try:
            return {name: sizes[name] for name in pretrained.needed_files(sizes)}
        except ValueError as error:
            raise RevisionError(f"{self.series.source} at {revision}: {error}") from None

    def _cached(self, revision: str, what: str) -> Located:
        path = self.hub.try_to_load_from_cache(self.series.source, "config.json", self.cache, revision)
        if not isinstance(path, str):
            raise RevisionError(f"{what}: not in the cache {self.cache}, and nothing may be downloaded")
        return Located(Path(path).parent, Path(path).parent.name)

    def plan(self, revision: str) -> Planned:
        """What there is to fetch. Fetches nothing.

        Raises:
          RevisionError: the revision cannot be had.
        """
        what = f"{self.series.source} at {revision}"
        if self.offline:
            folder = self._cached(revision, what).path
            sizes = [(folder / name).stat().st_size for name in _files_below(folder)]
            return Planned(len(sizes), sum(sizes), sum(sizes))
        with _translated(what):
            sizes = self._listed(revision)
            here = {
                name: isinstance(self.hub.try_to_load_from_cache(self.series.source, name, self.cache, revision), str)
                for name in sizes
            }
        return Planned(len(sizes), sum(sizes.values()), sum(size for name, size in sizes.items() if here[name]))

    def tokenizer(self) -> Any:
        """The tokenizer of the series' other repository; None where it names none.

        Raises:
          RevisionError: it cannot be had.
        """
        if self.series.tokenizer is None:
            return None
        with _translated(self.series.tokenizer):
            from tokenizers import Tokenizer

            return Tokenizer.from_file(self._download(self.series.tokenizer, "tokenizer.json"))


def open_source(series: Series, cache: Path | None, offline: bool) -> LocalFolder | HubRepository:
    """Where a series' revisions come from."""
    return LocalFolder(series) if series.local else HubRepository(series, cache, offline)


def readable(count: float) -> str:
    """Bytes for people.

    >>> readable(1536), readable(3 * 10**9)
    ('1.5 kB', '3.0 GB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
