"""The geometry of attention's queries and keys, measured and manipulated during training."""

__version__ = "0.1.0"
