"""Checkpoints of GPT-2, GPT-NeoX and Llama models in JAX: reading, a forward pass, the grid's metrics, and export."""

from qkgeom_jax.pretrained.architecture import Architecture
from qkgeom_jax.pretrained.checkpoint import Checkpoint, layer_fingerprints, open_checkpoint
from qkgeom_jax.pretrained.folder import needed_files
from qkgeom_jax.pretrained.forward import Activations, apply
from qkgeom_jax.pretrained.measure import Measurement, measure, reading_notes
from qkgeom_jax.pretrained.tensors import CheckpointFormatError

__all__ = (
    "Activations",
    "Architecture",
    "Checkpoint",
    "CheckpointFormatError",
    "Measurement",
    "apply",
    "layer_fingerprints",
    "measure",
    "needed_files",
    "open_checkpoint",
    "reading_notes",
)
