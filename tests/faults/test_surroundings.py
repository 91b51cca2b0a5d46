"""Terminals, locales, pipes, clocks, leftovers and caches that are not as one would wish."""

import os
import shutil
import subprocess
import sys
import time

import faulty
import pytest
import tiny

from qkgeom_jax.config import override
from qkgeom_jax.progress import LineProgress

ROOT = faulty.HERE.parents[1]
GRID = str(ROOT / "experiments/grid.py")


def shell(line, *words, **environment):
    """A command line of the shell; $@ are the words."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *map(str, words)], check=False, capture_output=True, timeout=300,
        env=os.environ | {"PYTHON": sys.executable, "GRID": GRID} | environment,
    )  # fmt: skip


def test_no_locale_no_terminal_no_colour(whole, corpus, tmp_path):
    """What has no ASCII in its name cannot be had in an ASCII locale: that is said, and all else works."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "TERM": "dumb", "NO_COLOR": "1"}
    done = shell('"$PYTHON" "$GRID" "$@"', *faulty.arguments(corpus, tmp_path / "out"), **plain)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stderr and b"Traceback" not in done.stderr
    faulty.assert_same(tmp_path / "out", whole)
    done = shell('"$PYTHON" "$GRID" "$@"', *faulty.arguments(corpus, tmp_path / "Ωut"), **plain)
    assert done.returncode == 2 and b"bytes that are not of the locale's encoding" in done.stderr
    (tmp_path / "Ω").mkdir()
    done = shell('cd "$1" && shift && "$PYTHON" "$GRID" "$@"', tmp_path / "Ω", "--depths=1", "--out=out", **plain)
    assert done.returncode == 2 and b"is not UTF-8 here; set PYTHONUTF8=1" in done.stderr
    assert os.listdir(tmp_path / "Ω") == [] and not (tmp_path / "Ωut").exists()


@pytest.mark.parametrize("mode", ["--status", "--verify", "--help"])
def test_nobody_reads_the_output(mode, whole):
    done = shell('set -o pipefail; "$PYTHON" "$GRID" "$@" | true', mode, f"--out={whole}")
    # Whether the reader was gone before the first line decides between the two.
    assert done.returncode in (0, 1, 141) and done.stderr == b""


@pytest.mark.faults
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_descriptors_that_are_closed_from_the_start(closed, whole, corpus, tmp_path):
    """A file that is opened then may be given the number of a standard stream: nothing may be printed into it."""
    done = shell(f'"$PYTHON" "$GRID" "$@" {closed}', *faulty.arguments(corpus, tmp_path / "out"))
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    faulty.assert_same(tmp_path / "out", whole)


@pytest.mark.parametrize("years", [10, -10])
def test_a_clock_that_jumps(years, whole, corpus, tmp_path, monkeypatch, capfd):
    """A day back within a run; years between a run and its resumption, so that what is newest looks oldest, or reversed."""
    now, steps = time.time, []
    monkeypatch.setattr(time, "time", lambda: now() - 86_400 * bool(steps))
    advance = LineProgress.advance
    monkeypatch.setattr(LineProgress, "advance", lambda self, count: (steps.append(count), advance(self, count)))
    faulty.train(corpus, tmp_path, inits="independent")
    assert steps and " -" not in capfd.readouterr().err
    faulty.assert_same_group(tmp_path, whole)
    then = now() + years * 3.2e7
    for at, path in enumerate(sorted(tmp_path.rglob("*"))):
        os.utime(path, (then - at, then - at))
    faulty.train(corpus, tmp_path, inits="independent", epochs=3)
    assert "going on from step 8" in capfd.readouterr().err


def test_the_time_left_is_never_negative(monkeypatch, capsys):
    """It is taken from a clock that cannot be set; what is left is not, even when more steps were made than planned."""
    config = override(tiny.config(), epochs=1)
    progress = LineProgress((config,))
    progress.begin(config)
    progress.advance(0)
    progress.advance(4 * config.training.steps)
    assert progress._left() == "0m00s"


def test_leftovers_of_other_runs(whole, corpus, tmp_path):
    out = tmp_path / "out"
    faulty.train(corpus, out, inits="independent")
    checkpoints = out / "groups" / faulty.GROUPS[1] / "checkpoints"
    shutil.copytree(checkpoints / "8", checkpoints / "12.orbax-checkpoint-tmp-7")
    (checkpoints / "16.orbax-checkpoint-tmp-7").write_text("")
    (out / "tables/.table4.csv.tmp").write_text("half")
    (out / "groups/.DS_Store").write_text("")
    faulty.train(corpus, out)
    (out / "groups/.DS_Store").unlink()
    shutil.rmtree(out / "groups" / faulty.GROUPS[1] / "checkpoints" / "12.orbax-checkpoint-tmp-7", ignore_errors=True)
    (checkpoints / "16.orbax-checkpoint-tmp-7").unlink(missing_ok=True)
    (out / "tables/.table4.csv.tmp").unlink(missing_ok=True)
    faulty.assert_same(out, whole)


def damage(path, how):
    content = path.read_bytes()
    match how:
        case "truncate":
            path.write_bytes(content[: len(content) // 2])
        case "flip":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "delete":
            path.unlink()
        case "zero":
            path.write_bytes(bytes(len(content)))


HOW = ("truncate", "flip", "delete", "zero")


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_token_cache(how, whole, corpus, tmp_path, monkeypatch):
    """Every file of it: the results are those of the text."""
    cache = tmp_path / "cache"
    shutil.copytree(os.environ["XDG_CACHE_HOME"], cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    files = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]
    assert files
    for path in files:
        damage(path, how)
    faulty.train(corpus, tmp_path / "out", inits="independent")
    faulty.assert_same_group(tmp_path / "out", whole)


@pytest.mark.faults
@pytest.mark.parametrize("how", ["truncate", "zero"])
def test_a_damaged_compile_cache(how, whole, corpus, tmp_path):
    """JAX's own, which a user may have switched on."""
    cache = tmp_path / "cache"
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }  # fmt: skip
    for out in ("first", "second"):
        words = faulty.arguments(corpus, tmp_path / out, inits="independent")
        done = shell('"$PYTHON" "$GRID" "$@"', *words, **environment)
        assert done.returncode == 0, done.stderr
        entries = [path for path in cache.iterdir() if path.name.endswith("-cache")]
        assert entries
        for path in entries:
            damage(path, how)
        faulty.assert_same_group(tmp_path / out, whole)
