"""One group from its first step to its last: compile, train, measure, save, go on after an interruption."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from qkgeom_jax import ensemble, evaluate, optim, results
from qkgeom_jax.checkpoint import Checkpoints
from qkgeom_jax.config import INITIALIZATIONS, Config, override
from qkgeom_jax.corpus import Corpus
from qkgeom_jax.history import History
from qkgeom_jax.initializers import Params
from qkgeom_jax.interventions import make_intervention


class Stopped(Exception):
    """A signal asked for an end; everything up to the last chunk is saved."""


class Progress(Protocol):
    """What the trainer tells whoever watches."""

    def note(self, text: str) -> None: ...
    def phase(self, text: str) -> None: ...
    def advance(self, steps: int) -> None: ...
    def epoch(self, epoch: int, step: int, train_loss: np.ndarray, val_loss: np.ndarray, alive: np.ndarray) -> None: ...


@dataclass
class Clock:
    """Wall time per phase, in seconds."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - start


@dataclass
class Outcome:
    """How a group ended: `diverged` maps a seed to the step at which it did."""

    diverged: dict[int, int]
    phases: dict[str, float]


def write_params(path: Path, params: Params) -> None:
    """Parameters as an npz: one array a leaf, named by its path (``blocks/attention/query``), leading axis S."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    results.write_npz(path, {"/".join(part.key for part in where): np.asarray(leaf) for where, leaf in leaves})


def make_programs(config: Config) -> ensemble.Ensemble:
    """The programs of a group, from its configuration alone."""
    return ensemble.make_ensemble(config, optim.make_optimizer(config, *make_intervention(config.intervention, config)))


def _any_init(config: Config) -> Config:
    """A stand-in for all groups whose training and evaluation are the same program: an initialisation changes neither.

    A user's own arm may read the initialisation, so its groups stand for themselves.
    """
    return config if ":" in config.intervention else override(config, init=INITIALIZATIONS[0])


# Groups follow each other depth by depth, so the last program is the one that the next group may want.
@functools.lru_cache(maxsize=1)
def _compile_training(config: Config, tokens: jax.ShapeDtypeStruct) -> Any:
    programs, keys = make_programs(config), ensemble.make_keys(config.seeds)
    state = jax.eval_shape(programs.initialise, keys)
    return programs.advance.lower(state, keys, jax.ShapeDtypeStruct((), jnp.int32), tokens).compile()


@functools.lru_cache(maxsize=1)
def _compile_measurement(config: Config, probes: evaluate.Probes) -> Any:
    programs, keys = make_programs(config), ensemble.make_keys(config.seeds)
    return programs.measure.lower(jax.eval_shape(programs.initialise, keys).params, probes).compile()


def compile_training(config: Config, tokens: jax.ShapeDtypeStruct) -> Any:
    """The compiled `Ensemble.advance` of a group, for training tokens of that shape."""
    return _compile_training(_any_init(config), tokens)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def train_group(
    config: Config,
    folder: Path,
    corpus: Corpus,
    progress: Progress,
    stop_requested: Callable[[], bool],
    keep_epochs: str = "ends",
) -> Outcome:
    """Train, measure and save one group in its folder, from its newest sound checkpoint on.

    Files of an epoch are written before its checkpoint: after a kill in between, the epoch is trained again and gives
    the same bytes.

    Args:
      config: the group; its vocabulary is the corpus's.
      folder: exists and is locked by the caller.
      corpus: token arrays.
      progress: told of every chunk and epoch.
      stop_requested: polled between programs.
      keep_epochs: "ends" keeps the parameters of the first and last epoch, "all" those of every epoch.

    Raises:
      Stopped: `stop_requested` said so; the state is saved.
      CheckpointError: a checkpoint could not be written.
    """
    clock = Clock()
    training = config.training
    programs = make_programs(config)
    keys = ensemble.make_keys(config.seeds)
    tokens = jnp.asarray(corpus.tokens["train"])
    probes = evaluate.make_probes(corpus.tokens["train"], corpus.tokens["validation"], config)
    checkpoints = Checkpoints(folder / "checkpoints")
    with contextlib.closing(checkpoints):
        progress.phase("compiling")
        with clock("compile"):
            template = jax.eval_shape(programs.initialise, keys)
            advance = compile_training(config, _shape(tokens))
            measure = _compile_measurement(_any_init(override(config, intervention="none")), jax.tree.map(_shape, probes))
        restored = checkpoints.restore(template)
        for warning in checkpoints.warnings_:
            progress.note(warning)
        if restored:
            step, state, record = restored
            history = History(config.seeds, record["history"])
        else:
            step, state, history = 0, programs.initialise(keys), History(config.seeds)

        def record_epoch() -> None:
            epoch = step // training.steps_per_epoch
            progress.phase("measuring")
            with clock("evaluate"):
                measurement = jax.device_get(measure(state.params, probes))
            diverged = np.asarray(state.diverged_step)
            history.add(epoch, step, measurement, diverged)
            with clock("save"):
                save(epoch, diverged)
            progress.epoch(epoch, step, measurement.train_loss, measurement.val_loss, diverged < 0)

        def save(epoch: int, diverged: np.ndarray) -> None:
            history.write(folder)
            results.write_json(folder / "status.json", status_value("partial", epoch, _named(config, diverged)))
            if keep_epochs == "all" or epoch in (0, training.epochs):
                write_params(folder / "params" / f"epoch_{epoch:03d}.npz", state.params)
            checkpoints.save(step, state, {"history": history.entries})

        def stop_here() -> None:
            if stop_requested():
                with clock("save"):
                    checkpoints.wait()
                    if step not in checkpoints.steps:
                        checkpoints.save(step, state, {"history": history.entries})
                        checkpoints.wait()
                raise Stopped

        progress.advance(step)
        if not history.entries:
            record_epoch()
        # A seed's fate is looked at between epochs: reading it every chunk would make the host wait for the device.
        while step < training.steps and bool(np.any(state.alive)):
            progress.phase("training")
            stop_here()
            with clock("train"):
                state = jax.block_until_ready(advance(state, keys, jnp.int32(step), tokens))
            step += training.chunk_steps
            progress.advance(training.chunk_steps)
            if step % training.steps_per_epoch == 0:
                record_epoch()
        with clock("save"):
            history.write(folder)
            checkpoints.wait()
    diverged = _named(config, np.asarray(state.diverged_step))
    return Outcome(diverged, {name: round(seconds, 3) for name, seconds in clock.seconds.items()})


def _named(config: Config, diverged_steps: np.ndarray) -> dict[int, int]:
    """The seeds that diverged, and at which step."""
    return {seed: int(at) for seed, at in zip(config.seeds, diverged_steps, strict=True) if at >= 0}


def status_value(status: str, epochs_done: int, diverged: dict[int, int]) -> dict[str, Any]:
    """The contents of a group's status.json."""
    return {"status": status, "epochs_done": epochs_done, "diverged": {str(s): at for s, at in diverged.items()}}
