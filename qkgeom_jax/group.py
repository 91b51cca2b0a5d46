"""One group from its first step to its last: compile, train, measure, save, go on after an interruption."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from qkgeom_jax import ensemble, evaluate, optim, results
from qkgeom_jax.checkpoint import Checkpoints
from qkgeom_jax.command import is_out_of_memory
from qkgeom_jax.config import INITIALIZATIONS, Config, override
from qkgeom_jax.corpus import Corpus
from qkgeom_jax.history import History
from qkgeom_jax.initializers import Params
from qkgeom_jax.interventions import make_intervention
from qkgeom_jax.manifest import describe_process
from qkgeom_jax.stop import Stopped, StopSignal

GIB = 2**30


class OutOfMemoryError(RuntimeError):
    """A group does not fit, even one seed at a time; the message has an estimate and what would need less."""


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
    """How a group ended.

    Attributes:
      diverged: maps a seed to the step at which it did.
      phases: wall time in seconds.
      made_by: what computed it, as `manifest.describe_process` says; several where it was continued by another.
    """

    diverged: dict[int, int]
    phases: dict[str, float]
    made_by: list[dict[str, Any]]


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


# Groups follow each other depth by depth, so the last program is the one that the next group may want; two, because a
# group that is short of memory may fall into parts of two sizes.
@functools.lru_cache(maxsize=2)
def _compile_training(config: Config, tokens: jax.ShapeDtypeStruct) -> Any:
    programs, keys = make_programs(config), ensemble.make_keys(config.seeds)
    state = jax.eval_shape(programs.initialise, keys)
    return programs.advance.lower(state, keys, jax.ShapeDtypeStruct((), jnp.int32), tokens).compile()


@functools.lru_cache(maxsize=2)
def _compile_measurement(config: Config, probes: evaluate.Probes) -> Any:
    programs, keys = make_programs(config), ensemble.make_keys(config.seeds)
    return programs.measure.lower(jax.eval_shape(programs.initialise, keys).params, probes).compile()


def compile_training(config: Config, tokens: jax.ShapeDtypeStruct) -> Any:
    """The compiled `Ensemble.advance` of a group, for training tokens of that shape."""
    return _compile_training(_any_init(config), tokens)


def _compile_measurement_of(config: Config, probes: evaluate.Probes) -> Any:
    return _compile_measurement(_any_init(override(config, intervention="none")), probes)


def program_bytes(compiled: Any) -> int:
    """Memory of a compiled program: its arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def train_group(
    config: Config,
    folder: Path,
    corpus: Corpus,
    progress: Progress,
    stop: StopSignal,
    keep_epochs: str = "ends",
) -> Outcome:
    """Train, measure and save one group in its folder, from its newest sound checkpoint on.

    Files of an epoch are written before its checkpoint: after a kill in between, the epoch is trained again and gives
    the same bytes. Short of memory, half as many seeds go together, from the newest checkpoint on: equal up to rounding,
    because XLA makes another program of another number of seeds.

    Args:
      config: the group; its vocabulary is the corpus's.
      folder: exists and is locked by the caller.
      corpus: token arrays.
      progress: told of every chunk and epoch.
      stop: polled between programs.
      keep_epochs: "ends" keeps the parameters of the first and last epoch, "all" those of every epoch.

    Raises:
      Stopped: a signal said so; the state is saved.
      CheckpointError: a checkpoint could not be written.
      OutOfMemoryError: not even one seed at a time fits.
    """
    width = len(config.seeds)
    while True:
        try:
            return _train(config, folder, corpus, progress, stop, keep_epochs, width)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if width == 1:
                raise OutOfMemoryError(_needs(config, corpus)) from error
            width = (width + 1) // 2
            progress.note(f"{config.name}: out of memory; going on with {width} of {len(config.seeds)} seeds at a time")


def _needs(config: Config, corpus: Corpus) -> str:
    try:
        tokens = corpus.tokens["train"]
        one = compile_training(override(config, seeds=config.seeds[:1]), jax.ShapeDtypeStruct(tokens.shape, tokens.dtype))
        estimate = f"the training program of one seed needs {program_bytes(one) / GIB:.2f} GiB"
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        estimate = "not even the program of one seed can be compiled"
    smaller = "a smaller --batch, --context, --width or --probe-tokens, or --rematerialise true, needs less"
    return f"out of memory: {estimate}; {smaller}"


def _train(
    config: Config, folder: Path, corpus: Corpus, progress: Progress, stop: StopSignal, keep_epochs: str, width: int
) -> Outcome:
    """`train_group`, at most `width` seeds at a time."""
    clock = Clock()
    training, count = config.training, len(config.seeds)
    programs = make_programs(config)
    keys = ensemble.make_keys(config.seeds)
    tokens = jnp.asarray(corpus.tokens["train"])
    probes = evaluate.make_probes(corpus.tokens["train"], corpus.tokens["validation"], config)

    def training_of(seeds: int) -> Any:
        return compile_training(override(config, seeds=config.seeds[:seeds]), _shape(tokens))

    def measurement_of(seeds: int) -> Any:
        return _compile_measurement_of(override(config, seeds=config.seeds[:seeds]), jax.tree.map(_shape, probes))

    def advance(state: Any, step: int) -> Any:
        def part(seeds: int) -> Any:
            return lambda state, keys: training_of(seeds)(state, keys, jnp.int32(step), tokens)

        return jax.block_until_ready(ensemble.by_parts(part, count, width, state, keys))

    def measure(params: Params) -> evaluate.Measurement:
        def part(seeds: int) -> Any:
            return lambda params: measurement_of(seeds)(params, probes)

        return jax.device_get(ensemble.by_parts(part, count, width, params))

    progress.phase("compiling")
    with clock("compile"):
        template = jax.eval_shape(programs.initialise, keys)
        training_of(min(width, count))
        measurement_of(min(width, count))
    checkpoints = Checkpoints(folder / "checkpoints")
    with contextlib.closing(checkpoints), stop.protected():
        restored = checkpoints.restore(template)
        for warning in checkpoints.warnings_:
            progress.note(warning)
        if restored:
            step, state, record = restored
            history, made_by = History(config.seeds, record["history"]), record.get("made_by", [])
        else:
            step, state, history, made_by = 0, programs.initialise(keys), History(config.seeds), []
        process = describe_process()
        if process not in made_by:
            made_by.append(process)

        def record_epoch() -> None:
            epoch = step // training.steps_per_epoch
            progress.phase("measuring")
            with clock("evaluate"):
                measurement = measure(state.params)
            diverged = np.asarray(state.diverged_step)
            history.add(epoch, step, measurement, diverged)
            with clock("save"):
                save(epoch, diverged)
            progress.epoch(epoch, step, measurement.train_loss, measurement.val_loss, diverged < 0)

        def params_path(epoch: int) -> Path:
            return folder / "params" / f"epoch_{epoch:03d}.npz"

        def save(epoch: int, diverged: np.ndarray) -> None:
            history.write(folder)
            results.write_json(folder / "status.json", status_value("partial", epoch, _named(config, diverged)))
            if keep_epochs == "all" or epoch in (0, training.epochs):
                write_params(params_path(epoch), state.params)
            save_state()

        def save_state() -> None:
            checkpoints.save(step, state, {"history": history.entries, "made_by": made_by})

        def stop_here() -> None:
            if stop.requested():
                with clock("save"):
                    checkpoints.wait()
                    if step not in checkpoints.steps:
                        save_state()
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
                state = advance(state, step)
            step += training.chunk_steps
            progress.advance(training.chunk_steps)
            if step % training.steps_per_epoch == 0:
                record_epoch()
        with clock("save"):
            history.write(folder)
            # Missing only where a damaged one was taken away after the group had ended.
            if not params_path(0).exists():
                write_params(params_path(0), programs.initialise(keys).params)
            if step == training.steps and not params_path(training.epochs).exists():
                write_params(params_path(training.epochs), state.params)
            checkpoints.wait()
    diverged = _named(config, np.asarray(state.diverged_step))
    return Outcome(diverged, {name: round(seconds, 3) for name, seconds in clock.seconds.items()}, made_by)


def _named(config: Config, diverged_steps: np.ndarray) -> dict[int, int]:
    """The seeds that diverged, and at which step."""
    return {seed: int(at) for seed, at in zip(config.seeds, diverged_steps, strict=True) if at >= 0}


def status_value(status: str, epochs_done: int, diverged: dict[int, int]) -> dict[str, Any]:
    """The contents of a group's status.json."""
    return results.seal({"status": status, "epochs_done": epochs_done, "diverged": {str(s): at for s, at in diverged.items()}})
