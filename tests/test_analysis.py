"""analysis.py against closed forms, numpy.polyfit and formulas written out; only known slopes on disk."""

import dataclasses
import doctest
import subprocess
import sys

import numpy as np
import pytest
from scipy import special, stats
from synthetic_study import read_study, write_study

from qkgeom_jax import analysis, config, results, tables

INITS = config.INITIALIZATIONS


def test_slope_is_that_of_polyfit():
    rng = np.random.default_rng(0)
    x, y = np.array([1, 2, 3, 5, 8]), rng.normal(size=(3, 4, 5))
    fitted = np.polyfit(x, y.reshape(12, 5).T, 1)[0].reshape(3, 4)
    np.testing.assert_allclose(analysis.slope(x, y), fitted, rtol=1e-12)


def test_slope_is_undefined_where_it_must_be():
    y = np.array([[1.0, 2.0, 4.0], [1.0, np.nan, 4.0]])
    np.testing.assert_array_equal(analysis.slope(np.array([0, 1, 2]), y), [1.5, np.nan])
    np.testing.assert_array_equal(analysis.slope(np.array([2, 2, 2]), y), [np.nan, np.nan])
    np.testing.assert_array_equal(analysis.slope(np.array([2]), y[:, :1]), [np.nan, np.nan])
    np.testing.assert_array_equal(analysis.slope(np.array([]), y[:, :0]), [np.nan, np.nan])


@pytest.mark.parametrize("last", [2, 3, 4, 5, 8])
def test_each_fit_sees_its_own_epochs(last):
    epochs = np.arange(last + 1)
    steps = 125 * epochs
    y = np.random.default_rng(last).normal(size=last + 1)
    for fit, x, kept in (
        ("per_epoch", epochs, list(range(1, last + 1))),
        ("per_1000_steps", steps / 1000, list(range(1, last + 1))),
        ("with_epoch_0", epochs, list(range(last + 1))),
        ("second_half", epochs, {2: [2], 3: [2, 3], 4: [3, 4], 5: [3, 4, 5], 8: [5, 6, 7, 8]}[last]),
    ):
        got = analysis.fit_slope(epochs, steps, y, fit)
        if len(kept) < 2:
            assert np.isnan(got)
        else:
            np.testing.assert_allclose(got, np.polyfit(x[kept], y[kept], 1)[0], rtol=1e-9, atol=1e-12)
    assert set(analysis.FITS) == {"per_epoch", "per_1000_steps", "with_epoch_0", "second_half"}
    with pytest.raises(ValueError, match="fit is 'per_hour'"):
        analysis.fit_slope(epochs, steps, y, "per_hour")


def test_mean_sd_and_standard_error():
    values = [2.0, 4.0, 4.0, 6.0]
    assert analysis.mean_sd(values) == analysis.MeanSd(4.0, pytest.approx(np.sqrt(8 / 3)), 4)
    assert analysis.standard_error(np.array(values)) == pytest.approx(np.sqrt(8 / 3) / 2)
    one, none = analysis.mean_sd([3.0]), analysis.mean_sd([])
    assert (one.mean, one.n, none.n) == (3.0, 1, 0)
    assert np.isnan([one.sd, none.mean, none.sd]).all()
    np.testing.assert_array_equal(analysis.standard_error(np.ones((1, 2))), [np.nan, np.nan])


def test_regression_against_the_formulas():
    rng = np.random.default_rng(3)
    x = rng.normal(size=36)
    y = 0.4 * x + 0.1 + 0.3 * rng.normal(size=36)
    got = analysis.regression(x, y)
    n, (slope, intercept) = 36, np.polyfit(x, y, 1)
    r = np.corrcoef(x, y)[0, 1]
    t = r * np.sqrt((n - 2) / (1 - r * r))
    # the two-sided tail of Student's t as an incomplete beta function
    p = special.betainc((n - 2) / 2, 0.5, (n - 2) / (n - 2 + t * t))
    error = np.sqrt(np.sum((y - slope * x - intercept) ** 2) / (n - 2) / np.sum((x - x.mean()) ** 2))
    interval = stats.pearsonr(x, y).confidence_interval(0.95)
    margin = 2.0322445 * error  # the 0.975 quantile of Student's t with 34 degrees of freedom
    expected = (slope, intercept, r, p, interval.low, interval.high, slope - margin, slope + margin)
    np.testing.assert_allclose(dataclasses.astuple(got)[1:9], expected, rtol=1e-7)
    assert (got.n, got.reason) == (36, "")
    falling = analysis.regression(x, -y)
    np.testing.assert_allclose([falling.r, falling.r_low, falling.slope], [-got.r, -got.r_high, -got.slope], rtol=1e-12)


def test_regression_says_why_it_is_undefined():
    x = np.array([1.0, 2.0, np.nan, 4.0])
    assert analysis.regression(x[:3], x[:3]).reason == "2 cells with slopes, a fit needs 3"
    assert analysis.regression(np.zeros(0), np.zeros(0)).n == 0
    assert analysis.regression(np.ones(4), x).reason == "all cells have the same x"
    flat = analysis.regression(x, np.ones(4))
    assert flat.reason == "all cells have the same y" and np.isnan([flat.slope, flat.r, flat.p]).all()
    three = analysis.regression(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 1.0]))
    assert three.n == 3 and np.isnan([three.r_low, three.r_high]).all()
    assert three.r == pytest.approx(np.sqrt(3) / 2) and three.slope == pytest.approx(0.5)
    exact = analysis.regression(np.arange(4.0), -np.arange(4.0))
    assert (exact.r, exact.r_low, exact.r_high, exact.p) == (-1, -1, -1, pytest.approx(0, abs=1e-12))


def known(depth, init, layer, seed, epochs):
    """Straight lines after an untrained point that would spoil them; the seeds' deviations cancel over 7 and 9."""
    rise, jump = 0.25 * (layer + 1), np.where(epochs == 0, 50.0, 0.0)
    fall = -0.125 * depth * (1 + INITS.index(init)) * (layer + 1)
    deviation = (seed - 8) * epochs
    return {
        "participation_ratio_q": 8 + rise * epochs + jump + deviation,
        "participation_ratio_k": 8 + fall * epochs + deviation,
        "effective_rank_qk": 20 + (0.5 * fall + 0.125) * epochs - jump,
        "attention_entropy": 3 + (-0.25 * fall + 0.5) * epochs,
    }


def test_cells_have_the_known_slopes(tmp_path):
    write_study(tmp_path, depths=(1, 2), seeds=(7, 9), epochs=4, steps_per_epoch=250, curves=known)
    runs, metrics = read_study(tmp_path)
    groups = analysis.finished_groups(metrics, runs)
    assert [(group.depth, group.init) for group in groups] == [(depth, init) for depth in (1, 2) for init in INITS]
    assert groups[3].values["participation_ratio_q"].shape == (2, 2, 5)
    np.testing.assert_array_equal(groups[3].steps, [0, 250, 500, 750, 1000])
    table = analysis.cells(groups)
    assert tuple(table) == analysis.CELL_COLUMNS
    assert list(zip(table["depth"], table["init"], table["layer"])) == [
        (depth, init, layer) for depth in (1, 2) for init in INITS for layer in range(depth)
    ]
    rise = 0.25 * (table["layer"] + 1)
    place = np.array([INITS.index(init) for init in table["init"]])
    fall = -0.125 * table["depth"] * (1 + place) * (table["layer"] + 1)
    exact = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(table["pr_q_slope"], rise, **exact)
    np.testing.assert_allclose(table["pr_k_slope"], fall, **exact)
    np.testing.assert_allclose(table["pr_difference_slope"], rise - fall, **exact)
    np.testing.assert_allclose(table["effective_rank_qk_slope"], 0.5 * fall + 0.125, **exact)
    np.testing.assert_allclose(table["attention_entropy_slope"], -0.25 * fall + 0.5, **exact)
    np.testing.assert_allclose(table["pr_difference_last"], 4 * (rise - fall), **exact)
    np.testing.assert_array_equal(table["pr_difference_positive_share"], np.ones(9))
    assert set(table["seeds"]) == {2} and set(table["epochs"]) == {4}

    by_steps = analysis.cells(groups, "per_1000_steps")
    np.testing.assert_allclose(by_steps["pr_k_slope"], 4 * fall, **exact)
    all_epochs = analysis.cells(groups, "with_epoch_0")["pr_q_slope"]
    np.testing.assert_allclose(all_epochs, rise - 10, **exact)  # 50 at the first of 0..4 moves a slope by -2 x 50 / 10

    lines = analysis.figure_3_regressions(table)
    first, second = lines.values()
    assert (first.n, second.n) == (6, 6)  # without the identical ones
    np.testing.assert_allclose([first.slope, first.intercept, first.r], [0.5, 0.125, 1], rtol=1e-9)
    np.testing.assert_allclose([second.slope, second.intercept, second.r], [-0.5, 0.5625, -1], rtol=1e-9)


def test_a_level_that_turns_is_counted_by_epochs(tmp_path):
    def curves(depth, init, layer, seed, epochs):
        return {"participation_ratio_q": np.array([9.0, 0.5, 1.0, 2.0, 3.0])}  # the other is 1

    write_study(tmp_path, depths=(1,), inits=("independent",), seeds=(1,), epochs=4, curves=curves)
    runs, metrics = read_study(tmp_path)
    table = analysis.cells(analysis.finished_groups(metrics, runs))
    assert table["pr_difference_positive_share"].tolist() == [0.5]  # not at epoch 1, nor at 2, where they are equal
    assert table["pr_difference_last"].tolist() == [2.0]


def test_only_what_is_finished_and_did_not_diverge_enters(tmp_path):
    write_study(
        tmp_path, depths=(1,), interventions=("none", "freeze_k"), seeds=(7, 9, 100), epochs=4, curves=known,
        diverged={"depth1-independent-none": {100: 3}, "depth1-qk_identical-none": {7: 1, 9: 1, 100: 2}},
        statuses={"depth1-disjoint_support-none": "partial"},
    )  # fmt: skip
    runs, metrics = read_study(tmp_path)
    (group,) = analysis.finished_groups(metrics, runs)
    assert (group.init, group.seeds) == ("independent", (7, 9))
    np.testing.assert_allclose(analysis.cells([group])["pr_q_slope"], [0.25], atol=1e-12)
    assert len(analysis.finished_groups(metrics, runs, "freeze_k")) == 3


def test_one_epoch_has_a_level_and_no_slope(tmp_path):
    write_study(tmp_path, depths=(2,), inits=("independent",), seeds=(7,), epochs=1)
    runs, metrics = read_study(tmp_path)
    groups = analysis.finished_groups(metrics, runs)
    table = analysis.cells(groups)
    assert np.isnan(table["pr_q_slope"]).all() and np.isfinite(table["pr_difference_last"]).all()
    assert np.isfinite(analysis.cells(groups, "with_epoch_0")["pr_q_slope"]).all()


def test_no_group_gives_no_cells():
    table = analysis.cells([])
    assert {values.shape for values in table.values()} == {(0,)}
    assert [line.n for line in analysis.figure_3_regressions(table).values()] == [0, 0]


def test_an_undefined_metric_leaves_its_cell_undefined_alone(tmp_path):
    def curves(depth, init, layer, seed, epochs):
        hole = np.where((epochs == 2) & (layer == 1) & (seed == 9), np.nan, 1.0)
        return {"participation_ratio_k": hole * epochs}

    write_study(tmp_path, depths=(3,), inits=("independent",), seeds=(7, 9), epochs=3, curves=curves)
    runs, metrics = read_study(tmp_path)
    table = analysis.cells(analysis.finished_groups(metrics, runs))
    np.testing.assert_allclose(table["pr_k_slope"], [1, np.nan, 1])
    np.testing.assert_array_equal(table["pr_difference_positive_share"], [0, np.nan, 0])
    np.testing.assert_allclose(table["pr_q_slope"], [0, 0, 0], atol=1e-15)


@pytest.mark.parametrize("lost", ["row", "layer", "seed"])
def test_a_hole_in_a_finished_group_is_refused(tmp_path, lost):
    write_study(tmp_path, depths=(2,), inits=("independent",), seeds=(7, 9), epochs=2)
    runs, metrics = read_study(tmp_path)
    rows = {"row": np.arange(12) != 4, "layer": metrics["layer"] == 0, "seed": metrics["seed"] == 9}[lost]
    with pytest.raises(ValueError, match="depth 2, independent lacks a seed, layer or epoch"):
        analysis.finished_groups(results.select(metrics, rows), runs)


@pytest.mark.parametrize("module", [analysis, results, tables])
def test_examples_in_docstrings_run(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0


def test_nothing_after_training_loads_a_trainer():
    program = (
        "import sys; import qkgeom_jax.report\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'tensorflow_datasets', 'pandas', 'matplotlib.pyplot'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
