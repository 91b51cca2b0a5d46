"""figures.py: what is drawn is what was measured, legible, the same bytes each time, and never a traceback."""

import time

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from synthetic_study import read_study, write_study

from qkgeom_jax import analysis, figures


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    out = write_study(tmp_path_factory.mktemp("study"), depths=(2, 3), seeds=(7, 37, 42), epochs=4)
    runs, metrics = read_study(out)
    return analysis.finished_groups(metrics, runs)


def drawn(groups):
    table = analysis.cells(groups)
    lines = analysis.figure_3_regressions(table)
    return figures.figure_1(groups), figures.figure_2(groups), figures.figure_3(table, lines)


def shown(figure):
    FigureCanvasAgg(figure).draw()
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def line_of(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def band_heights(collection, x):
    """Lower and upper edge at each x of a filled band."""
    points = collection.get_paths()[0].vertices
    at = [points[np.isclose(points[:, 0], place), 1] for place in x]
    return np.array([[heights.min(), heights.max()] for heights in at]).T


def test_figure_1_shows_means_over_runs_with_their_standard_error(groups):
    figure = figures.figure_1(groups)
    top = figure.axes[0]
    own = [group for group in groups if group.init == "disjoint_support"]
    runs = np.concatenate([group.values["column_alignment"].mean(axis=1) for group in own])  # [depths x seeds, epochs]
    line = line_of(top, "Disjoint support")
    np.testing.assert_array_equal(line.get_xdata(), np.arange(5))
    np.testing.assert_allclose(line.get_ydata(), runs.mean(axis=0), rtol=1e-12)
    error = np.std(runs, axis=0, ddof=1) / np.sqrt(6)
    low, high = band_heights(top.collections[1], np.arange(5))
    np.testing.assert_allclose([low, high], [runs.mean(axis=0) - error, runs.mean(axis=0) + error], rtol=1e-9)

    deep = {group.init: group for group in groups if group.depth == 3}
    for axes, column in zip(figure.axes[1:], ("attention_entropy", "top_1_mass", "participation_ratio_difference")):
        profiles = [line for line in axes.lines if len(line.get_xdata()) == 3]
        for line, group in zip(profiles, deep.values(), strict=True):
            np.testing.assert_allclose(line.get_ydata(), group.values[column][:, :, -1].mean(axis=0), rtol=1e-12)
        assert axes.get_xlabel() == "Layer (depth 3)" and axes.get_ylabel()


def test_figure_2_shows_every_trajectory_and_the_mean_over_layers(groups):
    figure = figures.figure_2(groups)
    assert len(figure.axes) == 6
    for axes, (init, depth) in zip(figure.axes, [(init, depth) for init in figures.LOOKS for depth in (2, 3)]):
        (group,) = [group for group in groups if (group.init, group.depth) == (init, depth)]
        contrast = group.values["participation_ratio_q"] - group.values["participation_ratio_k"]
        curves = [line.get_ydata() for line in axes.lines if len(line.get_xdata()) == 5]
        np.testing.assert_allclose(curves, [*contrast.mean(axis=0), contrast.mean(axis=(0, 1))], rtol=1e-12)
        seeds = contrast.mean(axis=1)
        mean, error = seeds.mean(axis=0), np.std(seeds, axis=0, ddof=1) / np.sqrt(3)
        heights = band_heights(axes.collections[0], np.arange(5))
        np.testing.assert_allclose(heights, [mean - error, mean + error], rtol=1e-9, atol=1e-12)
        (zero,) = [line for line in axes.lines if len(line.get_xdata()) == 2]
        assert set(zero.get_ydata()) == {0}


def test_figure_3_shows_points_the_line_and_its_statistics(groups):
    table = analysis.cells(groups)
    lines = analysis.figure_3_regressions(table)
    figure = figures.figure_3(table, lines)
    for axes, (name, (x, y)) in zip(figure.axes, analysis.REGRESSIONS.items()):
        hollow = line_of(axes, "QK identical (not in the fit)")
        assert hollow.get_markerfacecolor() == "none"
        own = table["init"] == "qk_identical"
        np.testing.assert_array_equal([hollow.get_xdata(), hollow.get_ydata()], [table[x][own], table[y][own]])
        assert line_of(axes, "Independent").get_markerfacecolor() != "none"
        (fit,) = [line for line in axes.lines if line.get_color() == "black"]
        inside = table[x][~own]
        np.testing.assert_allclose(fit.get_xdata(), [inside.min(), inside.max()])
        slope, intercept = np.polyfit(inside, table[y][~own], 1)
        np.testing.assert_allclose(fit.get_ydata(), intercept + slope * fit.get_xdata(), rtol=1e-6)
        (text,) = [text.get_text() for text in axes.texts]
        assert f"r = {lines[name].r:.2f} [" in text and "n = 10" in text
        room = axes.transAxes.inverted()
        heights = room.transform(axes.transData.transform(np.column_stack([table[x], table[y]])))[:, 1]
        assert heights.max() < 0.86  # the text stands above


def test_text_is_legible_and_inside(groups):
    for figure in drawn(groups):
        texts = shown(figure)
        assert min(text.get_fontsize() for text in texts) >= 7
        width, height = figure.canvas.get_width_height()
        for text in texts:
            if text.get_text() in {label.get_text() for axes in figure.axes for label in axes.get_xticklabels()}:
                continue  # ticks outside the view are not drawn, but say that they are
            if text.get_text() in {label.get_text() for axes in figure.axes for label in axes.get_yticklabels()}:
                continue
            box = text.get_window_extent()
            assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, text.get_text()
        assert all(axes.get_ylabel() or figure.axes.index(axes) % 2 for axes in figure.axes)


def test_initialisations_differ_by_more_than_colour():
    for property_ in ("color", "marker", "linestyle"):
        assert len({look[property_] for look in figures.LOOKS.values()}) == 3


@pytest.mark.parametrize(
    "number", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_bytes_depend_on_the_data_alone(groups, tmp_path, monkeypatch, number):
    before = dict(matplotlib.rcParams)
    figures.save(drawn(groups)[number - 1], tmp_path / "first")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 4e8)
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "savefig.dpi": 30, "pdf.fonttype": 3}):
        figures.save(drawn(groups)[number - 1], tmp_path / "again")
    assert dict(matplotlib.rcParams) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.pdf", "again.png", "first.pdf", "first.png"]
    png, pdf = (tmp_path / "first.png").read_bytes(), (tmp_path / "first.pdf").read_bytes()
    assert png == (tmp_path / "again.png").read_bytes()
    assert pdf == (tmp_path / "again.pdf").read_bytes()
    assert png.startswith(b"\x89PNG") and pdf.startswith(b"%PDF")
    assert b"CreationDate" not in pdf and b"Matplotlib" not in png + pdf


def test_an_empty_study_says_so():
    for figure in drawn([]):
        assert any(text.get_text().startswith("No finished") for text in shown(figure))


def test_too_little_for_a_band_or_a_line_says_so(tmp_path):
    out = write_study(tmp_path, depths=(1,), seeds=(7,), epochs=2)
    runs, metrics = read_study(out)
    first, second, third = drawn(analysis.finished_groups(metrics, runs))
    for figure in (first, second):
        assert "A band needs two seeds" in figure.get_supxlabel()
    assert [axes.texts[0].get_text() for axes in third.axes] == ["No line: 2 cells with slopes, a fit needs 3."] * 2
    for figure in (first, second, third):
        shown(figure)


def test_a_missing_group_leaves_its_panel_marked(groups):
    some = [group for group in groups if (group.init, group.depth) != ("independent", 2)]
    texts = [text.get_text() for text in shown(figures.figure_2(some))]
    assert texts.count("not finished") == 1


@pytest.mark.parametrize(
    ("p", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1e-3, "0.001"), (9.96e-4, "1.0 × 10$^{-3}$"), (3e-310, "3.0 × 10$^{-310}$")],
)
def test_probabilities_in_print(p, text):
    assert figures._in_figures(p) == text
