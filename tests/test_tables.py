"""tables.py: the paper's tables from studies whose numbers are known, and what stands where there are too few."""

import csv

import numpy as np
import pytest
from synthetic_study import read_study, write_study

from qkgeom_jax import analysis, paper, tables

INITS = ("qk_identical", "disjoint_support", "independent")


def curves(depth, init, layer, seed, epochs):
    """PR_K falls by 0.5, 1.5 and 2.5 an epoch with the initialisation; PR_Q rises by 1, in the second layer by 2."""
    return {
        "participation_ratio_q": 5 + (1.0 + layer) * epochs,
        "participation_ratio_k": 5 - (INITS.index(init) + 0.5) * epochs,
        "column_alignment": np.full(len(epochs), 0.1 * INITS.index(init) + 0.01 * seed + 0.02 * layer),
    }


def study(tmp_path, **changes):
    settings = {"depths": (2,), "seeds": (1, 3), "epochs": 3, "curves": curves} | changes
    runs, metrics = read_study(write_study(tmp_path, **settings))
    return runs, analysis.finished_groups(metrics, runs)


def cell(table, row, name):
    return table.rows[row][[column.name for column in table.columns].index(name)]


def test_table_3_is_mean_and_sample_deviation_over_runs(tmp_path):
    runs, _ = study(tmp_path, depths=(2, 8), val_loss=lambda depth, init, seed: depth + seed)
    table = tables.table_3(runs)
    assert [row[0] for row in table.rows] == ["QK identical", "Disjoint support", "Independent"]
    for row in range(3):
        # losses 3, 5, 9, 11; alignment 0.1 row + 0.01 (1 or 3) + 0.01 (depth 2) or 0.07 (depth 8)
        assert cell(table, row, "runs") == 4
        assert cell(table, row, "final_val_loss") == analysis.MeanSd(7.0, pytest.approx(np.sqrt(40 / 3)), 4)
        values = 0.1 * row + np.array([0.02, 0.04, 0.08, 0.10])
        alignment = cell(table, row, "final_alignment")
        np.testing.assert_allclose([alignment.mean, alignment.sd], [values.mean(), np.std(values, ddof=1)], rtol=1e-6)
        deep = cell(table, row, "depth_8_alignment")
        np.testing.assert_allclose([deep.mean, deep.sd, deep.n], [0.1 * row + 0.09, np.sqrt(0.0002), 2], rtol=1e-6)
    assert cell(table, 0, "paper_final_val_loss") == analysis.MeanSd(1.1907, 0.0106)
    assert cell(table, 2, "paper_depth_8_alignment") == analysis.MeanSd(0.1799, 0.0241)
    assert len(table.notes) == 1


def test_table_4_is_mean_and_sample_deviation_over_trajectories(tmp_path):
    _, groups = study(tmp_path)
    table = tables.table_4(analysis.cells(groups))
    rises, falls = np.tile([1.0, 2.0], 3), -np.repeat([0.5, 1.5, 2.5], 2)
    for row, (label, kept) in enumerate(
        {"All trajectories": slice(0, 6), "Uncoupled Q/K": slice(2, 6), "QK identical": slice(0, 2)}.items()
    ):
        assert table.rows[row][0] == label
        for name, values in (("q", rises[kept]), ("k", falls[kept]), ("difference", (rises - falls)[kept])):
            got = cell(table, row, f"pr_{name}_slope")
            expected = [values.mean(), np.std(values, ddof=1), len(values)]
            np.testing.assert_allclose([got.mean, got.sd, got.n], expected, atol=1e-12)
    assert cell(table, 1, "paper_pr_k_slope") == analysis.MeanSd(-0.0539, 0.0547)
    assert [cell(table, row, "paper_n") for row in range(3)] == [54, 36, 18]
    by_fit = tables.table_4_fits(groups)
    assert len(by_fit.rows) == 12
    per_1000 = cell(by_fit, 1, "pr_q_slope")
    assert per_1000.mean == pytest.approx(1.5 * 1000 / 125) and cell(by_fit, 1, "fit").startswith("per 1,000 steps")


def test_signs_count_level_and_slope_apart(tmp_path):
    def turned(depth, init, layer, seed, epochs):
        falling = {"participation_ratio_q": 9 - epochs}  # the level is positive, the slope is not
        late = {"participation_ratio_q": epochs - 2.5}  # over the 1 of PR_K from epoch 4 on
        return falling if init == "independent" else late

    _, groups = study(tmp_path, epochs=4, curves=turned)
    table = tables.signs(analysis.cells(groups))
    names = ("n", "level_last", "level_always", "level_share", "slope", "paper_positive", "paper_n")
    counts = [[cell(table, row, name) for name in names] for row in range(3)]
    assert counts == [
        [6, 6, 2, pytest.approx(0.5), 4, 54, 54],
        [4, 4, 2, pytest.approx(0.625), 2, 36, 36],
        [2, 2, 0, pytest.approx(0.25), 2, 18, 18],
    ]


def test_the_papers_tables_are_consistent_with_themselves():
    parts = [paper.TABLE_4[key] for key in ("uncoupled", "qk_identical")]
    for name in tables.PR_SLOPES:
        mean = np.average([part[name][0] for part in parts], weights=[part["n"] for part in parts])
        assert mean == pytest.approx(paper.TABLE_4["all"][name][0], abs=1e-4)
    counts = [row for family, row in paper.TABLE_6.items() if family != "all"]
    assert paper.TABLE_6["all"] == {name: sum(row[name] for row in counts) for name in counts[0]}


def test_empty_cells_have_their_reason_under_the_table(tmp_path):
    runs, groups = study(tmp_path, inits=("independent",), seeds=(1,), epochs=1)
    third, table = tables.table_3(runs), analysis.cells(groups)
    assert third.notes[1:] == [
        "QK identical: no finished run.",
        "Disjoint support: no finished run.",
        "Independent: one run, so no standard deviation.",
        "Independent: no finished run of depth 8.",
    ]
    assert tables.table_4(table).notes[1:] == [
        "All trajectories: 0 of 2 trajectories have a value; a slope needs two trained epochs.",
        "Uncoupled Q/K: 0 of 2 trajectories have a value; a slope needs two trained epochs.",
        "QK identical: no finished trajectory.",
    ]
    text = tables.to_markdown(third)
    assert "| Independent | 1 | 12 | 1.4810 | 1.1973 ± 0.0108 |" in text
    assert "nan" not in text + tables.to_markdown(tables.table_4(table)) + tables.to_markdown(tables.signs(table))
    lines = tables.figure_3_table(analysis.figure_3_regressions(table))
    assert "0 cells with slopes, a fit needs 3" in lines.notes[1] and "nan" not in tables.to_markdown(lines)


def test_both_files_hold_the_table(tmp_path):
    table = tables.ReportTable(
        "A title",
        (tables.Column("who", "Who"), tables.Column("x", "X", "+.2f", spread=True), tables.Column("p", "p", ".2g")),
        [("a", analysis.MeanSd(0.5, 0.25, 3), 1e-9), ("b", analysis.MeanSd(-1.0, np.nan, 1), None)],
        ["A note."],
    )
    tables.write_table(table, tmp_path / "table")
    with open(tmp_path / "table.csv", newline="") as file:
        lines = list(csv.reader(file))
    assert lines == [["who", "x", "x_sd", "p"], ["a", "0.5", "0.25", "1e-09"], ["b", "-1", "", ""]]
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == (
        "**A title**\n\n| Who | X | p |\n| --- | --- | --- |\n"
        "| a | +0.50 ± 0.25 | 1e-09 |\n| b | -1.00 |  |\n\n- A note.\n"
    )
