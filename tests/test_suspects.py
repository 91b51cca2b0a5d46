"""Wrong revisions are found, and right ones are left alone."""

import numpy as np
import pytest

from qkgeom_jax.suspects import Weights, find_strangers, find_suspects

NAMES = [f"layers.{layer}.{matrix}" for layer in range(3) for matrix in ("query", "key")]


def fingerprint(matrix, directions):
    return np.concatenate([[matrix.mean(), np.linalg.norm(matrix)], directions @ matrix.ravel()])


def make(paths):
    """Weights from {revision: {name: matrix}}, projected onto 8 fixed directions."""
    rng = np.random.default_rng(9)
    directions = {name: rng.normal(size=(8, 48)) for name in NAMES}
    found = []
    for revision, matrices in paths.items():
        prints = {name: fingerprint(matrix, directions[name]) for name, matrix in matrices.items()}
        digest = str(hash(tuple(matrix.tobytes() for matrix in matrices.values())))
        found.append(Weights(revision, digest, prints))
    return found


def walk(seed, count=8, drift=0.0, scatter=0.0):
    """Trained-like matrices: a random walk, with a drift, or scattered about one place."""
    rng = np.random.default_rng(seed)
    place = {name: rng.normal(size=(8, 6)) for name in NAMES}
    towards = {name: rng.normal(size=(8, 6)) for name in NAMES}
    paths = {}
    for step in range(count):
        if scatter:
            paths[f"step{step + 1}"] = {
                name: value + scatter * rng.normal(size=(8, 6)) for name, value in place.items()
            }
            continue
        place = {name: value + drift * towards[name] + 0.1 * rng.normal(size=(8, 6)) for name, value in place.items()}
        paths[f"step{step + 1}"] = place
    return paths


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [{}, {"drift": 0.3}, {"scatter": 0.2}])
def test_walks_lines_and_scatter_are_left_alone(seed, kind):
    assert find_suspects(make(walk(seed, **kind))) == {}


def test_a_step_that_holds_the_final_weights():
    paths = walk(0)
    paths["step4"] = paths["step8"]
    found = find_suspects(make(paths))
    assert list(found) == ["step4"]
    assert [flag.kind for flag in found["step4"]] == ["final"] and found["step4"][0].excludes
    assert found["step4"][0].text == "holds the weights of the last revision, step8"


def test_two_equal_steps_keep_the_first():
    paths = walk(0)
    paths["step3"] = paths["step2"]
    found = find_suspects(make(paths))
    assert list(found) == ["step3"] and found["step3"][0].text == "holds the weights of step2"


def test_one_shard_of_the_final_model():
    """Reported of a public series: two revisions in the middle of training serve the final model's first shard."""
    paths = walk(1)
    for step in ("step4", "step5"):
        paths[step] = paths[step] | {name: paths["step8"][name] for name in NAMES[:2]}
    found = find_suspects(make(paths))
    assert sorted(found) == ["step4", "step5"]
    assert found["step4"][0].text == "shares 2 of 6 matrices with the last revision, step8"


def test_a_frozen_matrix_is_no_shared_one():
    paths = walk(1)
    for matrices in paths.values():
        matrices[NAMES[0]] = paths["step1"][NAMES[0]]
    assert find_suspects(make(paths)) == {}


def test_weights_of_another_run():
    paths = walk(2)
    paths["step5"] = walk(77)["step5"]
    found = find_suspects(make(paths))
    assert list(found) == ["step5"] and found["step5"][0].kind == "neighbours"
    assert "step4 and step6" in found["step5"][0].text


def test_one_layer_of_another_run_is_named():
    paths = walk(3, drift=0.5)
    paths["step5"] = paths["step5"] | {name: 30 * walk(78)["step5"][name] for name in NAMES[2:4]}
    series = make(paths)
    quiet = [Weights(w.revision, w.digest, w.fingerprints | noise) for w, noise in zip(series, _loud(len(series)))]
    assert "weights of layer 1 do not follow" in find_strangers(quiet)["step5"].text


def _loud(count):
    """Fingerprints of many more matrices, on a straight path, beside which one layer is nothing."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(20, 200))
    return [
        {f"layers.9.other.{n}": np.concatenate([[0.0, 1.0], 50 * step * row]) for n, row in enumerate(directions)}
        for step in range(count)
    ]


def test_rows_in_another_order():
    paths = walk(4)
    paths["step5"] = {name: matrix[::-1].copy() for name, matrix in paths["step5"].items()}
    assert list(find_suspects(make(paths))) == ["step5"]


def test_the_default_branch_without_a_step_is_told_as_a_copy():
    paths = walk(5)
    series = make(paths | {"main": paths["step8"]})
    found = find_suspects(series[:-1], series[-1:])
    assert list(found) == ["main"] and found["main"][0].text == "holds the weights of step8"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_revisions(count):
    assert find_suspects(make(walk(6, count=count))) == {}
