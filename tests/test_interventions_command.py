"""The interventions command from end to end, on a model of a few thousand parameters."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tiny

from qkgeom_jax import results
from qkgeom_jax.cli import grid, interventions
from qkgeom_jax.results import select

OWN = """
import jax.numpy as jnp
from qkgeom_jax.interventions import change_spectrum, every, on, project

def flatten(s):
    return jnp.broadcast_to(s.mean(-1, keepdims=True), s.shape)

def flat_spectrum(config):
    kernels = on(("attention/query", "attention/key"), layout="bio", heads=config.model.heads)
    return project(lambda w: change_spectrum(w, flatten), kernels, when=every(2), name="flat_spectrum")

def blind(config):
    return project(lambda w: w, on("attention/kee", layout="bio"), when=every(2), name="blind")
"""
NONE, OTHER, DECOUPLE, FLAT = (
    f"depth1-{name}" for name in ("independent-none", "qk_identical-none", "qk_identical-qk_decouple", "independent-flat_spectrum")
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arms")
    (folder / "letters.txt").write_text(tiny.text())
    (folder / "own.py").write_text(OWN)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    return folder


def arguments(place, names, *more, **changes):
    sizes = {"start_epoch": 1, "contraction_rank": 8, "period": 2} | changes
    given = ["--depths=1", "--seeds=3,5", f"--corpus={place / 'letters.txt'}", f"--interventions={names}"]
    return [*given, *tiny.flags(**sizes), *more, f"--out={place / 'out'}"]


@pytest.fixture(scope="module")
def finished(place):
    """Decouple, with the baseline of its own start, and an arm of the user's own; the baseline unasked."""
    assert interventions(arguments(place, f"qk_decouple,{place / 'own.py'}:flat_spectrum")) == 0
    return place / "out"


def test_the_command_writes_table_5_and_figure_4(finished):
    names = {str(path.relative_to(finished)) for path in finished.rglob("*") if "checkpoints" not in path.parts}
    expected = {"config.json", "manifest.json", "runs.csv", "losses.csv", "metrics.csv", "report.md"}
    expected |= {f"tables/{n}.{kind}" for n in ("table5", "table5_deltas", "table5_doses") for kind in ("csv", "md")}
    expected |= {f"figures/{n}.{kind}" for n in ("figure4", "figure4_details", "figure_dose") for kind in ("png", "pdf")}
    assert expected | {"tables/deltas.csv"} <= names
    assert {path.name for path in (finished / "groups").iterdir()} == {NONE, OTHER, DECOUPLE, FLAT}


def parameters(out, group, epoch):
    return np.load(out / "groups" / group / "params" / f"epoch_{epoch:03d}.npz")


def test_arms_start_from_their_baselines_weights_bitwise(finished):
    for arm, baseline in ((FLAT, NONE), (DECOUPLE, OTHER)):
        first, same = parameters(finished, arm, 0), parameters(finished, baseline, 0)
        assert all(np.array_equal(first[name], same[name]) for name in same.files)
        last, other = parameters(finished, arm, 2), parameters(finished, baseline, 2)
        assert not np.array_equal(last["blocks/attention/key"], other["blocks/attention/key"])


def test_before_an_arm_acts_it_equals_its_baseline_bitwise(finished):
    metrics = results.read_csv(finished / "metrics.csv", results.METRIC_TABLE_COLUMNS)

    def rows(arm, epoch):
        own = (metrics["intervention"] == arm) & (metrics["init"] == "qk_identical") & (metrics["epoch"] == epoch)
        return np.array([metrics[name][own] for name in results.METRIC_COLUMNS])

    np.testing.assert_array_equal(rows("qk_decouple", 1), rows("none", 1))
    assert not np.array_equal(rows("qk_decouple", 2), rows("none", 2))


def test_the_users_arm_did_what_it_says(finished):
    key = parameters(finished, FLAT, 2)["blocks/attention/key"]  # [S, L, D, D]
    spectra = np.linalg.svd(key.reshape(2, 1, 16, 2, 8).swapaxes(2, 3), compute_uv=False)
    assert (np.ptp(spectra, axis=-1) < 1e-4).all()
    runs = results.read_csv(finished / "runs.csv", results.RUN_COLUMNS)
    assert set(runs["intervention"]) == {"none", "qk_decouple", "flat_spectrum"} and set(runs["status"]) == {"done"}


def test_again_does_nothing_and_more_arms_join(finished, place, capfd):
    before = (finished / "groups" / NONE / "metrics.csv").stat().st_mtime_ns
    names = f"none,qk_decouple,{place / 'own.py'}:flat_spectrum"
    assert interventions(arguments(place, names)) == 0
    assert capfd.readouterr().err.count("done already") == 4
    assert interventions(arguments(place, "freeze_k", "--clamp-strengths=0.5,1")) == 0
    folders = {path.name for path in (finished / "groups").iterdir()}
    # 1 is the plain clamp's own strength, which was not asked for.
    assert folders == {NONE, OTHER, DECOUPLE, FLAT, "depth1-independent-freeze_k", "depth1-independent-k_spectrum_clamp@0.5"}
    assert (finished / "groups" / NONE / "metrics.csv").stat().st_mtime_ns == before
    metrics = results.read_csv(finished / "metrics.csv", results.METRIC_TABLE_COLUMNS)
    frozen = select(metrics, (metrics["intervention"] == "freeze_k") & (metrics["epoch"] > 0))
    for seed in (3, 5):  # from epoch 1 on, as the flag says
        assert np.unique(frozen["frobenius_norm_k"][frozen["seed"] == seed]).size == 1


def test_an_arm_that_never_acts_runs_with_a_warning_and_a_mark(place, capfd):
    out = place / "idle"
    given = arguments(place, "k_spectrum_clamp", period=100)[:-1]
    assert interventions([*given, f"--out={out}"]) == 0
    assert capfd.readouterr().err.count("never acts: it falls due after the last of 8 steps") == 1
    assert "K spectrum clamp †" in (out / "tables" / "table5.md").read_text()
    same = [parameters(out, f"depth1-independent-{arm}", 2) for arm in ("none", "k_spectrum_clamp")]
    assert all(np.array_equal(same[0][name], same[1][name]) for name in same[0].files)


def test_a_users_file_that_changed_is_refused(finished, place, capsys):
    own = place / "own.py"
    own.write_text(OWN.replace("every(2)", "every(3)"))
    try:
        with pytest.raises(SystemExit) as stopped:
            interventions(arguments(place, f"none,{own}:flat_spectrum"))
    finally:
        own.write_text(OWN)
    assert stopped.value.code == 2
    assert "holds results of another content of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        ("freez_q", (), "did you mean freeze_q?"),
        ("none,,freeze_q", (), "has an empty entry"),
        ("freeze_q,freeze_q", (), "names a value twice"),
        ("freeze_q@0.5", (), "k_spectrum_clamp@DOSE"),
        ("k_spectrum_clamp@2", (), "clamp_strength is 2.0; allowed: a number from 0 to 1"),
        ("k_spectrum_clamp@0.50", (), "allowed: k_spectrum_clamp@0.5"),
        ("k_spectrum_clamp", ("--clamp-strengths=0.5,nan",), "is not a finite number"),
        ("forced_k_contraction", ("--contraction-factors=-1",), "a finite number of at least 0"),
        ("missing.py:arm", (), "there is no file missing.py"),
        ("{own}:blind", (), "attention/kee"),
        ("{own}:nothing", (), "has no function nothing"),
        ("{own}:flat_spectrum,{own}2.py:flat_spectrum", (), "two interventions would share the folder"),
    ],
)
def test_bad_arms_are_refused_in_one_sentence_before_anything_is_written(place, names, more, message, capsys):
    own = place / "own.py"
    Path(f"{own}2.py").write_text(OWN)
    out = place / "refused"
    given = arguments(place, names.format(own=own), *more)[:-1]
    with pytest.raises(SystemExit) as stopped:
        interventions([*given, f"--out={out}"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and "Traceback" not in error
    assert len(error.strip().splitlines()) == 1 and not out.exists()


def test_a_rank_at_that_of_the_matrix_is_refused(place, capsys):
    with pytest.raises(SystemExit) as stopped:
        interventions(arguments(place, "forced_k_contraction", contraction_rank=16))
    assert stopped.value.code == 2 and "contraction_rank is 16" in capsys.readouterr().err


def test_the_grid_has_no_flags_of_arms(capsys):
    with pytest.raises(SystemExit):
        grid(["--help"])
    assert "--period" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        grid(["--period=5"])
    assert stopped.value.code == 2


def test_status_and_plan_know_the_arms(finished, place, capsys):
    assert interventions(["--status", f"--out={finished}"]) == 0
    assert DECOUPLE in capsys.readouterr().out
    assert interventions(arguments(place, "none,freeze_q", "--plan")) == 0
    assert "depth1-independent-freeze_q" in capsys.readouterr().out


def test_a_folder_from_before_a_field_existed_goes_on(finished, place):
    path = finished / "config.json"
    stored = json.loads(path.read_text())
    del stored["manipulation"]["align_sign"]
    results.write_json(path, stored)
    assert interventions(arguments(place, "none")) == 0
    assert json.loads(path.read_text())["manipulation"]["align_sign"] == 1
