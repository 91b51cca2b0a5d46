"""The arms of a study: from an intervention's name and a configuration to transformations of our parameter tree."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax

from qkgeom_jax.config import DOSES, INTERVENTIONS, Config, did_you_mean, override, split_dose
from qkgeom_jax.interventions.leaves import Leaves, on
from qkgeom_jax.interventions.pieces import When, at, between, every
from qkgeom_jax.interventions.table2 import forced_k_contraction, k_spectrum_clamp, qk_align, qk_decouple
from qkgeom_jax.interventions.transforms import freeze

# The epoch from which an arm acts, where the configuration does not say.
START_EPOCH = {"k_spectrum_clamp": 1, "forced_k_contraction": 1, "qk_decouple": 3}

Pair = tuple[optax.GradientTransformation, optax.GradientTransformation]
Arm = Callable[[Config], optax.GradientTransformation | Pair]


def _kernel(name: str, config: Config) -> Leaves:
    """W_Q or W_K of all layers, [L, D, D], whole or per head."""
    return on(f"blocks/attention/{name}", layout="bio", heads=config.model.heads if config.manipulation.per_head else 1)


def _schedule(name: str, config: Config) -> When:
    """When an arm of the paper acts."""
    settings = config.manipulation
    epoch = START_EPOCH.get(name, 0) if settings.start_epoch is None else settings.start_epoch
    start = epoch * config.training.steps_per_epoch
    if name == "qk_decouple":
        return at(start + 1)
    window = between(start)
    return every(settings.period) & window if name in ("k_spectrum_clamp", "forced_k_contraction") else window


def _paper_arm(name: str, config: Config) -> optax.GradientTransformation | Pair:
    name, dose = split_dose(name)
    if dose is not None:
        config = override(config, **{DOSES[name]: float(dose)})
    settings, when = config.manipulation, _schedule(name, config)
    query, key = _kernel("query", config), _kernel("key", config)
    match name:
        case "none":
            return optax.identity()
        case "k_spectrum_clamp":
            return k_spectrum_clamp(key, when=when, strength=settings.clamp_strength)
        case "forced_k_contraction":
            return forced_k_contraction(
                key, rank=settings.contraction_rank, factor=settings.contraction_factor, when=when
            )
        case "freeze_q":
            return freeze(query, when=when, name=name)
        case "freeze_k":
            return freeze(key, when=when, name=name)
        case "qk_decouple":
            return qk_decouple(key, when=when)
        case "qk_align":
            align = qk_align(query, key, strength=settings.align_lambda, sign=settings.align_sign, when=when)
            return align, optax.identity()
    raise ValueError(f"intervention is {name!r}; allowed: {', '.join(INTERVENTIONS)}, FILE.py:name")


def _told(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def load_intervention(reference: str) -> Arm:
    """A user's own arm: the function `name` of a Python file, for ``"FILE.py:name"``.

    The function takes the `Config` of a group and returns a transformation that projects parameters (it will stand last
    in the chain), or a pair: one for the front, which changes gradients, and one for the end. docs/interventions.md
    has examples.

    Raises:
      ValueError: no such file or function, or the file raises; one sentence.
    """
    path, _, name = reference.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"intervention is {reference!r}; allowed: {', '.join(INTERVENTIONS)}, FILE.py:name")
    if not Path(path).is_file():
        raise ValueError(f"intervention {reference}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"intervention {Path(path).resolve()}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass in the file looks its module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"intervention {reference}: {path} raises {_told(error)}") from error
    arm = getattr(module, name, None)
    if not callable(arm):
        hint = did_you_mean(name, [n for n, v in vars(module).items() if callable(v)])
        raise ValueError(f"intervention {reference}: {path} has no function {name}{hint}")
    return arm


def make_intervention(name: str, config: Config) -> Pair:
    """The two transformations of an arm, for `qkgeom_jax.optim.make_optimizer`.

    Args:
      name: of `qkgeom_jax.config.INTERVENTIONS`, or ``"FILE.py:name"`` (see `load_intervention`).
      config: the group's configuration; `config.manipulation` has the arms' numbers.

    Returns:
      (what stands first and changes gradients, what stands last and projects parameters).

    Raises:
      ValueError: an unknown name, or an arm of a user's that fails or returns something else; one sentence.
    """
    if ":" not in name:
        made: Any = _paper_arm(name, config)
    else:
        arm = load_intervention(name)
        try:
            made = arm(config)
        except Exception as error:
            raise ValueError(f"intervention {name} raises {_told(error)}") from error
    if isinstance(made, optax.GradientTransformation):
        return optax.identity(), made
    pair = isinstance(made, tuple) and len(made) == 2
    if not (pair and all(isinstance(part, optax.GradientTransformation) for part in made)):
        raise ValueError(
            f"intervention {name} returned {made!r}; it must return an optax.GradientTransformation or a pair of them"
        )
    return made


def first_update(name: str, config: Config) -> int | None:
    """The update after which an arm of the paper first acts; None where it doesn't within the run.

    A user's own arm, whose schedule is not known, is taken to act at once.
    """
    if ":" in name:
        return 1
    name, _ = split_dose(name)
    if name == "none":
        return None
    due = np.flatnonzero(_schedule(name, config)(np.arange(1, config.training.steps + 1)))
    return int(due[0]) + 1 if due.size else None
