"""What a study would cost, and how far one has come; neither trains anything."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from qkgeom_jax import results
from qkgeom_jax.command import tell
from qkgeom_jax.config import Config, ModelConfig, from_dict
from qkgeom_jax.study import DONE, Study, disk_free, is_done, require_results

GIB = 2**30
# Of the speed of a bare matrix product, what a training step reaches (BUILD_NOTES.md, Speed).
STEP_EFFICIENCY = 0.5
CHECKPOINTS_KEPT, PARAMETER_FILES = 2, 2


def parameter_count(model: ModelConfig) -> int:
    """Parameters of one seed."""
    import jax

    from qkgeom_jax.initializers import make_params

    shapes = jax.eval_shape(functools.partial(make_params, config=model), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def training_flops(config: Config) -> float:
    """Floating-point operations of a whole run of all seeds: three times a forward pass, attention unmasked."""
    model, training = config.model, config.training
    weights = model.depth * (4 * model.width**2 + 2 * model.width * model.hidden) + model.width * model.vocabulary
    attention = 2 * model.depth * model.context * model.width
    tokens = training.steps * training.batch * model.context * len(config.seeds)
    return 3.0 * 2.0 * (weights + attention) * tokens


def disk_bytes(config: Config, keep_epochs: str = "ends") -> int:
    """Checkpoints (parameters and two moments) and kept parameters; tables are small beside them."""
    one = 4 * parameter_count(config.model) * len(config.seeds)
    files = config.training.epochs + 1 if keep_epochs == "all" else PARAMETER_FILES
    return one * (3 * CHECKPOINTS_KEPT + files)


def _matrix_product_rate(config: Config) -> float:
    """Operations per second of this device on the model's largest product."""
    import jax
    import jax.numpy as jnp

    model, training = config.model, config.training
    x = jnp.ones((len(config.seeds), training.batch * model.context, model.width))
    w = jnp.ones((len(config.seeds), model.width, model.hidden))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, w))
    fastest = np.inf
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(product(x, w))
        fastest = min(fastest, time.perf_counter() - start)
    return 2.0 * x.size * model.hidden / fastest


def training_bytes(config: Config) -> int:
    """Memory of the compiled training program."""
    import jax
    import jax.numpy as jnp

    from qkgeom_jax.group import compile_training, program_bytes

    return program_bytes(compile_training(config, jax.ShapeDtypeStruct((config.model.context + 1,), jnp.uint8)))


def print_plan(study: Study, corpus: Any) -> int:
    """Runs, parameters, memory from the compiled program, disk and an estimate of the time. Writes nothing."""
    rate = STEP_EFFICIENCY * _matrix_product_rate(study.groups[0])
    memory: dict[tuple, int] = {}
    todo = 0.0
    tell(f"{'group':42} {'runs':>4} {'parameters':>11} {'memory':>9} {'disk':>9} {'time':>8}")
    for group in study.groups:
        # The initialisation changes neither shapes nor the program's memory.
        key = (group.model.depth, group.intervention)
        if key not in memory:
            memory[key] = training_bytes(group)
        done = is_done(group, study.out / "groups" / group.name)
        seconds = 0.0 if done else training_flops(group) / rate
        todo += seconds
        tell(
            f"{group.name:42} {len(group.seeds):4d} {parameter_count(group.model):11,} "
            f"{memory[key] / GIB:5.2f} GiB {disk_bytes(group, study.keep_epochs) / GIB:5.2f} GiB "
            f"{'done' if done else f'{seconds / 60:.0f} min':>8}"
        )
    runs = sum(len(group.seeds) for group in study.groups)
    disk = sum(disk_bytes(group, study.keep_epochs) for group in study.groups)
    corpus_bytes = sum(tokens.nbytes for tokens in corpus.tokens.values())
    tell(
        f"{runs} runs in {len(study.groups)} groups of {study.base.training.steps:,} steps; about {todo / 60:.0f} minutes of "
        f"training left on this device at {rate / 1e9:.0f} GFLOP/s, an estimate from its matrix product, without evaluation"
    )
    tell(
        f"memory: at most {max(memory.values()) / GIB:.2f} GiB in a training program, and {corpus_bytes / GIB:.2f} GiB of "
        f"tokens; disk: {disk / GIB:.2f} GiB, {disk_free(study.out) / GIB:.1f} GiB free at {study.out}"
    )
    return DONE


def print_status(study: Study) -> int:
    """One line a group: its status, epochs and last losses."""
    require_results(study.out)
    lines = [f"{'group':42} {'status':8} {'epochs':>7} {'train':>8} {'val':>8}"]  # none, where something is damaged
    for group in results.read_groups(study.out):
        path = group.folder / "losses.csv"
        losses = results.read_csv(path, results.GROUP_LOSS_COLUMNS) if path.exists() else None
        last, shown = 0, [np.nan, np.nan]
        if losses is not None and len(losses["epoch"]):
            last = int(losses["epoch"].max())
            shown = [losses[name][losses["epoch"] == last].mean() for name in ("train_loss", "val_loss")]
        epochs = f"{last}/{from_dict(group.config).training.epochs}"
        lines.append(f"{group.folder.name:42} {group.status:8} {epochs:>7} {shown[0]:8.4f} {shown[1]:8.4f}")
        lines += [f"  seed {seed} diverged at step {step}" for seed, step in sorted(group.diverged.items())]
    for line in lines:
        tell(line)
    return DONE
