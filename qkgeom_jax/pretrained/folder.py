"""The weight files of a folder in the hub's layout: one file or shards with an index, safetensors or torch's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from qkgeom_jax.pretrained.tensors import CheckpointFormatError, Tensor, Tensors, read_object, read_safetensors
from qkgeom_jax.reading import require_regular

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# In the order in which they are preferred.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"


def needed_files(names: Iterable[str]) -> list[str]:
    """Which of a repository's files `open_checkpoint` reads.

    Args:
      names: of all its files.
    Returns:
      config.json, then the weights (one file, or the index and all shards of its kind; safetensors where there are
      any), then tokenizer.json where there is one.
    Raises:
      ValueError: no config.json, or no weights of a known name.
    Source: ours.

    >>> needed_files(["README.md", "config.json", "pytorch_model.bin", "model.safetensors"])
    ['config.json', 'model.safetensors']
    """
    names = sorted(set(names))
    if CONFIG not in names:
        raise ValueError(f"there is no {CONFIG}")
    for whole in WEIGHTS:
        stem, _, suffix = whole.rpartition(".")
        shards = [n for n in names if n.startswith(f"{stem}-") and n.endswith(f".{suffix}") and "-of-" in n]
        if whole in names:
            weights = [whole]
        elif whole + _INDEX in names and shards:
            weights = [whole + _INDEX, *shards]
        else:
            continue
        return [CONFIG, *weights, *([TOKENIZER] if TOKENIZER in names else [])]
    raise ValueError(f"there are no weights: none of {', '.join(f'{w}, {w}{_INDEX} with its shards' for w in WEIGHTS)}")


def read_weights(folder: Path) -> tuple[Tensors, list[Path]]:
    """The tensors of a folder and the files that hold them.

    Raises:
      CheckpointFormatError: no weights, a shard that is missing, or a damaged file.
    """
    for whole in WEIGHTS:
        read = read_safetensors if whole.endswith(".safetensors") else read_torch
        if (folder / whole).exists():
            return read(folder / whole), [folder / whole]
        if (folder / (whole + _INDEX)).exists():
            return _read_shards(folder / (whole + _INDEX), read)
    raise CheckpointFormatError(f"{folder} holds no weights: neither {' nor '.join(WEIGHTS)}, nor an index of shards")


def _read_shards(index: Path, read: Any) -> tuple[Tensors, list[Path]]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointFormatError(f"{index} has no weight_map")
    for name in places.values():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise CheckpointFormatError(f"{index}: {name!r} is no name of a file beside it")
    files = [index.parent / name for name in sorted(set(places.values()))]
    for file in files:
        if not file.exists():
            raise CheckpointFormatError(f"the shard {file} is missing")
    inside = {file.name: read(file) for file in files}
    tensors = {}
    for name, file in places.items():
        if name not in inside[file]:
            raise CheckpointFormatError(
                f"{index.parent / file} does not hold the tensor {name!r}, which {index.name} places there"
            )
        tensors[name] = inside[file][name]
    return tensors, [index, *files]


def read_torch(path: Path) -> Tensors:
    """The tensors of a file written by `torch.save`; nothing but tensors is loaded from it.

    Raises:
      CheckpointFormatError: torch is not installed, or the file holds something else, or is damaged.
    """
    try:
        import torch
    except ImportError:
        raise CheckpointFormatError(f"{path} needs torch to be read: pip install torch, or use safetensors") from None
    try:
        require_regular(path)
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    options = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            loaded = torch.load(path, mmap=True, **options)
        except RuntimeError:  # files of before torch 1.6 cannot be mapped
            loaded = torch.load(path, **options)
    except OSError as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001 - what torch makes of hostile bytes is of every kind
        reason = " ".join(str(error).split())[:120]
        raise CheckpointFormatError(f"{path} is damaged, or holds more than tensors ({reason})") from None
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise CheckpointFormatError(f"{path} holds no dictionary of named tensors")
    types = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
        torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip

    def tensor(value: Any) -> Tensor:
        def rows(start: int, stop: int) -> np.ndarray:
            part = (value[start:stop] if value.ndim else value).detach().contiguous()
            if value.dtype == torch.bfloat16:
                return part.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return part.numpy()

        return Tensor(types[value.dtype], tuple(value.shape), rows)

    return {
        name: tensor(value)
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor) and value.dtype in types
    }
