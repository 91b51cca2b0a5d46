"""The grid command from end to end, on a model of a few thousand parameters."""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tiny

from qkgeom_jax import results
from qkgeom_jax.cli import grid
from qkgeom_jax.lock import Lock

ROOT = Path(__file__).parents[1]
GROUPS = ["depth1-disjoint_support-none", "depth1-independent-none", "depth2-disjoint_support-none", "depth2-independent-none"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "letters.txt"
    path.write_text(tiny.text())
    os.environ["XDG_CACHE_HOME"] = str(path.parent / "cache")
    return path


def arguments(corpus, out, *more, depths="1,2", inits="disjoint_support,independent", **changes):
    given = [f"--depths={depths}", f"--inits={inits}", "--seeds=3,5", f"--corpus={corpus}", f"--out={out}"]
    return [*given, *tiny.flags(**changes), *more]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    assert grid(arguments(corpus, out)) == 0
    return out


def contents(out, suffixes=(".csv", ".npz", ".md")):
    return {p.relative_to(out): p.read_bytes() for p in sorted(out.rglob("*")) if p.suffix in suffixes}


def test_one_command_writes_every_promised_file(finished):
    names = {str(path.relative_to(finished)) for path in finished.rglob("*") if "checkpoints" not in path.parts}
    expected = {"config.json", "manifest.json", "runs.csv", "losses.csv", "metrics.csv", "report.md"}
    expected |= {f"tables/table{n}.{kind}" for n in (3, 4) for kind in ("csv", "md")}
    expected |= {f"figures/figure{n}.{kind}" for n in (1, 2, 3) for kind in ("png", "pdf")}
    for group in GROUPS:
        own = ("config.json", "manifest.json", "status.json", "losses.csv", "metrics.csv", "heads.npz")
        expected |= {f"groups/{group}/{name}" for name in own}
        expected |= {f"groups/{group}/params/epoch_{epoch:03d}.npz" for epoch in (0, 2)}
    assert expected <= names
    assert not [name for name in names if "tmp" in name or ".probe" in name]


def test_the_tables_hold_every_seed_epoch_and_layer(finished):
    metrics = results.read_csv(finished / "metrics.csv", results.METRIC_TABLE_COLUMNS)
    assert len(metrics["seed"]) == 2 * (1 + 2) * 2 * 3
    assert sorted(set(metrics["epoch"])) == [0, 1, 2] and set(metrics["step"]) == {0, 4, 8}
    assert all(np.isfinite(metrics[name]).all() for name in results.METRIC_COLUMNS)
    runs = results.read_csv(finished / "runs.csv", results.RUN_COLUMNS)
    assert set(runs["status"]) == {"done"} and len(runs["seed"]) == 8
    heads = np.load(finished / "groups" / GROUPS[-1] / "heads.npz")
    assert heads["participation_ratio_k"].shape == (2, 3, 2, 2)
    last = (metrics["depth"] == 2) & (metrics["init"] == "independent") & (metrics["epoch"] == 2) & (metrics["seed"] == 5)
    np.testing.assert_allclose(
        heads["participation_ratio_k"][1, 2].mean(-1), metrics["participation_ratio_k"][last], rtol=1e-6
    )


def test_initial_parameters_are_kept_and_differ_from_the_last(finished):
    first, last = (np.load(finished / "groups" / GROUPS[0] / "params" / f"epoch_{e:03d}.npz") for e in (0, 2))
    assert first["blocks/attention/query"].shape == (2, 1, 16, 16)
    assert set(first.files) == set(last.files) and all((first[name] != last[name]).any() for name in first.files)


def test_the_manifest_says_where_the_results_came_from(finished):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["versions"]["jax"] and manifest["device"]["platform"] and len(manifest["corpus"]["sha256"]) == 64
    assert set(manifest["groups"]) == set(GROUPS) and manifest["groups"][GROUPS[0]]["seconds"]["train"] > 0
    for name in ("metrics.csv", "report.md", "tables/table4.csv"):
        assert manifest["digests"][name] == hashlib.sha256((finished / name).read_bytes()).hexdigest()


def test_the_same_command_again_does_nothing_and_changes_nothing(finished, corpus, capfd):
    before = contents(finished)
    assert grid(arguments(corpus, finished)) == 0
    assert contents(finished) == before
    assert capfd.readouterr().err.count("done already") == 4


def test_a_subset_in_a_new_folder_gives_the_same_bytes(finished, corpus, tmp_path):
    assert grid(arguments(corpus, tmp_path / "o", depths="2", inits="independent", chunk=4)) == 0
    for name in ("losses.csv", "metrics.csv", "heads.npz"):
        place = Path("groups") / GROUPS[-1] / name
        assert (tmp_path / "o" / place).read_bytes() == (finished / place).read_bytes()
    assert "a regression" in (tmp_path / "o/report.md").read_text() or (tmp_path / "o/tables/table4.md").exists()


def test_status_plan_and_figures(finished, corpus, capsys, tmp_path):
    assert grid(arguments(corpus, finished, "--status")) == 0
    assert len(re.findall(r"done +2/2", capsys.readouterr().out)) == 4
    before = contents(finished)
    (finished / "tables/table4.csv").unlink()
    assert grid(arguments(corpus, finished, "--figures")) == 0
    assert contents(finished) == before
    digests = json.loads((finished / "manifest.json").read_text())["digests"]
    assert digests["tables/table4.csv"] == hashlib.sha256((finished / "tables/table4.csv").read_bytes()).hexdigest()
    assert grid(arguments(corpus, tmp_path / "new", "--plan")) == 0
    text = capsys.readouterr().out
    assert "8 runs in 4 groups of 8 steps" in text and "GiB" in text and not (tmp_path / "new").exists()


def test_the_plan_counts_the_parameters_that_there_are(finished):
    from qkgeom_jax import plan
    from qkgeom_jax.config import from_dict

    params = np.load(finished / "groups" / GROUPS[-1] / "params/epoch_000.npz")
    config = from_dict(json.loads((finished / "groups" / GROUPS[-1] / "config.json").read_text()))
    assert plan.parameter_count(config.model) == sum(params[name][0].size for name in params.files)


def test_groups_that_differ_in_initial_values_alone_share_a_program():
    import jax

    from qkgeom_jax.group import compile_training

    tokens = jax.ShapeDtypeStruct((100,), np.uint8)
    identical, disjoint, deeper = (
        compile_training(tiny.config(init=init, depth=depth), tokens)
        for init, depth in (("qk_identical", 1), ("disjoint_support", 1), ("disjoint_support", 2))
    )
    assert identical is disjoint and deeper is not disjoint


@pytest.mark.parametrize("mode", ["--status", "--figures"])
def test_status_and_figures_of_nothing_are_refused(corpus, tmp_path, capsys, mode):
    with pytest.raises(SystemExit) as stop:
        grid(arguments(corpus, tmp_path / "none", mode))
    assert stop.value.code == 2 and "holds no results" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_changed_meaning_is_refused_and_nothing_is_lost(finished, corpus, capsys):
    before = contents(finished, (".csv", ".json"))
    with pytest.raises(SystemExit) as stop:
        grid(arguments(corpus, finished, width=32, batch=3))
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "model.width was 16 and is now 32" in message and "training.batch was 2" in message
    assert contents(finished, (".csv", ".json")) == before


def test_another_text_under_the_same_flags_is_refused(finished, corpus, capsys, tmp_path):
    other = tmp_path / "letters.txt"
    other.write_text(corpus.read_text() + "e")
    with pytest.raises(SystemExit):
        grid(arguments(other, finished))
    assert "corpus_sha256 was" in capsys.readouterr().err


def test_more_epochs_extend_a_run_on_the_old_schedule(corpus, tmp_path):
    out = tmp_path / "o"
    one = {"depths": "1", "inits": "independent"}
    assert grid(arguments(corpus, out, **one)) == 0
    before = (out / "losses.csv").read_text().splitlines()
    assert grid(arguments(corpus, out, **one, epochs=3)) == 0
    after = (out / "losses.csv").read_text().splitlines()
    assert len(after) == len(before) + 2 and set(before) <= set(after)
    assert json.loads((out / "config.json").read_text())["optimizer"]["decay_steps"] == 8
    with pytest.raises(SystemExit):
        grid(arguments(corpus, out, **one, epochs=2))


def test_fresh_moves_the_old_results_aside(corpus, tmp_path):
    out = tmp_path / "o"
    (out / "groups").mkdir(parents=True)
    (out / "config.json").write_text("{}")
    one = {"depths": "1", "inits": "independent", "epochs": 1}
    assert grid(arguments(corpus, out, "--fresh", **one)) == 0
    assert (tmp_path / "o.old-1" / "config.json").read_text() == "{}" and (out / "report.md").exists()


def test_a_damaged_configuration_is_named(corpus, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SystemExit):
        grid(arguments(corpus, tmp_path))
    assert "config.json is damaged" in capsys.readouterr().err


def test_seeds_that_diverge_are_named_and_the_status_says_so(corpus, tmp_path, capfd):
    one = {"depths": "1", "inits": "independent"}
    assert grid(arguments(corpus, tmp_path / "o", **one, learning_rate=1e38, warmup_steps=0)) == 3
    runs = results.read_csv(tmp_path / "o/runs.csv", results.RUN_COLUMNS)
    assert set(runs["status"]) == {"diverged"} and (runs["diverged_step"] >= 1).all()
    assert "every seed diverged" in capfd.readouterr().err
    assert "diverged" in (tmp_path / "o/report.md").read_text()
    assert grid(arguments(corpus, tmp_path / "o", **one, learning_rate=1e38, warmup_steps=0)) == 3


def test_a_group_that_raises_leaves_its_traceback_and_the_others_go_on(corpus, tmp_path, monkeypatch):
    from qkgeom_jax import group

    train = group.train_group

    def fail_once(config, *rest):
        if config.model.init == "disjoint_support":
            raise RuntimeError("the disk of this test is on fire")
        return train(config, *rest)

    monkeypatch.setattr(group, "train_group", fail_once)
    assert grid(arguments(corpus, tmp_path / "o", depths="1")) == 1
    folder = tmp_path / "o/groups" / GROUPS[0]
    assert "on fire" in (folder / "error.txt").read_text()
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    assert grid(arguments(corpus, tmp_path / "o", depths="1")) == 0 and not (folder / "error.txt").exists()


def test_a_group_in_use_is_refused(finished, corpus, capsys, tmp_path):
    out = tmp_path / "o"
    (out / "groups" / GROUPS[1]).mkdir(parents=True)
    with Lock(out / "groups" / GROUPS[1] / "lock"), pytest.raises(SystemExit) as stop:
        grid(arguments(corpus, out, depths="1", inits="independent"))
    assert stop.value.code == 2 and f"process {os.getpid()}" in capsys.readouterr().err


def test_an_unwritable_place_is_refused(corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SystemExit) as stop:
        grid(arguments(corpus, tmp_path / "file" / "o"))
    assert stop.value.code == 2 and "cannot be written" in capsys.readouterr().err
