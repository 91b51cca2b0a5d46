"""results.py: writers that leave the old file or the new one, a strict reader, and tables rebuilt from groups."""

import errno
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import zipfile

import numpy as np
import pytest
from synthetic_study import write_study

from qkgeom_jax import config, results


def temporary_files(folder):
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_metric_columns_are_those_of_the_design():
    pairs = "participation_ratio participation_ratio_{}_joint participation_ratio_{}_uncentred"
    pairs += " participation_ratio_{}_weight effective_rank covariance_trace covariance_max covariance_min"
    pairs += " covariance_condition activation_norm frobenius_norm spectral_norm"
    single = "attention_entropy top_1_mass top_5_mass attention_gap cosine_similarity column_alignment"
    single += " column_alignment_signed effective_rank_qk effective_rank_qk_weight logit_mean logit_std logit_variance"
    single += " logit_max activation_norm_residual"
    expected = single.split()
    for name in pairs.split():
        expected += [(name if "{}" in name else name + "_{}").format(side) for side in "qk"]
    assert sorted(results.METRIC_COLUMNS) == sorted(expected)
    assert len(set(results.METRIC_COLUMNS)) == 38


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch, fails):
    path = tmp_path / "table.csv"
    results.write_text(path, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        results.write_text(path, "new")
    assert path.read_text() == "old"
    assert temporary_files(tmp_path) == []


def test_a_disk_that_fills_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "table.csv"
    results.write_text(path, "old")
    program = (
        "import resource, signal, sys; from qkgeom_jax import results\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: results.write_bytes(sys.argv[1], bytes(1_000_000))\n"
        "except OSError as error: print('refused', error.errno)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.split() == ["refused", str(errno.EFBIG)], done.stderr
    assert path.read_text() == "old"
    assert temporary_files(tmp_path) == []


def test_what_a_killed_process_left_is_used_up(tmp_path):
    (tmp_path / ".table.csv.tmp").write_text("half a line of a longer file" * 10)
    results.write_text(tmp_path / "table.csv", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    assert (tmp_path / "table.csv").read_text() == "whole"


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    path = tmp_path / "table.csv"
    contents = [bytes([65 + i]) * (1000 * (i + 1)) for i in range(6)]
    failed = []

    def write(content):
        try:
            for _ in range(10):
                results.write_bytes(path, content)
                assert path.read_bytes() in contents
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failed == []
    assert path.read_bytes() in contents
    assert temporary_files(tmp_path) == []


def test_json_refuses_nan_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "manifest.json"
    results.write_json(path, {"b": 1, "a": "ä"})
    assert path.read_text(encoding="utf-8") == '{\n  "b": 1,\n  "a": "ä"\n}\n'
    with pytest.raises(ValueError, match="manifest.json"):
        results.write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"b": 1, "a": "ä"}


def test_csv_keeps_every_float32_and_leaves_undefined_cells_empty(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, size=2000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    path = tmp_path / "t.csv"
    results.write_csv(path, ("seed", "x"), [(i, value) for i, value in enumerate(values)])
    back = results.read_csv(path, ("x",))["x"]
    assert back.dtype == np.float64
    np.testing.assert_array_equal(back.astype(np.float32), values)

    rows = [(np.int64(3), "a,b", np.nan), (4, 'say "x"', None), (5, "", np.inf)]
    results.write_csv(path, ("seed", "init", "x"), rows)
    assert path.read_text() == 'seed,init,x\n3,"a,b",\n4,"say ""x""",\n5,,inf\n'
    table = results.read_csv(path, ("x", "seed", "init"))
    assert list(table) == ["x", "seed", "init"]
    np.testing.assert_array_equal(table["x"], [np.nan, np.nan, np.inf])
    assert table["seed"].dtype == np.int64 and table["seed"].tolist() == [3, 4, 5]
    assert table["init"].tolist() == ["a,b", 'say "x"', ""]
    with pytest.raises(ValueError, match="2 cells, the table 1 columns"):
        results.write_csv(path, ("x",), [(1, 2)])


def test_a_table_without_rows_keeps_its_types(tmp_path):
    results.write_csv(tmp_path / "t.csv", ("seed", "init", "x"), [])
    table = results.read_csv(tmp_path / "t.csv", ("seed", "init", "x"))
    assert [table[c].shape for c in table] == [(0,)] * 3
    assert table["seed"].dtype == np.int64 and table["init"].dtype.kind == "U" and table["x"].dtype == np.float64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column seed"),
        ("seed,x\n1,\"2", "no table in UTF-8"),
        ("seed,x\n1,\udcff\n", "no table in UTF-8"),
        ("seed,y\n1,2\n", "has no column x"),
        ("seed,x,x\n1,2,3\n", "column x twice"),
        ("seed,x\n1,2\n3\n", "line 3: 1 cells, expected 2"),
        ("seed,x\n1,2\n3,4,5\n", "line 3: 3 cells, expected 2"),
        ("seed,x\n1,0.5.1\n", "line 2: x is '0.5.1', expected a number"),
        ("seed,x\n,1\n", "line 2: seed is '', expected a whole number"),
        ("seed,x\n1.0,1\n", "line 2: seed is '1.0', expected a whole number"),
    ],
)
def test_a_damaged_table_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "metrics.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        results.read_csv(path, ("seed", "x"))
    assert "metrics.csv" in str(caught.value)


def test_npz_bytes_do_not_hang_on_the_clock_or_the_order(tmp_path, monkeypatch):
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([1, 2])}
    results.write_npz(tmp_path / "1.npz", arrays)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 4e8)
    results.write_npz(tmp_path / "2.npz", dict(reversed(arrays.items())))
    assert (tmp_path / "1.npz").read_bytes() == (tmp_path / "2.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "1.npz") as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    with np.load(tmp_path / "1.npz") as back:
        np.testing.assert_array_equal(back["b"], arrays["b"])
    with pytest.raises(ValueError, match="allow_pickle"):
        results.write_npz(tmp_path / "1.npz", {"a": np.array([None])})


def test_collect_sorts_and_takes_cells_over_as_text(tmp_path):
    write_study(tmp_path, depths=(2, 10), inits=("independent", "disjoint_support"), seeds=(42, 7), epochs=2)
    folder = tmp_path / "groups" / "depth2-independent-none"
    lines = (folder / "metrics.csv").read_text().splitlines()
    cells = lines[1].split(",")
    cells[4] = "0.10000"  # no rewriting of what the group has
    (folder / "metrics.csv").write_text("\n".join([lines[0], *lines[:1:-1], ",".join(cells)]) + "\n")
    groups = results.collect(tmp_path)
    assert [group.key for group in groups] == [
        (2, "disjoint_support", "none"), (2, "independent", "none"),
        (10, "disjoint_support", "none"), (10, "independent", "none"),
    ]  # fmt: skip

    metrics = (tmp_path / "metrics.csv").read_text().splitlines()
    assert metrics[0] == "depth,init,intervention,seed,epoch,step,layer," + ",".join(results.METRIC_COLUMNS)
    front = [tuple(line.split(",")[:7]) for line in metrics[1:]]
    order = [(int(d), i, v, int(s), int(e), int(layer)) for d, i, v, s, e, _, layer in front]
    assert order == sorted(order)
    assert len(order) == 2 * 2 * 3 * (2 + 10)
    assert cells[:4] == ["42", "0", "0", "0"]  # seed, epoch, step, layer of the row changed above
    (line,) = [line for line in metrics if line.startswith("2,independent,none,42,0,0,0,")]
    assert line.split(",")[7] == "0.10000"
    losses = (tmp_path / "losses.csv").read_text().splitlines()
    assert losses[0] == "depth,init,intervention,seed,epoch,step,train_loss,val_loss"
    assert losses[1] == "2,disjoint_support,none,7,0,0,5.437,5.487"  # 1.5 + 7/1000 - 2/100 + 2 x 2


def test_runs_hold_final_values_and_leave_those_of_diverged_seeds_empty(tmp_path):
    def curves(depth, init, layer, seed, epochs):
        return {"column_alignment": epochs + layer + seed / 8}

    write_study(
        tmp_path, depths=(3,), inits=("independent",), seeds=(8, 16), epochs=2, curves=curves,
        val_loss=lambda depth, init, seed: seed / 4, diverged={"depth3-independent-none": {16: 412}},
    )  # fmt: skip
    results.collect(tmp_path)
    assert (tmp_path / "runs.csv").read_text() == (
        "depth,init,intervention,seed,status,diverged_step,final_train_loss,final_val_loss,final_alignment\n"
        "3,independent,none,8,done,,1.95,2,4\n"
        "3,independent,none,16,diverged,412,,,\n"
    )


def test_collect_bears_groups_that_have_hardly_begun(tmp_path):
    write_study(
        tmp_path, depths=(2,), inits=("independent", "disjoint_support"), seeds=(7,), epochs=1,
        statuses={"depth2-independent-none": "failed"},
    )  # fmt: skip
    (tmp_path / "groups" / "depth9-independent-none").mkdir()
    begun = tmp_path / "groups" / "depth2-disjoint_support-none"
    for name in ("losses.csv", "metrics.csv", "status.json"):
        (begun / name).unlink()
    groups = results.collect(tmp_path)
    assert [(group.status, group.epochs_done) for group in groups] == [("partial", 0), ("failed", 1)]
    runs = results.read_csv(tmp_path / "runs.csv", results.RUN_COLUMNS)
    assert runs["status"].tolist() == ["partial", "failed"]
    np.testing.assert_array_equal(np.isnan(runs["final_val_loss"]), [True, False])
    first = {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")}
    results.collect(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")} == first
    assert len(first) == 3


def test_collect_of_nothing_gives_tables_without_rows(tmp_path):
    assert results.collect(tmp_path) == []
    assert results.read_csv(tmp_path / "metrics.csv", results.METRIC_TABLE_COLUMNS)["depth"].shape == (0,)


def test_collect_refuses_what_would_mislead(tmp_path):
    damages = itertools.count()

    def damaged(name, change):
        out = tmp_path / str(next(damages))
        write_study(out, depths=(2,), inits=("independent",), seeds=(7,), epochs=1)
        path = out / "groups" / "depth2-independent-none" / name
        path.write_text(change(path.read_text()))
        return out

    for name, change, message in (
        ("losses.csv", lambda text: text + text.splitlines()[-1] + "\n", "losses.csv, line 4: a second row for seed"),
        ("metrics.csv", lambda text: text.replace("attention_gap", "gap"), "has no column attention_gap"),
        ("metrics.csv", lambda text: text[:-9], "cells, expected"),
        ("status.json", lambda text: text[:-9], "status.json is no JSON file"),
        ("status.json", lambda text: text.replace("done", "gone", 1), "status is 'gone'; allowed: done, partial"),
        ("status.json", lambda text: text.replace('"diverged"', '"other"'), "lacks a part"),
        ("config.json", lambda text: text.replace('"model"', '"other"'), "lacks a part"),
    ):
        out = damaged(name, change)
        with pytest.raises(ValueError, match=message):
            results.collect(out)
        assert not (out / "runs.csv").exists()

    out = damaged("losses.csv", lambda text: text)
    again = out / "groups" / "copy"
    results.write_json(again / "config.json", config.override(config.Config(), depth=2, seeds=(7,)).to_dict())
    with pytest.raises(ValueError, match="hold the same group"):
        results.collect(out)
