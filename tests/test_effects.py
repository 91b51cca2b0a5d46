"""Paired effects of interventions, Table 5 and Figure 4, on studies whose every number is known."""

import itertools
import json

import numpy as np
import pytest
from scipy import stats
from synthetic_study import write_study

from qkgeom_jax import effect_tables, effects, paper, report, results

SEEDS = (7, 37, 42, 105, 210)
# Arm minus baseline at the last epoch, one a seed: the third seed's entropy goes against the others.
DELTAS = {
    "attention_entropy": np.array([0.1, 0.2, -0.05, 0.15, 0.3]),
    "logit_std": np.array([-1.0, -0.5, -0.8, -0.7, -0.9]),
    "effective_rank_qk": np.array([1.5, 1.0, 2.0, 1.2, 0.8]),
}


def curves(deltas):
    def made(depth, init, layer, seed, epochs):
        place = SEEDS.index(seed)
        base = {"attention_entropy": 2.0, "logit_std": 4.0, "effective_rank_qk": 9.0}
        # Layers differ by +-0.1 around the seed's delta, which grows from 0 to its value at the last epoch.
        tilt = 0.1 * (layer - (depth - 1) / 2)
        growth = epochs / epochs[-1]
        return {
            name: base[name] + 0.01 * place + layer + growth * (delta[place] + tilt) * (delta.any())
            for name, delta in deltas.items()
        }

    return made


STILL = {name: np.zeros(5) for name in DELTAS}


def write_arms(out, arms, *, init="independent", seeds=SEEDS, **more):
    for name, (deltas, loss) in arms.items():
        write_study(
            out, depths=(4,), inits=(init,), interventions=(name,), seeds=seeds, epochs=4, curves=curves(deltas),
            val_loss=lambda depth, init, seed, loss=loss: loss + seed / 1000, **more,
        )  # fmt: skip
    results.write_json(out / "config.json", {"command": "interventions"})
    return out


def read(out):
    groups = results.collect(out)
    tables = [
        results.read_csv(out / f"{name}.csv", columns)
        for name, columns in (
            ("metrics", results.METRIC_TABLE_COLUMNS), ("losses", results.LOSS_COLUMNS), ("runs", results.RUN_COLUMNS),
        )  # fmt: skip
    ]
    return effects.finished_arms(groups, *tables)


@pytest.fixture
def study(tmp_path):
    return write_arms(tmp_path / "out", {"none": (STILL, 1.2), "k_spectrum_clamp": (DELTAS, 1.25)})


def test_deltas_are_arm_minus_the_same_seeds_baseline(study):
    [found] = effects.compare(read(study))
    assert found.seeds == SEEDS and found.against == "independent"
    for name, expected in DELTAS.items():
        np.testing.assert_allclose(found.final(name), expected, atol=1e-6)
        np.testing.assert_allclose(found.deltas[name][:, 3, -1] - found.deltas[name][:, 0, -1], 0.3, atol=1e-6)
        np.testing.assert_allclose(found.deltas[name][:, :, 2].mean(1), expected / 2, atol=1e-6)
    np.testing.assert_allclose(found.final("val_loss"), 0.05, atol=1e-6)


def test_confidence_is_the_share_of_seed_metric_comparisons_with_the_aggregates_sign(study):
    [found] = effects.compare(read(study))
    assert found.confidence == pytest.approx(14 / 15)


def test_confidence_of_an_arm_that_changes_nothing_is_undefined(tmp_path):
    out = write_arms(tmp_path / "out", {"none": (STILL, 1.2), "freeze_q": (STILL, 1.2)})
    [found] = effects.compare(read(out))
    assert np.isnan(found.confidence)


def test_effect_is_the_paired_t_test_and_its_interval():
    deltas = DELTAS["attention_entropy"]
    found = effects.effect(deltas)
    expected = stats.ttest_1samp(deltas, 0)
    interval = expected.confidence_interval(0.95)
    assert (found.n, found.mean) == (5, pytest.approx(0.14))
    assert found.p_t == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_sign_flips_are_counted_exactly(size):
    deltas = np.random.default_rng(size).normal(0.5, 1, size)
    patterns = np.array(list(itertools.product((1, -1), repeat=size)))
    expected = np.mean(np.abs(patterns @ deltas) >= abs(deltas.sum()) * (1 - 1e-12))
    assert effects.sign_flip_p(deltas) == expected


def test_five_seeds_of_one_sign_give_the_least_p():
    assert effects.sign_flip_p(DELTAS["logit_std"]) == 2 / 32
    assert effects.sign_flip_p(np.full(5, 0.1)) == 2 / 32  # equal deltas: additions in any order
    assert effects.sign_flip_p(np.zeros(5)) == 1


@pytest.mark.parametrize(("deltas", "p"), [([0.0, 0.0], 1.0), ([0.5, 0.5], 0.0)])
def test_equal_deltas_have_an_interval_without_width(deltas, p):
    found = effects.effect(np.array(deltas))
    assert found.low == found.mean == found.high and found.p_t == p


def test_one_seed_has_a_mean_and_no_interval():
    found = effects.effect(np.array([0.5]))
    assert found.mean == 0.5 and np.isnan([found.low, found.high, found.p_t]).all()
    assert effects.effect(np.array([])).n == 0


def test_a_diverged_seed_leaves_its_partner_out(tmp_path):
    out = tmp_path / "out"
    write_arms(out, {"none": (STILL, 1.2)})
    write_arms(out, {"freeze_k": (DELTAS, 1.3)}, diverged={"depth4-independent-freeze_k": {42: 3}})
    [found] = effects.compare(read(out))
    assert found.seeds == (7, 37, 105, 210)
    np.testing.assert_allclose(found.final("attention_entropy"), [0.1, 0.2, 0.15, 0.3], atol=1e-6)
    assert found.confidence == 1


@pytest.fixture
def decoupled(tmp_path):
    out = tmp_path / "out"
    write_arms(out, {"none": (STILL, 1.2)})
    more = {name: 2 * delta for name, delta in DELTAS.items()}
    return write_arms(out, {"none": (DELTAS, 1.1), "qk_decouple": (more, 1.15)}, init="qk_identical")


def test_decouple_is_compared_with_both_baselines(decoupled):
    found = {c.against: c for c in effects.compare(read(decoupled))}
    assert set(found) == {"independent", "qk_identical"}
    np.testing.assert_allclose(found["independent"].final("logit_std"), 2 * DELTAS["logit_std"], atol=1e-6)
    np.testing.assert_allclose(found["qk_identical"].final("logit_std"), DELTAS["logit_std"], atol=1e-6)


def test_table_5_has_each_arm_beside_the_papers(study):
    arms = read(study)
    table = effect_tables.table_5(arms, effects.compare(arms))
    baseline, clamp = (dict(zip([c.name for c in table.columns], row)) for row in table.rows)
    assert clamp["attention_entropy"].mean == pytest.approx(2.0 + 0.02 + 1.5 + 0.14)
    assert clamp["attention_entropy"].sd == pytest.approx(np.std(DELTAS["attention_entropy"] + 0.01 * np.arange(5), ddof=1))
    assert clamp["paper_attention_entropy"] == paper.TABLE_5["k_spectrum_clamp"]["attention_entropy"] == 2.2888
    assert clamp["confidence"] == pytest.approx(14 / 15) and clamp["paper_confidence"] == 1
    assert baseline["confidence"] is None and baseline["paper_val_loss"] == 1.2066


def test_table_5_takes_decouple_against_the_papers_baseline_and_says_so(decoupled):
    arms = read(decoupled)
    table = effect_tables.table_5(arms, effects.compare(arms))
    assert [row[2] for row in table.rows] == ["No intervention", "No intervention", "Q/K decouple"]
    assert table.rows[1][5] is None  # the identical start is not the paper's baseline
    assert any("against the independent baseline; against its own start 0.93" in note for note in table.notes)


def test_signs_are_compared_with_the_papers(study):
    table = effect_tables.effects_table(effects.compare(read(study)))
    by_quantity = {row[4]: row for row in table.rows}
    names = [column.name for column in table.columns]
    entropy = dict(zip(names, by_quantity["Entropy (nats)"]))
    assert entropy["paper_delta"] == pytest.approx(2.2888 - 2.1893) and entropy["agrees"] == "yes"
    assert (entropy["same_sign"], entropy["n"]) == (4, 5)
    assert "against the paper" not in effect_tables.agreement(effects.compare(read(study)))[0]


def test_a_sign_that_differs_is_said(tmp_path):
    turned = {name: -delta for name, delta in DELTAS.items()}
    out = write_arms(tmp_path / "out", {"none": (STILL, 1.2), "k_spectrum_clamp": (turned, 1.25)})
    compared = effects.compare(read(out))
    assert [row[-1] for row in effect_tables.effects_table(compared).rows] == ["yes", "no", "no", "no"]
    assert effect_tables.agreement(compared)[0].count("against the paper") == 3


def test_an_arm_that_never_acts_is_marked(study):
    path = study / "groups" / "depth4-independent-k_spectrum_clamp" / "config.json"
    results.write_json(path, json.loads(path.read_text()) | {"first_update": None})
    arms = read(study)
    table = effect_tables.table_5(arms, effects.compare(arms))
    assert table.rows[1][2].endswith("†") and effect_tables.IDLE_NOTE in table.notes


def test_doses_stand_in_order_with_the_plain_arm_at_its_own(tmp_path):
    half = {name: delta / 2 for name, delta in DELTAS.items()}
    out = write_arms(
        tmp_path / "out",
        {"none": (STILL, 1.2), "k_spectrum_clamp": (DELTAS, 1.25), "k_spectrum_clamp@0.25": (half, 1.22)},
    )
    compared = effects.compare(read(out))
    table = effect_tables.dose_table(compared)
    assert [(row[0], row[3]) for row in table.rows] == [("Clamp strength", 0.25), ("Clamp strength", 1.0)]
    np.testing.assert_allclose([row[-1].mean for row in table.rows], [0.65, 1.3], atol=1e-6)
    assert "Contraction factor: no finished arm." in table.notes


def test_deltas_by_epoch_and_layer_are_written(study):
    report.write_all(study)
    columns = effect_tables.DETAIL_COLUMNS
    lines = (study / "tables" / "deltas.csv").read_text().splitlines()
    assert lines[0].split(",") == list(columns)
    # Three quantities by layer and in the mean, the loss in the mean, at five epochs each.
    assert len(lines) == 1 + 5 * (3 * 5 + 1)
    row = next(line.split(",") for line in lines if ",logit_std,4,2," in line)
    assert float(row[columns.index("mean")]) == pytest.approx(DELTAS["logit_std"].mean() + 0.05, abs=1e-6)


FILES = (
    "tables/table5.csv", "tables/table5.md", "tables/table5_deltas.csv", "tables/table5_doses.csv", "figures/figure4.png",
    "figures/figure4.pdf", "figures/figure4_details.png", "figures/figure_dose.png", "report.md",
)  # fmt: skip


@pytest.mark.parametrize("seeds", [SEEDS, (7,)])
@pytest.mark.parametrize("names", [("none",), ("freeze_q",), ("none", "freeze_q")])
def test_any_subset_ends_with_all_files(tmp_path, names, seeds):
    out = write_arms(tmp_path / "out", {name: (DELTAS if name != "none" else STILL, 1.2) for name in names}, seeds=seeds)
    report.write_all(out)
    first = {name: (out / name).read_bytes() for name in FILES}
    report.write_all(out)
    assert first == {name: (out / name).read_bytes() for name in FILES}
    if names != ("none", "freeze_q"):
        assert "No finished arm with a finished baseline." in first["report.md"].decode()


def test_the_report_shows_arms_and_not_the_grid(study):
    text = report.write_all(study).read_text()
    assert "Table 5" in text and "Table 3" not in text and not (study / "tables" / "table3.csv").exists()
    assert "K spectrum clamp, depth 4, independent: Val loss (nats) +0.0500 (as the paper's +0.0093" in text


def test_a_damaged_losses_table_is_named(study):
    path = study / "groups" / "depth4-independent-none" / "losses.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(ValueError, match="losses: depth 4, independent, none lacks an epoch"):
        read(study)
