"""Named arrays of a file that are read one at a time, or a few rows at a time; the safetensors format.

The format is read here, not by its library: every offset of the header is checked against the file before a byte is
believed, bfloat16 is taken as it is, and nothing stays open or mapped between two reads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from qkgeom_jax.reading import read_bytes, require_regular

# As the format's own library has it.
LARGEST_HEADER = 100_000_000
DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
FLOATING = ("F64", "F32", "F16", "BF16")
_CHUNK_BYTES = 1 << 22


class CheckpointFormatError(ValueError):
    """A checkpoint that cannot be read; the message is one sentence that names the file and what is wrong with it."""


@dataclass(frozen=True)
class Tensor:
    """An array in a file: its type (a key of `DTYPES`), its shape, and `rows(start, stop)`, which reads along axis 0."""

    dtype: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]

    def read(self) -> np.ndarray:
        """The whole array, as stored."""
        return self.rows(0, self.shape[0]) if self.shape else self.rows(0, 1)

    def chunks(self) -> Iterator[np.ndarray]:
        """The array as stored, some rows at a time."""
        row = max(1, math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize)
        step = max(1, _CHUNK_BYTES // row)
        for start in range(0, self.shape[0] if self.shape else 1, step):
            yield self.rows(start, min(start + step, self.shape[0] if self.shape else 1))


Tensors = dict[str, Tensor]


def from_array(array: np.ndarray) -> Tensor:
    """A tensor that is in memory already."""
    name = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
    return Tensor(name, array.shape, lambda start, stop: array[start:stop] if array.shape else array)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise CheckpointFormatError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointFormatError(str(error)) from None
    return parse_object(data, path)


def parse_object(data: bytes, path: Path, what: str = "file") -> dict[str, Any]:
    """A JSON object in UTF-8 with no key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a name stands twice in one object")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointFormatError(f"{path}: its {what} is not valid JSON ({reason})") from None
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"{path}: its {what} holds no JSON object")
    return value


def _entry(path: Path, name: str, entry: Any, data_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, and the first and last offset of a header's entry."""

    def counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)

    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointFormatError(f"{path}: the tensor {name!r} has the unknown type {dtype!r}")
    if not counts(shape) or not counts(offsets) or len(offsets) != 2 or len(shape) > 32:
        raise CheckpointFormatError(f"{path}: the header's entry for {name!r} has no valid shape and data_offsets")
    start, stop = offsets
    if not start <= stop <= data_bytes:
        raise CheckpointFormatError(
            f"{path} is cut or damaged: the tensor {name!r} takes bytes {start} to {stop} of {data_bytes} that there are"
        )
    if stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointFormatError(
            f"{path}: the tensor {name!r} has {stop - start} bytes, not those of {dtype} {shape}"
        )
    return dtype, tuple(shape), start, stop


def read_safetensors(path: Path) -> Tensors:
    """The tensors of a safetensors file: its header is read and checked, their bytes when asked for.

    Raises:
      CheckpointFormatError: the file is missing, cut, or its header says what cannot be.
    """
    try:
        require_regular(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise CheckpointFormatError(
                    f"{path} is cut, or no safetensors file: {size} bytes, of which its header would take {length}"
                )
            header = parse_object(file.read(length), path, "header")
    except FileNotFoundError:
        raise CheckpointFormatError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise error if isinstance(error, CheckpointFormatError) else CheckpointFormatError(str(error)) from None
    header.pop("__metadata__", None)
    places = {name: _entry(path, name, entry, size - 8 - length) for name, entry in header.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start < end:
            raise CheckpointFormatError(f"{path}: the tensor {name!r} overlaps another")
        end = stop
    return {name: _in_file(path, name, dtype, shape, 8 + length + at) for name, (dtype, shape, at, _) in places.items()}


def _in_file(path: Path, name: str, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    row = math.prod(shape[1:])

    def rows(start: int, stop: int) -> np.ndarray:
        count = (stop - start) * row
        try:
            found = np.fromfile(
                path, np.uint8, count * DTYPES[dtype].itemsize, offset=offset + start * row * DTYPES[dtype].itemsize
            )
        except OSError as error:
            raise CheckpointFormatError(f"{path} cannot be read: {error.strerror}") from None
        if found.size < count * DTYPES[dtype].itemsize:
            raise CheckpointFormatError(f"{path} was cut while it was read: the tensor {name!r} has not all its bytes")
        return found.view(DTYPES[dtype]).reshape((stop - start, *shape[1:]) if shape else ())

    return Tensor(dtype, shape, rows)


def safetensors_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file of these arrays; equal arrays give equal bytes."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(arrays):
        array = arrays[name]
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(arrays[n]).tobytes() for n in sorted(arrays))]
    )
