"""Seeds that diverge, memory that runs out, groups that raise."""

import json
import subprocess
import sys

import faulty
import jax
import numpy as np
import pytest

from qkgeom_jax import results

pytestmark = pytest.mark.slow

ONE = {"inits": "independent"}


def poisoned(monkeypatch, seed, at_step, value):
    """The training program of a group meets a number in one seed's weights before the given step."""
    from qkgeom_jax import group

    compile_training = group.compile_training

    def compile_poisoned(config, tokens):
        program = compile_training(config, tokens)

        def call(state, keys, step, data):
            if int(step) == at_step:
                query = state.params["blocks"]["attention"]["query"]
                query = query.at[config.seeds.index(seed), 0, 0, 0].set(value)
                params = {**state.params, "blocks": {**state.params["blocks"]}}
                params["blocks"]["attention"] = {**params["blocks"]["attention"], "query": query}
                state = state.replace(params=params)
            return program(state, keys, step, data)

        return call

    monkeypatch.setattr(group, "compile_training", compile_poisoned)


def rows_of(out, seed):
    table = results.read_csv(out / "metrics.csv", results.METRIC_TABLE_COLUMNS)
    return {name: values[table["seed"] == seed] for name, values in table.items()}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_seed_that_diverges_leaves_the_others_bitwise(value, whole, corpus, tmp_path, monkeypatch):
    poisoned(monkeypatch, seed=5, at_step=4, value=value)
    faulty.train(corpus, tmp_path, **ONE, status=3)
    status = json.loads((tmp_path / "groups" / faulty.GROUPS[1] / "status.json").read_text())
    assert status["diverged"] == {"5": 5}
    untouched = rows_of(whole, 3)
    here = untouched["init"] == "independent"
    for name, values in rows_of(tmp_path, 3).items():
        np.testing.assert_array_equal(values, untouched[name][here], err_msg=name)
    ours, theirs = (
        np.load(out / "groups" / faulty.GROUPS[1] / "params/epoch_002.npz") for out in (tmp_path, whole)
    )
    for name in ours.files:
        np.testing.assert_array_equal(ours[name][0], theirs[name][0], err_msg=name)
    assert "seed 5" in (tmp_path / "report.md").read_text() and "diverged" in (tmp_path / "report.md").read_text()


def test_a_group_whose_seeds_all_diverged_is_said_and_the_next_one_trains(corpus, tmp_path, monkeypatch, capfd):
    from qkgeom_jax import group

    compile_training, advance = group.compile_training, {"calls": 0}

    def compile_broken(config, tokens):
        program = compile_training(config, tokens)

        def call(state, keys, step, data):
            advance["calls"] += 1
            if advance["calls"] == 1:
                state = state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, state.params))
            return program(state, keys, step, data)

        return call

    monkeypatch.setattr(group, "compile_training", compile_broken)
    faulty.train(corpus, tmp_path, status=3)
    assert f"{faulty.GROUPS[0]}: every seed diverged; nothing of it enters the tables" in capfd.readouterr().err
    runs = results.read_csv(tmp_path / "runs.csv", results.RUN_COLUMNS)
    assert list(runs["status"]) == ["diverged", "diverged", "done", "done"]


def short_of_memory(monkeypatch, most_seeds):
    """Programs of more seeds than that end as XLA's do when an allocation fails."""
    from qkgeom_jax import group

    compile_training = group.compile_training

    def compile_or_fail(config, tokens):
        program = compile_training(config, tokens)

        def call(state, *rest):
            if len(state.alive) > most_seeds:
                raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")
            return program(state, *rest)

        call.memory_analysis = program.memory_analysis
        return call

    monkeypatch.setattr(group, "compile_training", compile_or_fail)


def test_out_of_memory_halves_the_seeds(corpus, tmp_path, monkeypatch, capfd):
    """Programs of other widths round otherwise: the results are near those of all seeds together, not the same bytes."""
    four = ONE | {"seeds": "3,5,7,9"}
    faulty.train(corpus, tmp_path / "whole", **four)
    short_of_memory(monkeypatch, most_seeds=2)
    faulty.train(corpus, tmp_path / "out", **four)
    assert "out of memory; going on with 2 of 4 seeds at a time" in capfd.readouterr().err
    ours, theirs = (results.read_csv(tmp_path / out / "losses.csv", results.LOSS_COLUMNS) for out in ("out", "whole"))
    for name in ("train_loss", "val_loss"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6)


def test_out_of_memory_with_one_seed_is_told_what_would_help(corpus, tmp_path, monkeypatch, capfd):
    short_of_memory(monkeypatch, most_seeds=0)
    faulty.train(corpus, tmp_path, **ONE, status=1)
    said = capfd.readouterr().err
    assert "out of memory: the training program of one seed needs 0.00 GiB; a smaller --batch" in said
    assert json.loads((tmp_path / "groups" / faulty.GROUPS[1] / "status.json").read_text())["status"] == "failed"


LIMITED = """
import resource, sys, jax
from qkgeom_jax import group
compile_training = group.compile_training
def compile_limited(config, tokens):
    program = compile_training(config, tokens)
    def call(*arguments):
        # What the process has, and a little: not what the activations of all seeds need.
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (int(sys.argv[1]) << 20), resource.RLIM_INFINITY))
        try:
            return jax.block_until_ready(program(*arguments))
        finally:  # XLA ends the process where it cannot start a thread to compile with
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    call.memory_analysis = program.memory_analysis
    return call
group.compile_training = compile_limited
from qkgeom_jax.cli import grid
sys.exit(grid(sys.argv[2:]))
"""


@pytest.mark.parametrize(("megabytes", "status"), [(330, 0), pytest.param(50, 1, marks=pytest.mark.faults)])
def test_a_real_limit_on_memory(megabytes, status, corpus, tmp_path):
    """The program of two seeds needs 470 MB, that of one half as much."""
    sizes = {"context": 128, "batch": 128, "heads": 8, "probe_tokens": 512, "loss_tokens": 512, "epochs": 1}
    given = faulty.arguments(corpus, tmp_path / "out", **ONE, **sizes)
    command = [sys.executable, "-c", LIMITED, str(megabytes), *given]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=faulty.HERE.parents[1], timeout=300)
    assert done.returncode == status, done.stderr
    assert "out of memory; going on with 1 of 2 seeds at a time" in done.stderr
    assert status == 0 or "out of memory: the training program of one seed needs 0." in done.stderr
