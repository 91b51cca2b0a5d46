"""The command's loop, around a stand-in for the reader: resume, failures, flags, exit statuses, and what is written."""

import json
import subprocess
import sys
from pathlib import Path

import fake_pretrained
import numpy as np
import pytest

from qkgeom_jax import results, series_study
from qkgeom_jax.cli_checkpoints import checkpoints
from qkgeom_jax.lock import Lock
from qkgeom_jax.series_results import METRICS_COLUMNS, SERIES_COLUMNS

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    fake_pretrained.install(monkeypatch)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Drawing takes most of a command's time."""

    def save(figure, path):
        for kind in ("png", "pdf"):
            results.write_bytes(path.with_name(f"{path.name}.{kind}"), str(figure).encode())

    monkeypatch.setattr("qkgeom_jax.figures.save", save)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text("to be or not to be that is the question " * 40)
    return path


def write_series(folder, values):
    """A folder with a subfolder for each revision."""
    for revision, value in values.items():
        (folder / revision).mkdir(parents=True, exist_ok=True)
        for name, data in fake_pretrained.files(value, broken=value == "cut").items():
            (folder / revision / name).write_bytes(data)
    return folder


@pytest.fixture
def series(tmp_path):
    return write_series(tmp_path / "run", {f"step{step}": step + 1 for step in (0, 1, 2, 4, 8)})


def command(series, out, text, *more, status=0):
    # Twice the same flag is refused, so that a test may override the defaults.
    given = {word.split("=")[0] for word in more}
    defaults = [f"--model={series}", f"--out={out}", f"--text={text}", "--tokens=64", "--context=16"]
    assert checkpoints([*(flag for flag in defaults if flag.split("=")[0] not in given), *more]) == status


def rows(out, name="series.csv"):
    columns = SERIES_COLUMNS if name == "series.csv" else METRICS_COLUMNS
    return [dict(cells) for _, cells in results._read_rows(out / name, columns)]


def contents(out):
    return {
        p.relative_to(out): p.read_bytes()
        for p in out.rglob("*")
        if p.suffix in (".csv", ".md", ".png", ".pdf", ".npz", ".npy")
    }


def refusal(capsys, *argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        checkpoints(list(argv))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    return said


def test_one_command_writes_every_promised_file(series, tmp_path, text):
    out = tmp_path / "out"
    command(series, out, text)
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert names == {
        "config.json", "manifest.json", "lock", "metrics.csv", "series.csv", "report.md", "tokens/run.npy",
        *(f"tables/{name}.{kind}" for name in ("table6", "table6_variants", "figure5") for kind in ("csv", "md")),
        "figures/figure5.png", "figures/figure5.pdf",
        *(f"revisions/run/step{step}.{kind}" for step in (0, 1, 2, 4, 8) for kind in ("json", "npz")),
    }  # fmt: skip
    assert [row["revision"] for row in rows(out)] == ["step0", "step1", "step2", "step4", "step8"]
    assert [row["in_fit"] for row in rows(out)] == ["0", "1", "1", "1", "1"]
    last = rows(out)[-1]
    assert last["family"] == "own gpt2" and last["step"] == "8" and last["tokens"] == "64" and last["loss"] == "9"
    assert last["participation_ratio_q"] == "9.5" and len(last["weights_sha256"]) == 64
    metrics = rows(out, "metrics.csv")
    assert [(row["revision"], row["layer"]) for row in metrics[-2:]] == [("step8", "0"), ("step8", "1")]
    assert metrics[-1]["participation_ratio_q"] == "10" and metrics[-1]["column_alignment"] == ""
    assert "own gpt2 | 1 |" in (out / "tables/table6.md").read_text()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["seconds"]["run"]["measure"] >= 0 and "figures/figure5.png" in manifest["digests"]
    assert any("below 4,096" in remark for remark in manifest["remarks"])


def test_the_windows_are_spread_over_the_text_and_the_same_for_all(series, tmp_path, text):
    out = tmp_path / "out"
    command(series, out, text)
    windows = np.load(out / "tokens/run.npy")
    ids = fake_pretrained.Words().encode(text.read_text(), add_special_tokens=False).ids
    starts = [0, 128, 256, 384]
    assert len(ids) == 400 and windows.shape == (4, 16)
    np.testing.assert_array_equal(windows, [ids[start : start + 16] for start in starts])


def test_a_rerun_measures_nothing_and_changes_no_byte(series, tmp_path, text, monkeypatch):
    out = tmp_path / "out"
    command(series, out, text)
    before = contents(out)
    monkeypatch.setattr(
        sys.modules["qkgeom_jax.pretrained"], "open_checkpoint", lambda path: pytest.fail("measured again")
    )
    command(series, out, text)
    assert contents(out) == before
    assert checkpoints(["--figures", f"--out={out}"]) == 0 and contents(out) == before


def test_revisions_that_come_later_are_added(series, tmp_path, text):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command(series, whole, text)
    for which in ("--revisions=step0,step1", "--revisions=2..4", "--revisions=all"):
        command(series, parts, text, which)
    assert (parts / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert (parts / "tables/table6.md").read_bytes() == (whole / "tables/table6.md").read_bytes()


def test_what_fails_is_recorded_and_the_rest_goes_on(series, tmp_path, text, capsys):
    out = tmp_path / "out"
    write_series(series, {"step2": "cut", "step4": "crash"})
    command(series, out, text, "--revisions=step0,step1,step2,step3,step4,step8", status=1)
    found = {row["revision"]: row for row in rows(out)}
    assert [name for name, row in found.items() if row["status"] == "done"] == ["step0", "step1", "step8"]
    assert found["step2"]["error"] == "step2: model.safetensors is cut"
    assert found["step3"]["error"].endswith("has no subfolder 'step3'")
    assert found["step4"]["error"] == "RuntimeError: something unforeseen"
    assert (
        "Traceback" in (out / "revisions/run/step4.error.txt").read_text()
        and not (out / "revisions/run/step2.error.txt").exists()
    )
    assert "run, failed (see series.csv): step2, step3, step4" in (out / "tables/table6.md").read_text()
    assert "step2 failed: step2: model.safetensors is cut" in capsys.readouterr().err
    # Mended, the same command fetches these alone, and ends well.
    write_series(series, {"step2": 3, "step3": 4, "step4": 5})
    command(series, out, text, "--revisions=step0,step1,step2,step3,step4,step8")
    assert {row["status"] for row in rows(out)} == {"done"} and not (out / "revisions/run/step4.error.txt").exists()


def test_suspect_revisions_are_flagged_in_table_and_figure(series, tmp_path, text):
    out = tmp_path / "out"
    write_series(series, {"step2": 9, "step16": 17, "step32": 9})  # step2 = step8's weights = the last's
    command(series, out, text, "--revisions=step0,step2,step1,step4,step8,step16,step32")
    found = {row["revision"]: row for row in rows(out)}
    assert (
        found["step2"]["flags"] == "holds the weights of the last revision, step32" and found["step2"]["in_fit"] == "0"
    )
    assert found["step8"]["in_fit"] == "0"
    assert found["step1"]["flags"] == "listed after step2" and found["step1"]["in_fit"] == "1"
    assert found["step16"]["flags"].startswith("weights do not follow from") or found["step16"]["in_fit"] == "1"
    table = (out / "tables/table6.md").read_text()
    assert "step1 (listed after step2; kept), step2 (holds the weights of the last revision, step32)" in table


def test_doubts_about_how_the_last_revision_was_read_are_told(series, tmp_path, text):
    out = tmp_path / "out"
    write_series(series, {"step8": 99})
    command(series, out, text)
    assert rows(out)[-1]["flags"] == "made: up" and rows(out)[-1]["in_fit"] == "1"
    assert "step8 (made: up; kept)" in (out / "tables/table6.md").read_text()


def test_several_series_share_a_table(series, tmp_path, text):
    other = write_series(tmp_path / "other", {f"epoch_{n}": -n for n in range(1, 5)})
    out = tmp_path / "out"
    command(f"{series},{other}", out, text)
    assert list(dict.fromkeys(row["series"] for row in rows(out))) == ["other", "run"]
    assert "own gpt2 | 2 |" in (out / "tables/table6.md").read_text()


def test_one_point_without_revisions(series, tmp_path, text):
    command(series / "step8", tmp_path / "out", text)
    assert [row["revision"] for row in rows(tmp_path / "out")] == ["step8"]
    assert "step8 does not count: 1 trained" in (tmp_path / "out/tables/table6.md").read_text()


def test_a_missing_series_is_a_failure_and_the_others_go_on(series, tmp_path, text):
    (tmp_path / "empty").mkdir()
    command(f"{tmp_path / 'empty'},{series}", tmp_path / "out", text, status=1)
    found = rows(tmp_path / "out")
    assert found[0]["status"] == "failed" and "is no checkpoint" in found[0]["error"] and len(found) == 6


@pytest.mark.parametrize(
    "ids, message",
    [
        (np.zeros((2, 3, 4), int), "holds int64 [2, 3, 4]; expected whole numbers"),
        (np.zeros(9), "holds float64 [9]; expected whole numbers"),
        (np.array([-1] * 50), "has ids from -1 to -1"),
        (np.zeros((3, 8), int), "--context is 16, but the windows of"),
        (np.zeros(0, int), "holds int64 [0]"),
        (np.array([None] * 20), "ids.npy is no readable npy file (it holds Python objects)"),
    ],
)
def test_token_ids_that_cannot_be_are_refused(series, tmp_path, capsys, ids, message):
    np.save(tmp_path / "ids.npy", ids, allow_pickle=True)
    said = refusal(
        capsys, f"--model={series}", f"--token-ids={tmp_path / 'ids.npy'}", "--context=16", f"--out={tmp_path / 'out'}"
    )
    assert message in said and not (tmp_path / "out").exists()


def test_token_ids_are_taken_as_they_are(series, tmp_path, text):
    windows = np.arange(60).reshape(3, 20) % 20
    np.save(tmp_path / "ids.npy", windows)
    assert checkpoints([f"--model={series}", f"--token-ids={tmp_path / 'ids.npy'}", f"--out={tmp_path / 'out'}"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out/tokens/run.npy"), windows)
    np.save(tmp_path / "ids.npy", windows + 5)
    out = tmp_path / "other"
    assert checkpoints([f"--model={series}", f"--token-ids={tmp_path / 'ids.npy'}", f"--out={out}"]) == 1
    assert rows(out)[0]["error"] == "token id 24 is outside the model's vocabulary of 20"


@pytest.mark.parametrize(
    "more, message",
    [
        (("--context=64", "--tokens=64"), "a window of 64 tokens is longer than the model's context of 32"),
        (("--text=SHORT",), "short.txt has 3 tokens, less than one window of 16"),
    ],
)
def test_windows_that_a_model_cannot_take_fail_its_revisions(series, tmp_path, text, more, message):
    (tmp_path / "short.txt").write_text("three short words")
    more = [word.replace("SHORT", str(tmp_path / "short.txt")) for word in more]
    command(series, tmp_path / "out", text, *more, status=1)
    assert {row["error"].split(";")[0] for row in rows(tmp_path / "out")} == {message}


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--series=pythia-71m"], "did you mean pythia-70m?"),
        (["--series=pythia-70m,,"], "empty entry"),
        (["--model=/absent/place"], "neither a folder nor a file here"),
        (["--revisions=9..8"], "the smaller first"),
        (["--tokens=0"], "at least 2"),
        (["--context=1"], "at least 2"),
        (["--text=/absent.txt", "--model=."], "/absent.txt"),
        (["--text=a", "--token-ids=b"], "not allowed with"),
        (["--plan", "--figures"], "not allowed with"),
        (["--serie=x"], "--serie is no flag; did you mean --series?"),
        (["--figures", "--out=/absent"], "holds no measured revisions"),
        (["--model=.", "--tokens=8", "--context=16"], "--tokens is 8, less than one window of 16"),
    ],
)
def test_wrong_arguments_end_with_one_sentence_and_status_2(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *argv)
    assert list(tmp_path.iterdir()) == []


def test_results_of_another_meaning_are_refused_by_name(series, tmp_path, text, capsys):
    out = tmp_path / "out"
    command(series, out, text)
    before = contents(out)
    other = tmp_path / "other.txt"
    other.write_text("other words " * 100)
    same = [f"--model={series}", f"--out={out}", "--context=16"]
    said = refusal(capsys, *same, f"--text={other}", "--tokens=32")
    assert "tokens was 64 and is now 32" in said and "sha256 was" in said and "--fresh" in said
    moved = write_series(tmp_path / "elsewhere" / "run", {"step1": 1})
    said = refusal(capsys, f"--model={moved}", f"--out={out}", "--context=16", f"--text={text}", "--tokens=64")
    assert f"run was {series} and is now {moved}" in said
    assert contents(out) == before
    command(series, out, text, "--fresh", "--tokens=32")
    assert contents(tmp_path / "out.old-1") == before and rows(out)[0]["tokens"] == "32"


@pytest.mark.parametrize(
    "config, message",
    [('{"command": "grid"}', "holds results of the command 'grid'"), ('{"comm', "is damaged"), ("[]", "is damaged")],
)
def test_a_folder_of_something_else_is_refused(series, tmp_path, text, capsys, config, message):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(config)
    assert message in refusal(capsys, f"--model={series}", f"--out={tmp_path / 'out'}", f"--text={text}")
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_a_folder_in_use_is_refused(series, tmp_path, text, capsys):
    out = tmp_path / "out"
    command(series, out, text)
    with Lock(out / "lock"):
        said = refusal(capsys, f"--model={series}", f"--out={out}", f"--text={text}", "--tokens=64", "--context=16")
    assert "is in use by process" in said


def test_a_damaged_record_is_measured_again(series, tmp_path, text):
    out = tmp_path / "out"
    command(series, out, text)
    before = contents(out)
    (out / "revisions/run/step2.json").write_text('{"status": "do')
    command(series, out, text)
    assert contents(out) == before


def test_the_plan_says_the_bytes_and_writes_nothing(series, tmp_path, text, capsys):
    out = tmp_path / "out"
    command(series, out, text, "--plan")
    said = capsys.readouterr().out
    assert "run: 5 revisions (0 done)" in said and "to download: 0 bytes" in said and not out.exists()
    command(series, out, text, "--revisions=1..2")
    capsys.readouterr()
    command(series, out, text, "--plan")
    assert "run: 5 revisions (2 done)" in capsys.readouterr().out


STOP_AT_THE_THIRD = """
import os, signal, sys, time
from qkgeom_jax import series_study
from qkgeom_jax.cli_checkpoints import checkpoints
measure = series_study._measure
def measure_or_stop(study, series, source, begun, last):
    if begun.place == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    return measure(study, series, source, begun, last)
series_study._measure = measure_or_stop
checkpoints(sys.argv[1:])
"""


def test_a_signal_ends_a_measurement_and_the_same_command_goes_on(series, tmp_path, text):
    whole, out = tmp_path / "whole", tmp_path / "out"
    command(series, whole, text)
    given = [f"--model={series}", f"--out={out}", f"--text={text}", "--tokens=64", "--context=16"]
    done = subprocess.run([sys.executable, "-c", STOP_AT_THE_THIRD, *given], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 75 and done.stderr.endswith("stopped; the same command goes on from here\n")
    assert sorted(path.stem for path in (out / "revisions/run").glob("*.json")) == ["step0", "step1"]
    command(series, out, text)
    assert contents(out) == contents(whole)


def test_revision_names_are_safe_as_file_names(series, tmp_path, text):
    out = tmp_path / "out"
    record = series_study.Record("a/../b", "x", "refs/pr/1", error="nothing")
    series_study.write_record(out, record)
    assert [p.relative_to(out).as_posix() for p in out.rglob("*.json")] == ["revisions/a%2F..%2Fb/refs%2Fpr%2F1.json"]


def modules_after(statement):
    """What a fresh process has loaded."""
    code = f"import sys; from qkgeom_jax.cli_checkpoints import checkpoints\n{statement}\n"
    code += "print(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return {name.split(".")[0] for name in done.stderr.split()}


def test_mistakes_load_nothing_heavy():
    loaded = modules_after("try: checkpoints(['--series=x'])\nexcept SystemExit: pass")
    assert not loaded & {"jax", "huggingface_hub", "matplotlib", "safetensors", "scipy"}


def test_redrawing_needs_neither_jax_nor_the_hub(series, tmp_path, text):
    command(series, tmp_path / "out", text)
    loaded = modules_after(f"assert checkpoints(['--figures', '--out={tmp_path / 'out'}']) == 0")
    assert not loaded & {"jax", "huggingface_hub", "safetensors", "optax"}


def test_local_folders_need_no_hub(series, tmp_path, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    command(series, tmp_path / "out", text)


def test_a_hub_series_without_its_client_is_refused_in_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = refusal(capsys, "--series=pythia-70m", f"--out={tmp_path / 'out'}")
    assert "pip install 'qkgeom_jax[checkpoints]'" in said and not (tmp_path / "out").exists()
