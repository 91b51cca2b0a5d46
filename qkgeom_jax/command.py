"""What every command does around its work: ends by signal, and errors as one sentence with their exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

from qkgeom_jax import flags
from qkgeom_jax.lock import LockedError
from qkgeom_jax.stop import MESSAGE, STOPPED, Stopped, StopSignal

DONE, FAILED, DIVERGED = 0, 1, 3  # exit statuses; bad input is 2, and stop.STOPPED is 75

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FREE_SPACE = "free some space, then the same command goes on"


class DiskFullError(RuntimeError):
    """Nothing more can be written; one sentence for the user."""


def run(parser: flags.Parser, work: Callable[[StopSignal], int]) -> int:
    """Does a command's work in the main thread, and turns what it raises into a sentence and an exit status.

    Args:
      parser: of the command; it says what is refused, and exits with 2.
      work: takes the signal that asks for an end; returns the exit status.
    """
    _open_streams()
    with StopSignal().installed() as stop:
        try:
            return work(stop)
        except (ValueError, LockedError) as error:
            parser.error(str(error))
        except RecursionError:
            parser.error("a file of the results folder is nested too deeply")
        except Stopped:
            say(MESSAGE)
            return STOPPED
        except DiskFullError as error:
            say(f"{parser.prog}: {error}")
        except MemoryError:
            say(f"{parser.prog}: out of memory")
        except OSError as error:
            advice = f"; {FREE_SPACE}" if error.errno in DISK_FULL else ""
            say(f"{parser.prog}: {error.filename or 'a file'}: {error.strerror or error}{advice}")
        return FAILED


def is_out_of_memory(error: Exception) -> bool:
    """Python's own error, or XLA's, which is known by its words."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))


def say(text: Any) -> None:
    """A line for the user, on standard error."""
    print(flags.printable(str(text)), file=flags.Stream(sys.stderr), flush=True)


def tell(text: Any) -> None:
    """A line of what was asked for, on standard output."""
    print(flags.printable(str(text)), file=flags.Stream(sys.stdout), flush=True)


def _open_streams() -> None:
    """Standard streams that were closed lead nowhere, lest a results file gets their number and the messages with it.

    What the locale cannot write is written out.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
