"""Files that anybody may have made: nothing in them is run, waited for, or believed before it is held against their size."""

from __future__ import annotations

import io
import math
import os
import stat
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

# More than any description of a study or a model needs.
LARGEST_JSON = 1 << 28


def require_regular(path: str | os.PathLike, most: int | None = None) -> int:
    """Refuses what is no regular file (a pipe would block, a device might never end); its size.

    Raises:
      ValueError: so, or it has more than `most` bytes.
      OSError: it is missing or out of reach.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path} has {status.st_size} bytes; at most {most} are read")
    return status.st_size


def read_bytes(path: str | os.PathLike, most: int = LARGEST_JSON) -> bytes:
    """A regular file's bytes; the errors are those of `require_regular`."""
    require_regular(path, most)
    return Path(path).read_bytes()


def _read_array(file: IO[bytes], size: int) -> np.ndarray:
    """The array of a .npy file of `size` bytes, once its header claims exactly what is there."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"its format is version {version}")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    claimed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if claimed != there or min(shape, default=0) < 0:
        raise ValueError(f"its header claims {claimed:.15g} bytes of data, there are {there}")
    flat = np.frombuffer(bytearray(file.read(there)), dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def read_npy(path: str | os.PathLike) -> np.ndarray:
    """The array of a .npy file.

    Raises:
      ValueError: it is none, or damaged; one sentence that names it.
      OSError: it is missing or out of reach.
    """
    size = require_regular(path)
    with open(path, "rb") as file:
        return _told(path, "npy", lambda: _read_array(file, size))


def read_npz(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a .npz file as `results.write_npz` writes it, by name: compressed ones are refused.

    Raises:
      ValueError: it is none, or damaged; one sentence that names it.
      OSError: it is missing or out of reach.
    """
    size = require_regular(path)

    def read() -> dict[str, np.ndarray]:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = [member.filename.removesuffix(".npy") for member in members]
            if len(set(names)) < len(names):
                raise ValueError("it holds an array twice")
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("its arrays are compressed")
            # Stored bytes are all in the file: it cannot hold more than it has.
            if (claimed := sum(member.file_size for member in members)) > size:
                raise ValueError(f"its arrays claim {claimed} bytes, it has {size}")
            return {
                name: _read_array(io.BytesIO(archive.read(member)), member.file_size)
                for name, member in zip(names, members, strict=True)
            }

    return _told(path, "npz", read)


def _told(path: str | os.PathLike, kind: str, read):
    """What `read` returns; whatever it raises about the file's content is one sentence."""
    try:
        return read()
    except OSError:
        raise
    except MemoryError:
        raise ValueError(f"{path}: out of memory") from None
    except Exception as error:  # the parsers of zip and of headers raise all kinds at hostile bytes
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is no readable {kind} file ({reason})") from None
