"""What every command does around its work: ends by signal, and errors as one sentence with their exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

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
    with StopSignal().installed() as stop:
        try:
            return work(stop)
        except (ValueError, LockedError) as error:
            parser.error(str(error))
        except Stopped:
            say(MESSAGE)
            return STOPPED
        except BrokenPipeError:
            # Whoever read our output has gone; Python would complain again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except DiskFullError as error:
            say(f"{parser.prog}: {error}")
        except OSError as error:
            advice = f"; {FREE_SPACE}" if error.errno in DISK_FULL else ""
            say(f"{parser.prog}: {error.filename or 'a file'}: {error.strerror or error}{advice}")
        return FAILED


def is_out_of_memory(error: Exception) -> bool:
    """Python's own error, or XLA's, which is known by its words."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))


def say(text: str) -> None:
    print(flags.printable(text), file=sys.stderr, flush=True)
