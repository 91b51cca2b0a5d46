"""SIGTERM and SIGINT: an orderly end where something would be lost, at once where nothing would."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

STOPPED = 75  # the exit status


class Stopped(Exception):
    """A signal asked for an end; everything up to here is on disk."""


class StopSignal:
    """Turns the two signals into an end with status 75.

    Inside `protected`, work is saved first: `requested` turns true, and the caller raises `Stopped` when it has saved.
    Outside, and at a second signal, the process ends at once: every file is written whole or not at all, so the same
    command can go on from there.

    A thread acts on the signals, because a Python handler would wait for the program that is compiling or running.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._protected = False

    def requested(self) -> bool:
        return self._requested

    @contextlib.contextmanager
    def protected(self) -> Iterator[None]:
        """A block that is not ended from outside.

        Raises:
          Stopped: at its end, when a signal came that the block did not act on.
        """
        with self._lock:
            self._protected = True
        try:
            yield
        finally:
            with self._lock:
                self._protected = False
        if self._requested:
            raise Stopped

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """In charge of the two signals for a block in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        numbers = (signal.SIGTERM, signal.SIGINT)
        # Handlers that do nothing: what counts is that Python writes the signal's number to the pipe.
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(reader, numbers), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writer)
            thread.join()

    def _watch(self, reader: int, numbers: tuple[int, ...]) -> None:
        while byte := os.read(reader, 1):
            if byte[0] in numbers:
                with self._lock:
                    if not self._protected or self._requested:
                        _end()
                    self._requested = True
        os.close(reader)


MESSAGE = "stopped; the same command goes on from here"


def _end() -> None:
    # Straight to the descriptor: the main thread may hold the lock of sys.stderr.
    with contextlib.suppress(OSError):
        os.set_blocking(2, False)
        show_cursor = "\x1b[?25h\n" if os.isatty(2) else ""  # a progress bar has hidden it
        os.write(2, f"{show_cursor}{MESSAGE}\n".encode())
    os._exit(STOPPED)
