"""Slopes, correlations, counts and their table, against closed forms and an independent computation."""

import numpy as np
import pytest
import synthetic_series

from qkgeom_jax import paper, series_tables
from qkgeom_jax.series_analysis import count, summarise, trajectories
from qkgeom_jax.series_results import CONTRAST
from qkgeom_jax.tables import to_markdown


def trajectory(steps, flagged=(), **values):
    return trajectories({"tiny": synthetic_series.records("tiny", "gpt2", steps, flagged=flagged, **values)})[0]


def test_slopes_are_over_the_index_without_the_untrained_and_the_flagged():
    steps = [0, 1, 10, 100, 1000, 10000]
    contrast = [9.0, 1.0, 3.0, 50.0, 5.0, 7.0]
    found = trajectory(steps, flagged=[100], contrast=contrast)
    summary = summarise(found)
    assert summary.revisions == 4 and (summary.first, summary.last) == ("step1", "step10000")
    assert summary.slopes["pr_difference_slope"].slope == pytest.approx(2.0)
    # Decades 0, 1, 3, 4 and values 1, 3, 5, 7: by hand 14/10.
    assert summarise(found, fit="per_decade").slopes["pr_difference_slope"].slope == pytest.approx(1.4)
    x = np.array([1, 10, 1000, 10000]) / 1000
    expected = np.polyfit(x, [1.0, 3.0, 5.0, 7.0], 1)[0]
    assert summarise(found, fit="per_1000_steps").slopes["pr_difference_slope"].slope == pytest.approx(expected)
    assert summarise(found, "with_flagged").revisions == 5 and summarise(found, "with_untrained").revisions == 5


@pytest.mark.parametrize("trained, early, late", [(6, "123", "456"), (5, "123", "345"), (1, "1", "1"), (0, "", "")])
def test_halves_of_the_trained_revisions(trained, early, late):
    found = trajectory(range(trained + 1))
    names = {
        window: "".join(found.revisions[place].removeprefix("step") for place in found.window(window))
        for window in ("early", "late")
    }
    assert names == {"early": early, "late": late}


def test_a_rise_that_decays_is_seen_in_the_halves_alone():
    found = trajectory(range(8), contrast=[0, 1, 2, 3, 4, 3, 2, 1])
    assert summarise(found, "early").slopes["pr_difference_slope"].slope == pytest.approx(1)
    assert summarise(found, "late").slopes["pr_difference_slope"].slope == pytest.approx(-1)
    assert summarise(found).slopes["pr_difference_slope"].slope == pytest.approx(0)


def test_correlations_are_pearson_s_and_spearman_s_over_revisions():
    rng = np.random.default_rng(3)
    k, rank, entropy = rng.normal(size=(3, 7))
    found = trajectory(range(1, 8), k=k, rank=rank, entropy=entropy)
    summary = summarise(found)
    assert summary.correlations["pr_k_with_effective_rank_qk"].r == pytest.approx(np.corrcoef(k, rank)[0, 1])
    assert summary.correlations["effective_rank_qk_with_entropy"].r == pytest.approx(np.corrcoef(rank, entropy)[0, 1])
    order = [np.argsort(np.argsort(values)) for values in (k, rank)]
    assert summary.rank_correlations["pr_k_with_effective_rank_qk"] == pytest.approx(np.corrcoef(*order)[0, 1])
    assert summary.holds("bridge_comovement") == all(c.r > 0 for c in summary.correlations.values())


def test_the_mean_over_layers_is_what_is_fitted():
    records = synthetic_series.records("tiny", "gpt2", [1, 2, 3], contrast=[1, 2, 3], layers=(-5, 5, 9))
    assert records[0].mean(CONTRAST) == pytest.approx(1 + 3)
    assert summarise(trajectories({"tiny": records})[0]).slopes["pr_difference_slope"].slope == pytest.approx(1)


def test_fewer_than_three_revisions_have_no_slope_and_do_not_count():
    two = summarise(trajectory([0, 5, 6]))
    assert two.revisions == 2 and np.isnan(two.slopes["pr_q_slope"].slope) and two.holds("pr_q_slope_positive") is None
    assert count([two], "gpt2").models == 0 and count([two], "all").holding["bridge_comovement"] is None


def test_a_constant_metric_is_no_co_movement():
    summary = summarise(trajectory([1, 2, 3], rank=[2, 2, 2]))
    assert summary.holds("bridge_comovement") is None and np.isnan(list(summary.rank_correlations.values())).all()
    assert count([summary], "all").holding["bridge_comovement"] == 0


def test_revisions_without_steps_have_slopes_over_their_index_alone():
    records = synthetic_series.records("tiny", "gpt2", [1, 2, 3], names=["alpha", "beta", "gamma"], contrast=[1, 2, 3])
    found = trajectories({"tiny": records})[0]
    assert summarise(found).slopes["pr_difference_slope"].slope == pytest.approx(1)
    assert np.isnan(summarise(found, fit="per_decade").slopes["pr_difference_slope"].slope)


def test_unknown_windows_and_fits_are_refused():
    with pytest.raises(ValueError, match="window is 'middle'; allowed: trained, early"):
        summarise(trajectory([1]), "middle")
    with pytest.raises(ValueError, match="fit is 'cubic'; allowed: per_revision"):
        summarise(trajectory([1]), fit="cubic")


def test_table_6_counts_each_family_and_sets_the_paper_beside_it():
    series = synthetic_series.paper_like()
    table = series_tables.table_6(trajectories(series), series)
    rows = {row[0]: dict(zip([column.name for column in table.columns], row)) for row in table.rows}
    assert list(rows) == ["Pythia", "SmolLM2", "GPT-2", "own llama", "All fitted series"]
    for family, label in series_tables.FAMILY_LABELS.items():
        for name, value in paper.TABLE_6[family].items():
            assert rows[label][f"paper_{name}"] == value
            assert rows[label][name] == value, (
                f"the synthetic series are made to give the paper's counts: {family} {name}"
            )
    assert rows["own llama"]["models"] == 1 and rows["own llama"]["paper_models"] is None
    assert rows["All fitted series"]["models"] == 7
    assert rows["All fitted series"]["bridge_comovement"] == 4 + rows["own llama"]["bridge_comovement"]


def test_every_flag_and_failure_is_named_under_the_table():
    series = synthetic_series.paper_like(flagged=[4], failed=["step999"])
    text = to_markdown(series_tables.table_6(trajectories(series), series))
    assert (
        "pythia-70m, flagged, and left out of slopes and correlations unless kept: step4 (holds the weights of" in text
    )
    assert "pythia-70m, failed (see series.csv): step999" in text
    assert "With the flagged revisions in" not in text  # the counts would be the same


def test_counts_that_hang_on_flagged_revisions_are_told():
    values = {
        "contrast": [1, 2, 3, -90],
        "q": [1, 2, 3, 4],
        "k": [3, 2, 1, 0],
        "rank": [3, 2, 1, 0],
        "entropy": [3, 2, 1, 0],
    }
    series = {"tiny": synthetic_series.records("tiny", "gpt2", [1, 2, 3, 4], flagged=[4], **values)}
    table = series_tables.table_6(trajectories(series), series)
    assert table.rows[-1][3] == 1
    assert any(
        note.startswith("With the flagged revisions in, of 1 series: ΔPR slope > 0 0, PR_Q") for note in table.notes
    )


def test_tables_of_nothing_are_empty_but_for_the_paper():
    table = series_tables.table_6([], {})
    assert [row[1] for row in table.rows] == [0, 0, 0, 0] and table.rows[0][3] is None and table.rows[0][4] == 1
    assert series_tables.series_table([]).rows == []
    assert all(row[4] == 0 for row in series_tables.table_6_variants([]).rows)


def test_the_variants_hold_every_window_and_slope():
    series = synthetic_series.paper_like()
    table = series_tables.table_6_variants(trajectories(series))
    own = [row for row in table.rows if row[0] == "Pythia"]
    assert len(own) == 7 and len({row[1:4] for row in own}) == 7
    assert {row[1] for row in own} == {
        "all trained",
        "first half",
        "second half",
        "with the untrained one",
        "with the flagged ones",
    }
