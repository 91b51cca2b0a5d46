"""The catalogue, and which revisions a command asks for."""

import argparse

import pytest

from qkgeom_jax import paper
from qkgeom_jax.series import (
    CATALOGUE,
    PAPER_SERIES,
    Selection,
    choose,
    in_order,
    log_spaced,
    order_notes,
    own_series,
    parse_selection,
    step_of,
)  # fmt: skip


def test_the_default_series_are_as_many_of_each_family_as_in_the_paper():
    families = [CATALOGUE[name].family for name in PAPER_SERIES]
    assert {family: families.count(family) for family in families} == {
        family: paper.TABLE_6[family]["models"] for family in ("pythia", "smollm2", "gpt2")
    }
    assert len(families) == paper.TABLE_6["all"]["models"]


def test_the_catalogue_names_the_published_revisions():
    pythia, gpt2, smollm2 = (CATALOGUE[name] for name in ("pythia-70m", "gpt2-small", "smollm2-135m"))
    assert pythia.source == "EleutherAI/pythia-70m" and len(pythia.revisions) == 154
    assert (
        pythia.revisions[:5] == ("step0", "step1", "step2", "step4", "step8") and pythia.revisions[-1] == "step143000"
    )
    assert gpt2.source == "stanford-crfm/alias-gpt2-small-x21" and len(gpt2.revisions) == 609
    assert gpt2.revisions[0] == "checkpoint-0" and gpt2.revisions[-1] == "checkpoint-400000"
    assert smollm2.revisions == () and smollm2.pattern == "step-{}"  # the repository is asked
    for series in CATALOGUE.values():
        assert list(series.revisions) == in_order(series.revisions)
        assert all(step_of(name) == step for name, step in zip(series.revisions, series.steps))
    # 300 billion tokens in 143,000 steps, 250 billion in 160,000.
    assert 143_000 * pythia.tokens_per_step == pytest.approx(300e9, rel=0.01)
    assert 160_000 * CATALOGUE["smollm2-360m"].tokens_per_step == pytest.approx(250e9, rel=0.01)


@pytest.mark.parametrize(
    "name, step",
    [
        ("step1000", 1000), ("step-240000", 240000), ("checkpoint-10", 10), ("epoch_003", 3), ("000512", 512),
        ("step-001000-2BT", 1000), ("main", None), ("v1.2", None), ("step1-step2", None), ("iteration=7", 7),
    ],
)  # fmt: skip
def test_the_step_is_read_from_the_name(name, step):
    assert step_of(name) == step


@pytest.mark.parametrize(
    "text, chosen",
    [
        ("all", ["step0", "step8", "step64", "step1000"]),
        ("step64,main", ["step64", "main"]),
        ("64,8,7", ["step64", "step8", "7"]),
        ("8..64", ["step8", "step64"]),
        ("step0..step8", ["step0", "step8"]),
        ("log:2", ["step0", "step8", "step1000"]),
        ("log", ["step0", "step8", "step64", "step1000"]),
    ],
)
def test_a_selection_picks_from_what_there_is(text, chosen):
    available = ["step64", "step0", "step1000", "step8"]
    assert choose(parse_selection(text), available, "tiny") == chosen


@pytest.mark.parametrize("text", ["", "a,,b", "a,a", "log:", "log:1", "log:x", "log:-3", "9..8", "..", "a..b", "1.."])
def test_a_selection_that_means_nothing_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_selection(text)


def test_a_selection_that_finds_nothing_is_refused():
    with pytest.raises(ValueError, match="tiny has no revision with a step from 5 to 6"):
        choose(Selection(steps=(5, 6)), ["step1", "main"], "tiny")
    with pytest.raises(ValueError, match="no revision with a step in its name"):
        choose(Selection(count=4), ["main"], "tiny")


def test_log_spacing_keeps_the_ends_and_the_untrained_revision():
    for series in (CATALOGUE["pythia-70m"], CATALOGUE["gpt2-small"]):
        names = log_spaced(series.revisions, 12)
        trained = [step_of(name) for name in names[1:]]
        assert step_of(names[0]) == 0 and trained[0] == series.steps[1] and trained[-1] == series.steps[-1]
        assert 10 <= len(trained) <= 12 and trained == sorted(set(trained))
        ratios = [b / a for a, b in zip(trained, trained[1:])]
        assert max(ratios) < 5 and min(ratios) > 1.5


def test_order_is_by_step_with_nameless_ones_behind():
    assert in_order(["main", "step10", "step9", "dev"]) == ["step9", "step10", "main", "dev"]
    assert order_notes(["step1", "step2", "step10"]) == {} == order_notes(["main", "dev"])
    notes = order_notes(["step10", "step9", "main", "step-10", "step11"])
    assert notes == {
        "step9": "listed after step10",
        "main": "no step in its name",
        "step-10": "the same step as step10",
    }


def test_an_own_model_is_a_path_or_a_repository(tmp_path, monkeypatch):
    (tmp_path / "run" / "epochs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    local = own_series("run/epochs")
    assert local.local and local.source == str(tmp_path / "run" / "epochs") and local.name == "epochs"
    remote = own_series("someone/model-7b")
    assert not remote.local and remote.source == "someone/model-7b" and remote.name == "model-7b"
    for wrong in ("nothing", "/absent/folder", "a/b/c", "../x", "a b/c", ""):
        if wrong:
            with pytest.raises(ValueError, match="neither a folder nor a file here"):
                own_series(wrong)
