"""A pinned file from the web: bounded waiting, and nothing under its name that is not it."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from qkgeom_jax.corpus.source import CorpusError

_BLOCK = 1 << 16
_HTML = (b"<!doctype html", b"<html", b"<?xml")
# The mirror refuses urllib's own name.
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; qkgeom_jax)"}


class _Transfer(threading.Thread):
    """Fetches into a file. A thread, because looking up a host name knows no timeout."""

    def __init__(self, url: str, path: Path, size: int, timeout: float):
        super().__init__(daemon=True)
        self.url, self.path, self.size, self.timeout = url, path, size, timeout
        self.received = 0
        self.sha256 = hashlib.sha256()
        self.start_bytes = b""
        self.error: Exception | None = None
        self.abandoned = False

    def run(self) -> None:
        try:
            request = urllib.request.Request(self.url, headers=_HEADERS)
            with urllib.request.urlopen(request, timeout=self.timeout) as answer, self.path.open("wb") as file:
                # One byte more than expected proves the file wrong: no endless answer fills the disk.
                while self.received <= self.size and not self.abandoned and (block := answer.read1(_BLOCK)):
                    self.start_bytes = self.start_bytes or block
                    file.write(block)
                    self.sha256.update(block)
                    self.received += len(block)
        except Exception as error:  # told to the thread that waits
            self.error = error


def download(
    url: str, path: Path, *, size: int, sha256: str, timeout: float = 8.0, progress: Callable[[str], None] | None = None
) -> None:
    """Fetches `url` into `path`; gives up when nothing arrives for `timeout` seconds.

    Raises:
      CorpusError: no network, an error status, an HTML page, too few or wrong bytes, a full disk. `path` is then gone.
    """
    transfer = _Transfer(url, path, size, timeout)
    try:
        transfer.start()
        _wait(transfer, timeout, progress)
        _check(transfer, sha256)
    except BaseException:
        transfer.abandoned = True
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _wait(transfer: _Transfer, timeout: float, progress: Callable[[str], None] | None) -> None:
    received, since, told = 0, time.monotonic(), 0.0
    while transfer.is_alive():
        transfer.join(0.05)
        now = time.monotonic()
        if transfer.received > received:
            received, since = transfer.received, now
        elif now - since > timeout and transfer.is_alive():
            raise CorpusError(f"{transfer.url} sent nothing for {timeout:g} seconds")
        if progress and received and now - told > 1:
            told = now
            progress(f"downloading {transfer.url}: {received / 1e6:.0f} of {transfer.size / 1e6:.0f} MB")


def _check(transfer: _Transfer, sha256: str) -> None:
    error, url = transfer.error, transfer.url
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        raise CorpusError(f"{url} answered {error.code} ({error.reason})")
    if isinstance(error, TimeoutError):
        raise CorpusError(f"{url} sent nothing for {transfer.timeout:g} seconds")
    if isinstance(error, urllib.error.URLError):
        raise CorpusError(f"{url} cannot be reached ({error.reason})")
    if error is not None and not isinstance(error, http.client.IncompleteRead):
        raise CorpusError(f"{url} could not be fetched ({' '.join(str(error).split())})")
    if transfer.start_bytes.lstrip().lower().startswith(_HTML):
        raise CorpusError(f"{url} sent a web page, not the file")
    got = transfer.sha256.hexdigest()
    if (transfer.received, got) != (transfer.size, sha256):
        more = "at least " if transfer.received > transfer.size else ""
        raise CorpusError(
            f"{url} sent {more}{transfer.received} bytes with sha256 {got}; expected {transfer.size} bytes with sha256 "
            f"{sha256}"
        )
