"""Figure 5: what is drawn, what is marked, and that it never fails."""

import numpy as np
import pytest
import synthetic_series

from qkgeom_jax import figures
from qkgeom_jax.series_analysis import summarise, trajectories
from qkgeom_jax.series_figures import figure_5
from qkgeom_jax.series_results import CONTRAST


def panels(figure):
    return figure.axes if len(figure.axes) == 3 else pytest.fail(f"{len(figure.axes)} panels")


def texts(figure):
    found = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    return " | ".join(text for text in found if text)


def test_slopes_and_correlations_are_where_the_tables_have_them():
    found = trajectories(synthetic_series.paper_like())
    slopes, correlations, _ = panels(figure_5(found))
    for row, trajectory in enumerate(found):
        drawn = [
            line.get_xdata()[0] for line in slopes.lines if line.get_marker() == "o" and line.get_ydata()[0] == row
        ]
        assert drawn == [summarise(trajectory).slopes["pr_difference_slope"].slope]
        early = [
            line.get_xdata()[0]
            for line in slopes.lines
            if line.get_marker() == "<" and line.get_ydata()[0] == row - 0.26
        ]
        assert early == [summarise(trajectory, "early").slopes["pr_difference_slope"].slope]
        r = summarise(trajectory).correlations["pr_k_with_effective_rank_qk"].r
        assert r in [line.get_xdata()[0] for line in correlations.lines if line.get_marker() == "o"]
    assert correlations.get_xlim() == (-1.05, 1.05)


def test_flagged_revisions_are_crossed_and_outside_every_line():
    series = synthetic_series.paper_like(flagged=[4])
    found = trajectories(series)
    figure = figure_5(found)
    trajectory = panels(figure)[2]
    crosses = [line for line in trajectory.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert len(crosses) == 1
    np.testing.assert_array_equal(crosses[0].get_xdata(), [4.0])
    np.testing.assert_array_equal(crosses[0].get_ydata(), found[0].values[CONTRAST][[3]])
    colour = next(line.get_color() for line in trajectory.lines)
    joined = [x for line in trajectory.lines[:2] for x in line.get_xdata() if line.get_color() == colour]
    assert sorted(set(joined)) == [0, 1, 2, 8, 16]
    assert "1 flagged" in texts(figure) and "flagged: in no slope or correlation" in texts(figure)


def test_steps_are_on_a_logarithmic_axis_that_has_room_for_the_untrained():
    with_untrained = panels(figure_5(trajectories(synthetic_series.paper_like())))[2]
    assert with_untrained.get_xscale() == "symlog" and with_untrained.get_xlim()[0] < 0
    without = trajectories({"tiny": synthetic_series.records("tiny", "gpt2", [10, 100, 1000], contrast=[1, 2, 3])})
    assert panels(figure_5(without))[2].get_xscale() == "log"


def test_series_of_a_family_share_a_colour_and_differ_in_marker():
    figure = figure_5(trajectories(synthetic_series.paper_like()))
    looks = {line.get_label(): (line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()}
    assert len(looks) == 7 == len(set(looks.values()))
    assert len({looks[f"pythia-{size}"][0] for size in ("70m", "160m", "410m")}) == 1
    assert len({colour for colour, _ in looks.values()}) == 4


@pytest.mark.parametrize(
    "steps, names",
    [
        ([], None),
        ([0], None),
        ([5], None),
        ([1, 2], None),
        ([1, 1, 1], None),
        ([1, 2, 3], ["a", "b", "c"]),
        (range(1, 150), None),
    ],
)
def test_any_series_can_be_drawn_and_saved(tmp_path, steps, names):
    values = {"contrast": np.random.default_rng(0).normal(size=len(steps))}
    found = trajectories({"tiny": synthetic_series.records("tiny", "own llama", steps, names=names, **values)})
    figure = figure_5(found)
    figures.save(figure, tmp_path / "figure5")
    assert (tmp_path / "figure5.png").stat().st_size > 5000
    said = texts(figure)
    if not steps:
        assert "No revision has been measured." in said
    elif len(steps) < 3 or steps == [0]:
        assert "fewer than 3 revisions" in said
    if names:
        assert "No revision has a step in its name." in said


def test_equal_records_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        figures.save(figure_5(trajectories(synthetic_series.paper_like(flagged=[4]))), tmp_path / name)
    for kind in ("png", "pdf"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
