"""One holder at a time for a results folder: an operating-system lock that dies with its process."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import socket
import time
from pathlib import Path


class LockedError(RuntimeError):
    """Another process holds the lock; the message names its pid, its host and since when."""


class Lock:
    """Holds `flock` on a file until `release`, the end of a ``with`` block, or the death of the process.

    The file stays: what counts is the lock on it, which the operating system drops even on ``kill -9``, so a file that
    was left over never blocks. Its text only tells a second process who the first one is.

    Args:
      path: the lock file, created where missing; its folder must exist. A symbolic link is refused.
      wait: until another holder has released it, instead of raising.

    Raises:
      LockedError: at once, when another `Lock`, in this process or any other, holds the same file.
      OSError: the file cannot be opened for writing, or its file system has no locks.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lock"
    >>> with Lock(path):
    ...     try:
    ...         Lock(path)
    ...     except LockedError as error:
    ...         print(f"process {os.getpid()} on {socket.gethostname()} since" in str(error))
    True
    >>> Lock(path).release()
    """

    def __init__(self, path: str | os.PathLike[str], wait: bool = False) -> None:
        self.path = Path(path)
        # O_NOFOLLOW: writing the holder's name through a link would empty whatever the link points at.
        self._file: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            started = datetime.datetime.now(datetime.timezone.utc).isoformat(sep=" ", timespec="seconds")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(holder).encode(), 0)
        except BlockingIOError:
            who = _holder(self._file)
            self.release()
            raise LockedError(f"{self.path.parent} is in use by {who}; wait, or choose another folder") from None
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Lets the next process in. Releasing twice does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(descriptor: int) -> str:
    """Who holds the lock, from the file's text."""
    for _ in range(10):
        try:
            holder = json.loads(os.pread(descriptor, 4096, 0))
            return f"process {holder['pid']} on {holder['host']} since {holder['started']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            # The first holder has the lock and is about to write its name.
            time.sleep(0.02)
    return "another process"
