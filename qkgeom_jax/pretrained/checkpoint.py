"""One checkpoint: opened by its configuration and its files' headers, read a layer at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkgeom_jax.pretrained import families, own
from qkgeom_jax.pretrained.architecture import Architecture, read_architecture
from qkgeom_jax.pretrained.folder import CONFIG, TOKENIZER, read_weights
from qkgeom_jax.pretrained.gguf_file import read_gguf, unpermute
from qkgeom_jax.pretrained.tensors import FLOATING, CheckpointFormatError, Tensor, Tensors, from_array, read_object

# A fingerprint's projections: this many vectors on each side of a matrix.
_SIDE = 8


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration and tensors fit each other; its bytes are read when they are needed.

    Attributes:
      path: the folder or file that was opened.
      architecture: sizes and options, from its configuration.
      tensors: those that the model reads, by their names in the files without the family's prefix.
      files: what was read, or will be.
      permuted: read query and key rows as neighbouring pairs of the rotation (only for `reading_notes`).
    """

    path: Path
    architecture: Architecture
    tensors: Tensors
    files: tuple[Path, ...]
    permuted: bool = False

    @property
    def family(self) -> str:
        return self.architecture.family

    @property
    def layers(self) -> int:
        return self.architecture.layers

    @property
    def heads(self) -> int:
        return self.architecture.heads

    @property
    def key_heads(self) -> int:
        return self.architecture.key_heads

    @property
    def head_width(self) -> int:
        return self.architecture.head_width

    @property
    def context(self) -> int:
        return self.architecture.context

    @property
    def vocabulary(self) -> int:
        return self.architecture.vocabulary

    def weights_sha256(self) -> str:
        """Hex digest over the names, types, shapes and bytes, as stored, of the tensors that the model reads.

        Into how many files they are split, in which order, and what else lies there makes no difference.
        """
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            for chunk in tensor.chunks():
                digest.update(np.ascontiguousarray(chunk).tobytes())
        return digest.hexdigest()

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of tokenizer.json; None where there is none.

        Raises:
          CheckpointFormatError: the library is not installed, or refuses the file.
        """
        path = self.path / TOKENIZER
        if not path.is_file():
            return None
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise CheckpointFormatError(
                f"{path} needs tokenizers to be read: pip install 'qkgeom_jax[checkpoints]'"
            ) from None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises Exception itself
            raise CheckpointFormatError(f"{path} is no tokenizer of the tokenizers library ({error})") from None

    def _float32(self, name: str) -> np.ndarray:
        return self.tensors[name].read().astype(np.float32)

    def block(self, layer: int) -> families.Block:
        """One layer's parameters, float32."""
        at = f"{families.LAYERS[self.family]}.{layer}."
        block = families.make_block(
            self.architecture, {n: self._float32(at + n) for n in families.layer_shapes(self.architecture)}
        )
        if self.permuted:
            for part, heads in (("query", self.heads), ("key", self.key_heads)):
                block[part] = {name: unpermute(w.T, heads).T for name, w in block[part].items()}
        return block

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        """The rows of the embedding for ids [...], plus the learned positions of the last axis: float32 [..., D]."""
        wanted, places = np.unique(token_ids, return_inverse=True)
        found, start = [], 0
        for chunk in self.tensors[families.EMBEDDINGS[self.family]].chunks():
            inside = wanted[(wanted >= start) & (wanted < start + len(chunk))]
            found.append(chunk[inside - start].astype(np.float32))
            start += len(chunk)
        x = np.concatenate(found)[places.reshape(token_ids.shape)]
        if self.family == "gpt2":
            x += self.tensors[families.POSITIONS].rows(0, token_ids.shape[-1]).astype(np.float32)
        return x

    def norm(self) -> dict[str, np.ndarray]:
        """The last normalisation."""
        name = families.NORMS[self.family]
        return families.make_norm({n: self._float32(n) for n in self.tensors if n.startswith(f"{name}.")}, name)

    def head(self) -> Iterator[np.ndarray]:
        """The output matrix some rows at a time: float32 [rows, D]."""
        name = families.EMBEDDINGS[self.family] if self.architecture.tied else families.HEADS[self.family][0]
        for chunk in self.tensors[name].chunks():
            yield chunk.astype(np.float32)


def open_checkpoint(path: str | Path, *, seed: int | None = None) -> Checkpoint:
    """Open a checkpoint: its configuration and its files' headers are read and held against each other.

    Args:
      path: a folder in the hub's layout (config.json; model.safetensors or pytorch_model.bin, whole or in shards;
        tokenizer.json), a .gguf file of the Llama family, or of our own training a group's folder (its last kept epoch)
        or one of its ``params/epoch_*.npz``.
      seed: which seed of our own training; by default the first.
    Returns:
      A `Checkpoint`.
    Raises:
      CheckpointFormatError: what cannot be read, in one sentence that names the file.
    Source: ours.
    """
    path = Path(path)
    if path.suffix == ".npz":
        return _open_own(path, path.parent.parent / CONFIG, seed)
    if (path / own.PARAMETERS).is_dir() and (path / CONFIG).is_file():
        epochs = [file for file in (path / own.PARAMETERS).iterdir() if own.EPOCH_FILE.fullmatch(file.name)]
        if not epochs:
            raise CheckpointFormatError(f"{path / own.PARAMETERS} holds no parameters yet")
        return _open_own(max(epochs, key=lambda file: int(own.EPOCH_FILE.fullmatch(file.name)[1])), path / CONFIG, seed)
    if seed is not None:
        raise CheckpointFormatError(f"{path} is not of our own training and has no seeds")
    if path.suffix == ".gguf":
        config, tensors = read_gguf(path)
        return _checked(path, read_architecture(config, path), tensors, (path,))
    if not path.is_dir():
        raise CheckpointFormatError(f"{path} is no folder{'' if path.exists() else ': it does not exist'}")
    architecture = read_architecture(read_object(path / CONFIG), path / CONFIG)
    tensors, files = read_weights(path)
    return _checked(path, architecture, tensors, (path / CONFIG, *files))


def _open_own(path: Path, config_path: Path, seed: int | None) -> Checkpoint:
    config = own.read_group_config(config_path)
    tensors = own.gpt2_tensors(own.read_params(path, config, seed), path)
    architecture = read_architecture(own.gpt2_config(config.model), config_path)
    return _checked(path, architecture, {n: from_array(w) for n, w in tensors.items()}, (config_path, path))


def _checked(path: Path, a: Architecture, stored: Tensors, files: tuple[Path, ...]) -> Checkpoint:
    """The checkpoint of those of the stored tensors that the architecture asks for, each found and of the right shape."""
    prefix = families.PREFIXES[a.family]
    named: Tensors = {}
    for name, tensor in stored.items():
        short = name.removeprefix(prefix)
        if short in named:
            raise CheckpointFormatError(f"{path} holds the tensor {short!r} both with and without {prefix!r}")
        named[short] = tensor
    layer_prefix = re.compile(rf"{families.LAYERS[a.family]}\.(\d{{1,9}})\.")
    present = {int(found[1]) for name in named if (found := layer_prefix.match(name))}
    if present and max(present) + 1 != a.layers:
        raise CheckpointFormatError(f"{path} holds {max(present) + 1} layers, its configuration says {a.layers}")
    wanted: Tensors = {}

    def take(name: str, shape: tuple[int, ...], names: tuple[str, ...] = ()) -> None:
        source = next((n for n in (name, *names) if n in named), None)
        if source is None:
            raise CheckpointFormatError(f"{path} lacks the tensor {name!r} that its configuration asks for")
        tensor = named[source]
        if tensor.shape != shape:
            raise CheckpointFormatError(
                f"{path}: the tensor {source!r} has shape {list(tensor.shape)}, its configuration asks for {list(shape)}"
            )
        if tensor.dtype not in FLOATING:
            raise CheckpointFormatError(
                f"{path}: the tensor {source!r} is of type {tensor.dtype}; supported: {', '.join(FLOATING)}"
            )
        wanted[name] = tensor

    for name, shape in families.outer_shapes(a).items():
        take(name, shape)
    for layer in range(a.layers):
        at = f"{families.LAYERS[a.family]}.{layer}."
        for name, shape in families.layer_shapes(a).items():
            take(at + name, shape)
        if (buffer := at + families.FREQUENCIES.get(a.family, "none")) in named:
            _check_frequencies(path, a, buffer, named[buffer])
    if not a.tied:
        name, *others = families.HEADS[a.family]
        take(name, (a.vocabulary, a.width), tuple(others))
    return Checkpoint(path, a, wanted, files)


def _check_frequencies(path: Path, a: Architecture, name: str, tensor: Tensor) -> None:
    """Older files store the rotation's frequencies, from which a wrong head count or base is seen."""
    expected = a.rope_theta ** (-np.arange(0, a.rotary_width, 2) / a.rotary_width)
    if tensor.shape != expected.shape or not np.allclose(tensor.read().astype(np.float64), expected, rtol=1e-2, atol=0):
        raise CheckpointFormatError(
            f"{path}: the rotation's frequencies in {name!r} are not those of {a.heads} heads of width {a.head_width} "
            f"({a.rotary_width} rotated) and base {a.rope_theta:g}, as its configuration says"
        )


def layer_fingerprints(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Small statistics of every matrix, from which distances between revisions can be told.

    ``[mean, norm, projections]``: the projections are 64 numbers u^T W v with fixed vectors of random signs, scaled so
    that the expected sum of their squares is the squared Frobenius norm of W.

    Args:
      checkpoint: any.
    Returns:
      float64 [66] for each matrix (the embedding and the head among them), by its name in the files.
    Source: ours; Johnson and Lindenstrauss (1984) for the projections.
    """
    found = {}
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) != 2:
            continue
        rng = np.random.default_rng(zlib.crc32(f"{name} {tensor.shape}".encode()))
        left, right = (rng.choice(np.float32([-1, 1]), (_SIDE, n)) for n in tensor.shape)
        total, squares, projections, start = 0.0, 0.0, np.zeros((_SIDE, _SIDE)), 0
        for chunk in tensor.chunks():
            w = chunk.astype(np.float32)
            total += float(w.sum(dtype=np.float64))
            squares += float(np.square(w, dtype=np.float64).sum())
            projections += left[:, start : start + len(w)].astype(np.float64) @ (w @ right.T).astype(np.float64)
            start += len(w)
        projections /= _SIDE
        found[name] = np.concatenate([[total / math.prod(tensor.shape), math.sqrt(squares)], projections.ravel()])
    return found


def with_reading(checkpoint: Checkpoint, *, permuted: bool = False, **changes: Any) -> Checkpoint:
    """The same bytes read in another way."""
    return dataclasses.replace(
        checkpoint, architecture=dataclasses.replace(checkpoint.architecture, **changes), permuted=permuted
    )
